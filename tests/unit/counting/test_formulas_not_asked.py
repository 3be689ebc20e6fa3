"""Formulas in functions that torch traces or transforms: asked, or a warning says why not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import map as hop_map
from torch._higher_order_ops import scan, while_loop
from torch.nn import functional as F

from dispatch_flops import OpCost, Profile, _torch
from dispatch_flops.errors import UncountedWarning
from tests.helpers.composites import COMPOSITES, WEIGHT, C, D, N, S, aten, stated
from tests.helpers.opaque_blocks import BLOCK, LINEAR, A, Block, I, block_formula
from tests.helpers.profiling import TORCH, profile_of

pytestmark = pytest.mark.usefixtures("fresh_compiler")

STEPS = 7 if TORCH >= (2, 13) else 8  # of a scan; older releases run one more for shapes


def asked(function: Callable[[], Any], mapping: Any) -> Profile:
    """Return the profile of a function; raises what is issued as a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncountedWarning)
        profile = profile_of(function, custom_mapping=mapping)
    assert not profile.uncounted_ops()
    return profile


def not_asked(function: Callable[[], Any], mapping: Any, name: str, reason: str) -> Profile:
    """Return the profile of a function; check that one warning and a note say why."""
    with pytest.warns(UncountedWarning, match=f"{name} are counted; .* asked: {reason}") as caught:
        profile = profile_of(function, custom_mapping=mapping)
    assert len([one for one in caught if one.category is UncountedWarning]) == 1
    assert [note for note in profile.notes if note.startswith(f"{name}: ") and reason in note]
    return profile


# -- functions of higher-order operators ----------------------------------------------------------


def in_cond(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out: Tensor = torch.cond(x.sum() > 0, call, lambda y: y.clone(), (x,))
    return out


def in_scan(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out: Tensor = scan(lambda carry, y: (call(carry), carry + y), x, torch.ones(7, *x.shape))[0]
    return out


def in_map(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return hop_map(call, torch.stack([x] * 7))


def in_while_loop(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    start = torch.tensor(0), x
    out: Tensor = while_loop(lambda i, y: i < 4, lambda i, y: (i + 1, call(y)), start)[1]
    return out


PLACES = [
    pytest.param(in_cond, 1, "cond", id="cond"),
    pytest.param(in_scan, STEPS, "scan", id="scan"),
    pytest.param(in_map, 7, "map_impl", id="map"),
    pytest.param(in_while_loop, 4, "while_loop", id="while_loop"),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("place", "times", "operator"), PLACES)
def test_formula_of_a_module_in_a_higher_order_operator_is_not_asked(
    place: Any, times: int, operator: str, grad: bool
) -> None:
    block = Block()

    def run() -> None:
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                place(block, torch.ones(A, I))

    mapping = {Block: block_formula}
    profile = not_asked(run, mapping, "module.Block", f"the call is in {operator}")
    assert profile.total("forward").macs == 2 * times * 2 * LINEAR


def test_formula_of_a_module_in_cond_is_not_asked_where_the_code_was_compiled_before() -> None:
    block = Block()
    run = lambda: in_cond(block, torch.ones(A, I))  # noqa: E731
    run()
    profile = not_asked(run, {Block: block_formula}, "module.Block", "the call is in cond")
    assert profile.total().macs == 2 * LINEAR


def test_formula_of_a_module_in_cond_in_scan_is_not_asked() -> None:
    block = Block()
    run = lambda: in_scan(lambda y: in_cond(block, y), torch.ones(A, I))  # noqa: E731
    not_asked(run, {Block: block_formula}, "module.Block", "the call is in scan")


def test_formula_of_a_module_in_a_branch_that_python_takes_is_asked() -> None:
    block = Block()
    run = lambda: torch.cond(True, block, lambda y: y, (torch.ones(A, I),))  # noqa: E731
    profile = asked(run, {Block: block_formula})
    assert profile.total().macs == BLOCK


def test_cond_in_a_module_with_a_formula_is_not_warned_of() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return in_cond(self.block, x)

    model = Outer()
    mapping = {Block: block_formula, Outer: lambda module, x, **_: OpCost(macs=3, flops=6)}
    assert asked(lambda: model(torch.ones(A, I)), mapping).total().macs == 3


def test_formula_of_a_composite_in_scan_is_asked_without_gradients_alone() -> None:
    weight = torch.ones(C, C)
    run = lambda: in_scan(lambda y: F.linear(y, weight), torch.ones(N, C))  # noqa: E731
    profile = asked(run, {aten.linear: stated})
    assert profile.total().macs == STEPS * 17 * N * C
    weight.requires_grad_()
    profile = not_asked(run, {aten.linear: stated}, "aten.linear", "the call is in scan")
    assert profile.total().macs == STEPS * N * C * C


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("place", "times"), [(in_cond, 1), (in_map, 7), (in_while_loop, 4)])
def test_formula_of_a_composite_in_other_operators_is_asked(
    place: Any, times: int, grad: bool
) -> None:
    weight = torch.ones(C, C, requires_grad=grad)
    run = lambda: place(lambda y: F.linear(y, weight), torch.ones(N, C)).sum()  # noqa: E731
    profile = asked(lambda: run().backward() if grad else run(), {aten.linear: stated})
    assert profile.total("forward").macs == times * 17 * N * C


# -- torch.func -----------------------------------------------------------------------------------

EACH = pytest.mark.parametrize("op", COMPOSITES, ids=str)


@EACH
def test_formula_of_a_composite_in_a_gradient_of_torch_func_is_asked(op: Any) -> None:
    call, shape, elements, macs = COMPOSITES[op]
    gradient = torch.func.grad(lambda x: call(x).sum())
    profile = asked(lambda: gradient(torch.ones(shape)), {op: stated})
    assert profile.total("forward").macs == 17 * elements
    assert profile.total("backward").macs == macs
    profile = asked(lambda: torch.func.vjp(call, torch.ones(shape)), {op: stated})
    assert profile.total().macs == 17 * elements


@EACH
def test_formula_of_a_composite_in_vmap_is_not_asked(op: Any) -> None:
    call, shape, elements, macs = COMPOSITES[op]
    run = lambda: torch.vmap(call)(torch.ones(S, *shape))  # noqa: E731
    if op is aten.matmul:  # vmap runs the operator itself, on the batch
        assert asked(run, {op: stated}).total().macs == S * 17 * elements
        return
    profile = not_asked(run, {op: stated}, str(op), "the call is on a sample of torch.vmap")
    assert profile.total().macs == S * macs


@pytest.mark.parametrize("op", [aten.linear, aten.layer_norm, aten.conv2d], ids=str)
def test_formula_of_a_composite_in_a_gradient_of_each_sample_is_not_asked(op: Any) -> None:
    call, shape, _, macs = COMPOSITES[op]
    run = lambda: torch.vmap(torch.func.grad(lambda x: call(x).sum()))(torch.ones(S, *shape))  # noqa: E731
    profile = not_asked(run, {op: stated}, str(op), "the call is on a sample of torch.vmap")
    assert profile.total("forward").macs == S * macs


@pytest.mark.parametrize("op", [aten.linear, aten.matmul, aten.einsum], ids=str)
def test_formula_of_a_composite_with_tangents_is_not_asked(op: Any) -> None:
    call, shape, _, macs = COMPOSITES[op]
    x = torch.ones(shape)
    run = lambda: torch.func.jvp(call, (x,), (x,))  # noqa: E731
    profile = not_asked(run, {op: stated}, str(op), "the call is in forward-mode autograd")
    # of the result, of the tangent, and of the weight's tangent, which is zeros
    assert profile.total().macs == 3 * macs


def test_formula_of_a_module_with_tangents_is_not_asked() -> None:
    model, x = nn.Linear(C, D), torch.ones(N, C)
    run = lambda: torch.func.jvp(model, (x,), (x,))  # noqa: E731
    profile = not_asked(
        run, {nn.Linear: stated}, "module.Linear", "the call is in forward-mode autograd"
    )
    assert profile.total().macs == 3 * N * C * D


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_formula_of_a_composite_of_a_library_is_asked_in_transforms() -> None:
    """torch.vmap runs such an operator on each sample, one by one."""
    with torch.library._scoped_library("test_not_asked", "DEF") as library:
        library.define("product(Tensor x, Tensor w) -> Tensor")
        library.impl("product", lambda x, w: torch.mm(x, w.t()), "CompositeImplicitAutograd")
        op = torch.ops.test_not_asked.product
        gradient = torch.func.grad(lambda x: op(x, WEIGHT).sum())
        profile = asked(lambda: gradient(torch.ones(N, C)), {op: stated})
        assert profile.total("forward").macs == 17 * N * D
        samples = torch.vmap(lambda x: op(x, WEIGHT))
        profile = asked(lambda: samples(torch.ones(S, N, C)), {op: stated})
        assert profile.total().macs == S * 17 * N * D


def test_kernels_that_show_composites_are_registered_without_a_warning_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_torch, "_has_replaced", False)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            profile_of(F.linear, torch.ones(N, C), WEIGHT, custom_mapping={aten.linear: stated})
    finally:
        torch.set_warn_always(False)
    assert torch.func.grad(lambda x: F.linear(x, WEIGHT).sum())(torch.ones(N, C)).shape == (N, C)
