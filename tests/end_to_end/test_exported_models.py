"""Models that torch scripted, traced or exported are counted like the original."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode, Profile
from tests.helpers.profiling import profile_of

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


def macs(profile: Profile, phase: Any) -> dict[str, int]:
    return {fqn: cost.macs for fqn, cost in profile.by_module(phase).items() if cost.macs}


def check(model: Any) -> Profile:
    profile = profile_of(train, model, model=model if isinstance(model, nn.Module) else None)
    assert profile.root.total("forward").macs == FORWARD
    assert profile.root.total("backward").macs == BACKWARD
    assert profile.uncounted_ops() == {}
    return profile


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_model_is_counted() -> None:
    check(torch.jit.script(MLP()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_model_is_counted() -> None:
    check(torch.jit.trace(MLP(), torch.ones(B, I)))


class Scaled(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2 + 1.5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("memory", [False, True])
def test_frozen_trace_with_numbers_is_counted_in_its_first_call(memory: bool) -> None:
    """TorchScript then optimizes the graph, and asks which of its numbers are equal."""
    model, x = Scaled().eval(), torch.ones(B, I)
    frozen = torch.jit.freeze(torch.jit.trace(model, x))
    with FlopCounterMode(display=False, memory=memory) as counter:
        out = frozen(x)
    assert torch.equal(out, model(x))
    assert counter.profile.uncounted_ops() == {}
    total = counter.profile.total()
    adds = B * (H + O)  # of biases
    assert (total.macs, total.flops) == (FORWARD, 2 * FORWARD + adds + B * H + 2 * B * O)


def test_exported_model_is_counted() -> None:
    check(torch.export.export(MLP(), (torch.ones(B, I),)).module())


def test_symbolically_traced_model_keeps_the_names_of_leaves() -> None:
    profile = check(torch.fx.symbolic_trace(MLP()))
    assert macs(profile, "forward")["up"] == B * I * H


def test_graph_of_make_fx_is_counted() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    w = torch.ones(I, O)
    graph = make_fx(lambda x: x @ w)(torch.ones(B, I))
    assert profile_of(graph, torch.ones(B, I)).total().macs == B * I * O


def test_export_inside_the_block_works() -> None:
    found = []
    profile_of(lambda: found.append(torch.export.export(MLP(), (torch.ones(B, I),), strict=False)))
    assert found[0].module()(torch.ones(B, I)).shape == (B, O)
