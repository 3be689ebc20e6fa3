"""Tokens of the experts of mixtures, and parameters that took part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops import FlopCounterMode
from tests.helpers.attributing import plain, rows, train
from tests.helpers.profiling import profile_of


def test_parameters_of_an_uncalled_projection_are_active() -> None:
    model = nn.MultiheadAttention(6, 2, bias=False)
    x = torch.randn(3, 2, 6)
    profile = profile_of(lambda: model(x, x, x), model=model)
    assert profile.uncalled_modules() == []
    assert profile.node("out_proj").active_params == 6 * 6
    assert (profile.root.active_params, profile.total_params) == (4 * 36, 4 * 36)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 7, bias=False)
        self.down = nn.Linear(7, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Mixture(nn.Module):
    """Mixture that sends row i to expert ``routes[i]``."""

    def __init__(self, experts: int, container: str = "experts") -> None:
        super().__init__()
        self.container = container
        self.add_module(container, nn.ModuleList(Expert(5) for _ in range(experts)))

    def forward(self, x: Tensor, routes: list[int]) -> Tensor:
        flat = x.reshape(-1, 5)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(getattr(self, self.container)):
            chosen = torch.tensor([row for row, route in enumerate(routes) if route == i])
            if len(chosen):
                out = out.index_add(0, chosen, expert(flat[chosen]))
        return out


def test_experts_have_tokens_and_active_parameters() -> None:
    model = Mixture(4)
    routes = [0, 2, 2, 0, 2, 3]
    profile = profile_of(train, model, torch.randn(2, 3, 5), routes, model=model)
    expert = 5 * 7 + 7 * 5
    assert (profile.root.active_params, profile.total_params) == (3 * expert, 4 * expert)
    tokens = {node.fqn: node.tokens for node in profile.root.walk() if node.tokens is not None}
    assert tokens == {"experts.0": 2, "experts.1": 0, "experts.2": 3, "experts.3": 1}
    assert profile.node("experts.2").total("forward").macs == 3 * expert
    assert profile.node("experts.1").calls == 0


def test_tokens_add_up_over_steps_without_recomputation() -> None:
    from torch.utils.checkpoint import checkpoint

    model = Mixture(2)
    x = torch.randn(3, 5, requires_grad=True)

    def steps() -> None:
        for routes in ([0, 0, 1], [0, 1, 1]):
            checkpoint(model, x, routes, use_reentrant=False).sum().backward()

    profile = profile_of(steps, model=model)
    assert [profile.node(f"experts.{i}").tokens for i in range(2)] == [2 + 1, 1 + 2]
    assert profile.node("experts.0.up").own("recompute").macs == 3 * 5 * 7


def test_modules_of_other_lists_have_no_tokens() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(plain(3, 5))
    model.expertise = nn.Sequential(nn.Linear(3, 5))
    profile = profile_of(model.layers[0], rows(2, 3), model=model)
    assert all(node.tokens is None for node in profile.nodes())


def test_tokens_of_keyword_calls_and_compiled_experts_are_counted() -> None:
    model = nn.Module()
    model.experts = nn.ModuleList(
        [Expert(5), torch.compile(Expert(5), backend="eager"), Expert(5)]  # type: ignore[list-item]
    )

    def run() -> None:
        model.experts[0](x=torch.ones(3, 5))
        model.experts[1](torch.ones(2, 5))
        model.experts[1](x=torch.ones(2, 2, 5))

    profile = profile_of(run, model=model)
    assert [profile.node(f"experts.{i}").tokens for i in range(3)] == [3, 2 + 2 * 2, 0]


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::torch.jit.TracerWarning",
    "ignore::dispatch_flops.errors.UncountedWarning",  # of symbolic sizes
)
def test_tokens_of_a_traced_model_are_integers() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Expert(5), Expert(5)])

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[1](self.experts[0](x))  # type: ignore[no-any-return]

    model, x = Chain(), torch.ones(3, 7, 5)
    profile = profile_of(lambda: torch.jit.trace(model, x, check_trace=False), model=model)
    assert [profile.node(f"experts.{i}").tokens for i in range(2)] == [3 * 7, 3 * 7]
    rows = torch.export.Dim("rows", min=2, max=64)
    with FlopCounterMode(model, display=False) as counter:
        torch.export.export(model, (x,), dynamic_shapes=({0: rows},), strict=False)
    counter.profile.to_json()


def test_tokens_of_an_expert_without_tensors_are_unknown() -> None:
    class Mapped(Expert):
        def forward(self, x: Tensor | None = None) -> Any:
            return {"y": super().forward(x)} if x is not None else "nothing"

    model = nn.Module()
    model.experts = nn.ModuleList([Mapped(5), Mapped(5), Mapped(5)])

    def run() -> None:
        model.experts[0](x=torch.ones(7, 5))
        model.experts[1]()

    profile = profile_of(run, model=model)
    assert [profile.node(f"experts.{i}").tokens for i in range(3)] == [7, None, 0]


def test_experts_are_recognized_by_their_class() -> None:
    model = Mixture(2, container="ffn")
    profile = profile_of(model, torch.randn(3, 5), [0, 1, 1], model=model)
    assert [profile.node(f"ffn.{i}").tokens for i in range(2)] == [1, 2]
