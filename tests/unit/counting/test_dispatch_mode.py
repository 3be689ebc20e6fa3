"""Counts under grad modes, autocast, function transforms and other modes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dispatch_flops import FlopCounterMode, Profile, overridden
from tests.helpers.modes import OperatorNames
from tests.helpers.profiling import profile_of

B, S, D, F = 2, 5, 8, 12
HEADS = 2


class Layer(nn.Module):
    """Layers whose operators are composite: only inference mode dispatches them whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.conv = nn.Conv1d(D, F, 3, padding=1)
        self.gru = nn.GRU(F, D, batch_first=True)
        self.table = nn.Embedding(7, D)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(tokens))
        heads = self.qkv(x).view(B, S, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
        x = self.out(mixed.reshape(B, S, D))
        x = self.gru(self.conv(x.mT).mT)[0]
        return torch.einsum("bsd,btd->bst", x, x)


GRU = B * S * 3 * D * (F + D)
MACS = {
    "": B * S * (3 * D * D + D * D + 2 * S * D + 3 * D * F + S * D) + GRU,
    "qkv": B * S * D * 3 * D,
    "out": B * S * D * D,
    "conv": B * S * D * F * 3,
    "gru": GRU,
}
TOKENS = torch.ones(B, S, dtype=torch.long)


def macs(profile: Profile, phase: Any = "forward") -> dict[str, int]:
    return {fqn: cost.macs for fqn, cost in profile.by_module(phase).items() if cost.macs}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
@pytest.mark.parametrize("outside", [True, False])
def test_grad_mode_does_not_change_macs(
    mode: Callable[[], AbstractContextManager[Any]], outside: bool
) -> None:
    model = Layer()

    def run() -> None:
        with mode():
            model(TOKENS)

    if outside:
        with mode():
            profile = profile_of(model, TOKENS, model=model)
    else:
        profile = profile_of(run, model=model)
    assert macs(profile) == MACS
    assert profile.uncounted_ops() == {}


def test_inference_mode_keeps_the_result() -> None:
    model = Layer()
    # Under any mode torch rounds the gates of a GRU differently; the reference has one, too.
    with torch.inference_mode(), OperatorNames():
        expected, found = model(TOKENS), []
        profile_of(lambda: found.append(model(TOKENS)))
    assert torch.equal(expected, found[0])


def test_grad_mode_does_not_change_flops() -> None:
    model = Layer()
    with torch.inference_mode():
        inference = profile_of(model, TOKENS, model=model)
    with torch.no_grad():
        no_grad = profile_of(model, TOKENS, model=model)
    assert inference.total().flops == no_grad.total().flops


def test_autocast_products_have_the_reduced_dtype() -> None:
    model, x = nn.Linear(D, F), torch.ones(B, D)

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x).sum().backward()

    profile = profile_of(run, model=model)
    assert (profile.total("forward").macs, profile.total("backward").macs) == (
        B * D * F,
        B * D * F,
    )
    products = [op for op in profile.op_totals() if op.cost is not None and op.cost.macs]
    assert {op.dtype for op in products} == {"bfloat16"}


def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ weight).exp().sum()


class TestFunctionTransforms:
    weight = torch.ones(D, F)
    x = torch.ones(B, S, D)
    forward = B * S * D * F

    def test_grad_counts_forward_and_backward(self) -> None:
        profile = profile_of(torch.func.grad(loss), self.weight, self.x)
        assert profile.total("forward").macs == self.forward
        assert profile.total("backward").macs == self.forward

    def test_vmap_counts_the_whole_batch(self) -> None:
        one = lambda x: x @ self.weight  # noqa: E731
        assert profile_of(torch.func.vmap(one), self.x).total().macs == self.forward

    def test_vmap_of_grad_counts_forward_and_backward(self) -> None:
        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        assert profile_of(per_sample, self.weight, self.x).total().macs == 2 * self.forward

    def test_jvp_counts_three_products(self) -> None:
        # d(xw) = dx w + x dw: torch fills dw with zeros and multiplies
        run = lambda: torch.func.jvp(lambda x: x @ self.weight, (self.x,), (self.x,))  # noqa: E731
        assert profile_of(run).total().macs == 3 * self.forward

    def test_jacrev_counts_one_backward_row_per_output(self) -> None:
        square, x = torch.ones(D, D), torch.ones(D)
        run = torch.func.jacrev(lambda x: square @ x)
        assert profile_of(run, x).total().macs == D * D + D * D * D

    def test_functional_call_is_counted_as_a_call(self) -> None:
        model = nn.Linear(D, F)
        weights = {name: value.detach() + 1 for name, value in model.named_parameters()}
        run = lambda: torch.func.functional_call(model, weights, (self.x,))  # noqa: E731
        assert macs(profile_of(run, model=model)) == {"": self.forward}

    def test_functionalize_counts_the_product_once(self) -> None:
        def in_place(x: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(B, S, F)
            out.add_(x @ self.weight)
            return out

        assert profile_of(torch.func.functionalize(in_place), self.x).total().macs == self.forward


def test_default_device_does_not_change_macs() -> None:
    with torch.device("meta"):
        model = Layer()
        profile = profile_of(lambda: model(torch.ones(B, S, dtype=torch.long)), model=model)
    assert macs(profile) == MACS

    def build_inside() -> None:
        with torch.device("meta"):
            nn.Linear(D, F)(torch.ones(B, D))

    assert profile_of(build_inside).total().macs == B * D * F


class Doubling(TorchDispatchMode):
    """Mode that runs every product twice."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            func(*args)
        return func(*args, **(kwargs or {}))


class TestOtherModes:
    a, b = torch.ones(B, D), torch.ones(D, F)

    def test_outer_mode_sees_the_same_operators(self) -> None:
        with OperatorNames() as bare:
            self.a @ self.b
        with OperatorNames() as watching:
            profile = profile_of(lambda: self.a @ self.b)
        assert watching.seen == bare.seen
        assert profile.total().macs == B * D * F

    def test_operators_that_an_inner_mode_adds_are_counted(self) -> None:
        def run() -> None:
            with Doubling():
                self.a @ self.b

        assert profile_of(run).total().macs == 2 * B * D * F

    def test_operators_that_an_outer_mode_adds_are_not_counted(self) -> None:
        with Doubling():
            assert profile_of(lambda: self.a @ self.b).total().macs == B * D * F

    def test_counter_of_torch_nests_both_ways(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode as TorchCounter

        with TorchCounter(display=False) as theirs:
            ours = profile_of(lambda: self.a @ self.b)
        assert theirs.get_total_flops() == ours.total().flops == 2 * B * D * F

        with FlopCounterMode(display=False) as counter, TorchCounter(display=False) as theirs:
            self.a @ self.b
        assert theirs.get_total_flops() == counter.get_total_flops()

    def test_function_mode_does_not_change_macs(self) -> None:
        class Swap(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                return func(*args, **(kwargs or {}))

        with Swap():
            assert profile_of(lambda: self.a @ self.b).total().macs == B * D * F


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "area"])
def test_interpolate_in_inference_mode_runs_the_kernel_of_torch(mode: str) -> None:
    """It is not the decomposition for compilers, which has other results and 6 to 12 operators."""
    x = torch.randn(1, 3, 16, 17)
    with torch.inference_mode():
        bare = nn.functional.interpolate(x, scale_factor=2, mode=mode)
        with FlopCounterMode(display=False) as inference:
            counted = nn.functional.interpolate(x, scale_factor=2, mode=mode)
    with torch.no_grad(), FlopCounterMode(display=False) as elsewhere:
        nn.functional.interpolate(x, scale_factor=2, mode=mode)
    assert torch.equal(bare, counted)
    assert inference.profile.by_operator() == elsewhere.profile.by_operator()


def test_other_modes_do_not_see_what_formulas_run() -> None:
    aten = torch.ops.aten
    x = torch.ones(3, 5)

    def run() -> None:
        x + x.int()  # which dtype the two are promoted to
        aten.mm.default(x, torch.ones(5, 2))

    with OperatorNames() as mode:
        run()
        expected = [*mode.seen]
        mode.seen.clear()
        formulas = {aten.mm: lambda a, b, **_: int(a.sum())}
        with overridden(formulas), FlopCounterMode(display=False) as counter:
            run()
    assert mode.seen == expected
    assert counter.get_flop_counts()["Global"][aten.mm] == 3 * 5
