"""Formulas that do not fit their operators are refused at registration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops import FlopCounterMode
from dispatch_flops.errors import FormulaError
from dispatch_flops.operators import registry
from dispatch_flops.operators.registry import overridden, register_flops

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("registry_unchanged")


def without_out(x: Tensor) -> int:
    return 1


def with_out_by_position(x: Tensor, out: Tensor, /) -> int:
    return 1


def with_one_argument(x: Tensor, *, out: Tensor) -> int:
    return 1


def with_four_required_arguments(a: Any, b: Any, c: Any, d: Any, *, out: Tensor) -> int:
    return 1


def with_a_required_keyword(a: Any, b: Any, *, bias: Any, out: Tensor) -> int:
    return 1


def with_a_name_that_is_not_an_argument(*, self: Tensor, mat_2: Tensor | None = None,
                                        out: Tensor, **_: Any) -> int:  # fmt: skip
    return 1


def with_too_few_names(*, self: Tensor, out: Tensor) -> int:
    return 1


REFUSED: dict[str, tuple[Any, Any, bool, str]] = {
    "not a function": (aten.mm, 2 * 3, False, "6 is not a function; pass the formula itself"),
    "no out": (aten.mm, without_out, False, r"\(x\) does not accept the operator's result"),
    "out by position": (aten.mm, with_out_by_position, False, "does not accept the operator's"),
    "no out, module": (nn.Linear, without_out, False, "does not accept the operator's result"),
    "no out, unloaded": ("no_lib::op", without_out, False, "does not accept the operator's"),
    "no out, higher order": (torch.ops.higher_order.cond, without_out, False, "does not accept"),
    "too few, module": (nn.Linear, with_one_argument, False, "Linear, .* too many positional"),
    "too many, module": (nn.GRU, with_four_required_arguments, False, "missing a required"),
    "too few": (aten.mm.default, with_one_argument, False, "too many positional arguments"),
    "too many": (aten.mm, with_four_required_arguments, False, "missing a required argument"),
    "keyword": (aten.mm, with_a_required_keyword, False, "missing a required .*argument: 'bias'"),
    "typo": (aten.mm, with_a_name_that_is_not_an_argument, True, "parameter 'mat_2' is not an"),
    "too few names": (aten.mm, with_too_few_names, True, "unexpected keyword argument 'mat2'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_register_flops_of_a_formula_that_does_not_fit_raises(case: str) -> None:
    target, formula, by_name, message = REFUSED[case]
    with pytest.raises(FormulaError, match=message):
        register_flops(target, override=True, by_name=by_name)(formula)


def test_custom_mapping_and_overridden_with_a_formula_that_does_not_fit_raise() -> None:
    with pytest.raises(FormulaError, match="accept the operator's result"):
        FlopCounterMode(custom_mapping={aten.mm: without_out})
    with pytest.raises(FormulaError, match="accept the operator's result"):
        overridden({aten.mm: without_out}).__enter__()


def for_one_overload(x: Tensor, dim: int, keepdim: bool = False, *, out: Any) -> int:
    return 1


def without_optional_arguments(x: Tensor, *, out: Tensor) -> int:
    return 1


def of_a_module(module: nn.Module, x: Tensor, *, out: Tensor) -> int:
    return 1


def of_a_module_by_name(module: nn.Module, *, input: Tensor, hx: Any = None, out: Any) -> int:
    return 1


class OfInstances(nn.Module):
    """Each instance has a forward of its own."""

    def forward(self) -> None: ...


class TakesAny(nn.Module):
    def forward(self, *args: Tensor) -> Tensor:
        return args[0]


class WithOptions(nn.Module):
    def forward(self, x: Tensor, scale: Any = None, mask: Any = None) -> Tensor:
        return x


class OfAFunction(nn.Module):
    forward = staticmethod(torch.relu)  # type: ignore[assignment]


def _with_ones(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def run(self: nn.Module, x: Tensor) -> Tensor:
        return cast(Tensor, forward(self, x, torch.ones_like(x)))

    return run


class Decorated(nn.Module):
    @_with_ones
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other


def of_a_module_with_a_mask(module: nn.Module, hidden: Tensor, *, mask: Any, out: Any) -> int:
    return 1


def of_torchs_counter(a_shape: Any, b_shape: Any, *, out_shape: Any = None) -> int:
    return 1


ACCEPTED: dict[str, tuple[Any, Callable[..., Any], bool]] = {
    "an overload of several": (aten.max, for_one_overload, False),
    "calls without optional arguments": (aten.gelu, without_optional_arguments, False),
    "torch's style": (aten.mm, of_torchs_counter, False),
    "any arguments": (aten.mm, lambda *_, **__: 1, False),
    "a C function": (aten.mm, max, False),
    "names of an unloaded operator": ("no_lib::op", with_a_name_that_is_not_an_argument, True),
    "a module": (nn.Linear, of_a_module, False),
    "a module's arguments by name": (nn.GRU, of_a_module_by_name, False),
    "a module with a forward of its own": (OfInstances, of_a_module, False),
    "a module that takes any arguments": (TakesAny, without_optional_arguments, False),
    "a module's option by name": (WithOptions, of_a_module_with_a_mask, False),
    "a module whose forward is a function": (OfAFunction, of_a_module, False),
    "a module whose forward is wrapped": (Decorated, of_a_module, False),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_register_flops_of_a_formula_that_some_call_fits_accepts_it(case: str) -> None:
    target, formula, by_name = ACCEPTED[case]
    register_flops(target, override=True, by_name=by_name)(formula)
    registry.unregister_flops(target)


def test_register_flops_of_a_refused_override_keeps_the_formula_before() -> None:
    register_flops(aten.mm, override=True)(without_optional := lambda *_, **__: 7)
    with pytest.raises(FormulaError):
        register_flops(aten.mm, override=True)(without_out)
    rule = registry.lookup(aten.mm.default)
    assert rule is not None
    assert rule.formula is without_optional
    registry.unregister_flops(aten.mm)
