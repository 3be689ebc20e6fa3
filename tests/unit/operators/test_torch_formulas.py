"""Formulas written for ``torch.utils.flop_counter`` are accepted and found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils import flop_counter

from dispatch_flops import FlopCounterMode
from dispatch_flops.operators.registry import lookup
from dispatch_flops.operators.torch_formulas import accept_torch_style, registered_with_torch

A, B = torch.ones(2, 3), torch.ones(3, 5)
ARGUMENTS = {"out": torch.ones(2, 5), "scale": A}


@torch.library.custom_op("dispatch_flops_torch_formulas::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


PRODUCT = torch.ops.dispatch_flops_torch_formulas.product


def of_shapes(a: Any, b: Any, out_shape: Any = None, scale: Any = None) -> Any:
    return a, b, out_shape, scale


def of_tensors(a: Any, b: Any, out_val: Any = None, scale: Any = None) -> Any:
    return a, b, out_val, scale


def of_this_package(a: Any, b: Any, *, out: Any, scale: Any) -> Any:
    return a, b, out, scale


@pytest.fixture
def registered() -> Iterator[Callable[..., Any]]:
    @flop_counter.register_flop_formula(PRODUCT)
    def formula(a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return 2 * int(a[0]) * int(a[1]) * int(b[1])

    yield formula
    flop_counter.flop_registry.pop(PRODUCT)


def test_accept_torch_style_of_a_formula_of_shapes_passes_shapes() -> None:
    formula = accept_torch_style(of_shapes)
    assert formula(A, [B], **ARGUMENTS) == ((2, 3), [(3, 5)], (2, 5), (2, 3))


@pytest.mark.parametrize("is_marked", [False, True])
def test_accept_torch_style_of_a_formula_of_tensors_passes_the_result(is_marked: bool) -> None:
    def formula(*args: Any, **kwargs: Any) -> Any:
        return of_tensors(*args, **kwargs)

    if is_marked:
        formula._get_raw = True  # type: ignore[attr-defined]
    accepted = accept_torch_style(formula if is_marked else of_tensors)
    assert accepted(A, B, **ARGUMENTS) == (A, B, ARGUMENTS["out"], A)


@pytest.mark.parametrize("formula", [of_this_package, max])
def test_accept_torch_style_of_another_formula_returns_it(formula: Callable[..., Any]) -> None:
    assert accept_torch_style(formula) is formula


def test_registered_with_torch_finds_a_users_formula(registered: Callable[..., Any]) -> None:
    formula = registered_with_torch(PRODUCT.default)
    assert formula is not None
    assert formula(A, B, out=A @ B) == 2 * 2 * 3 * 5
    rule = lookup(PRODUCT.default)
    assert rule is not None and "flop_counter" in rule.note


def test_registered_with_torch_without_a_formula_is_none() -> None:
    assert registered_with_torch(PRODUCT.default) is None
    assert registered_with_torch(torch.ops.aten.mm.default) is None
    assert registered_with_torch(torch.ops.higher_order.cond) is None


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12),
    reason="torch 2.11 refuses formulas of higher-order operators",
)
def test_registered_with_torch_finds_formulas_of_higher_order_operators() -> None:
    class Twice(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("dispatch_flops_twice")

        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x)

    twice = Twice()
    twice.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda x: x + x)
    twice.py_autograd_impl(twice)

    @flop_counter.register_flop_formula(twice)
    def formula(shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return 7 * int(shape[0]) * int(out_shape[1])

    try:
        found = registered_with_torch(twice)
        assert found is not None
        assert found(A, out=A) == 7 * 2 * 3
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            twice(A)
        assert counter.get_total_flops() == 7 * 2 * 3
        assert not counter.profile.uncounted_ops()
    finally:
        flop_counter.flop_registry.pop(twice)
    assert registered_with_torch(twice) is None


def test_lookup_finds_formulas_that_torch_holds_for_kernels() -> None:
    def kernel() -> None:
        pass

    flop_counter.flop_registry[kernel] = lambda *_, out_val=None, **__: 7
    try:
        rule = lookup(kernel)
        assert rule is not None
        assert rule.formula(out=None) == 7
    finally:
        flop_counter.flop_registry.pop(kernel)
