"""Operators of the user's own, and models that torch has made opaque: counted all the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import OpCost, Profile, register_flops, unregister_flops
from dispatch_flops.errors import UncountedWarning
from tests.helpers.profiling import profile_of

_NUMBERS = itertools.count()
B, I, H, O = 3, 5, 7, 11  # noqa: E741
FORWARD = B * (I * H + H * O)
BACKWARD = B * (I * H + 2 * H * O)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(I, H)
        self.down = nn.Linear(H, O)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def train(model: Any) -> None:
    model(torch.ones(B, I)).sum().backward()


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("dispatch_flops_test", "FRAGMENT") as made:
        yield made


@pytest.fixture
def fused() -> Any:
    """A product with a backward of its own, opaque to dispatch; each has a name of its own."""

    @torch.library.custom_op(f"dispatch_flops_fused::product{next(_NUMBERS)}", mutates_args=())
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    product.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
    product.register_autograd(
        lambda ctx, grad: (grad @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return product


class TestCustomOps:
    def test_without_a_formula_it_is_listed_and_its_backward_counts(self, fused: Any) -> None:
        x, w = (torch.ones(B, I, requires_grad=True), torch.ones(I, O, requires_grad=True))
        with pytest.warns(UncountedWarning, match="dispatch_flops_fused.product"):
            profile = profile_of(lambda: fused(x, w).sum().backward())
        assert profile.uncounted_ops() == {str(fused._opoverload): 1}
        assert profile.total("forward").macs == 0
        assert profile.total("backward").macs == 2 * B * I * O

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_with_a_formula(self, fused: Any, device: str) -> None:
        @register_flops(fused)
        def cost(x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor, **_: Any) -> OpCost:
            macs = out.numel() * x.shape[1]
            return OpCost(macs=macs, flops=2 * macs)

        try:
            x = torch.ones(B, I, device=device, requires_grad=True)
            w = torch.ones(I, O, device=device, requires_grad=True)
            profile = profile_of(lambda: fused(x, w).sum().backward())
        finally:
            unregister_flops(fused)
        assert profile.total("forward").macs == B * I * O
        assert profile.total("backward").macs == 2 * B * I * O

    def test_a_kernel_from_a_library_fragment(self, library: torch.library.Library) -> None:
        library.define("cube(Tensor x) -> Tensor")
        library.impl("cube", lambda x: x @ x @ x, "CPU")
        op = torch.ops.dispatch_flops_test.cube
        square = torch.ones(I, I)
        with pytest.warns(UncountedWarning, match="cube"):
            assert profile_of(op, square).total().macs == 0
        mapping = {op: lambda x, *, out, **_: OpCost(macs=2 * x.shape[0] ** 3)}
        assert profile_of(op, square, custom_mapping=mapping).total().macs == 2 * I**3

    def test_triton_op_is_one_operator(self) -> None:
        triton_op = pytest.importorskip("torch.library").triton_op

        @triton_op("dispatch_flops_triton::double", mutates_args=())
        def double(x: torch.Tensor) -> torch.Tensor:
            return x + x

        mapping = {double: lambda x, *, out, **_: x.numel()}
        profile = profile_of(double, torch.ones(B, I), custom_mapping=mapping)
        assert profile.total().flops == B * I


def macs(profile: Profile, phase: Any) -> dict[str, int]:
    return {fqn: cost.macs for fqn, cost in profile.by_module(phase).items() if cost.macs}


class TestOpaqueModules:
    def check(self, model: Any) -> Profile:
        profile = profile_of(train, model, model=model if isinstance(model, nn.Module) else None)
        assert profile.root.total("forward").macs == FORWARD
        assert profile.root.total("backward").macs == BACKWARD
        assert profile.uncounted_ops() == {}
        return profile

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_script(self) -> None:
        self.check(torch.jit.script(MLP()))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_trace(self) -> None:
        self.check(torch.jit.trace(MLP(), torch.ones(B, I)))

    def test_export(self) -> None:
        self.check(torch.export.export(MLP(), (torch.ones(B, I),)).module())

    def test_fx_keeps_the_names_of_leaves(self) -> None:
        profile = self.check(torch.fx.symbolic_trace(MLP()))
        assert macs(profile, "forward")["up"] == B * I * H

    def test_make_fx(self) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        w = torch.ones(I, O)
        graph = make_fx(lambda x: x @ w)(torch.ones(B, I))
        assert profile_of(graph, torch.ones(B, I)).total().macs == B * I * O

    def test_exporting_inside_the_block_works(self) -> None:
        found = []
        profile_of(
            lambda: found.append(torch.export.export(MLP(), (torch.ones(B, I),), strict=False))
        )
        assert found[0].module()(torch.ones(B, I)).shape == (B, O)
