"""Tracers inside a counter's block: the counter adds nothing to what they trace."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from dispatch_flops import FlopCounterMode
from dispatch_flops.errors import UncountedWarning

T, B, I, H = 3, 2, 5, 7  # noqa: E741


class Einsum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("tbi,sbi->ts", x, x).softmax(-1)


# model, MACs of one trace
MODELS = {
    "LSTM": (lambda: nn.LSTM(I, H), T * B * 4 * H * (I + H)),
    "GRU": (lambda: nn.GRU(I, H), T * B * 3 * H * (I + H)),
    "Linear": (lambda: nn.Linear(I, H), T * B * I * H),
    "einsum": (Einsum, T * T * B * I),
}


def trace(model: nn.Module) -> tuple[str, list[str]]:
    """Return the graph of a trace, and torch's warnings of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced: Any = torch.jit.trace(model, torch.ones(T, B, I), check_trace=False)
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    return " ".join(kinds), sorted({str(warning.message) for warning in caught})


@pytest.mark.parametrize("name", MODELS)
def test_trace_in_a_block_is_the_one_without_a_counter(name: str) -> None:
    build, macs = MODELS[name]
    model = build()
    alone = trace(model)
    with FlopCounterMode(model, display=False) as counter:
        counted = trace(model)
    assert counted == alone
    assert counter.get_total_macs() == macs


def product(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).sin()


def test_symbolic_sizes_stay_symbols_and_have_no_known_cost() -> None:
    """To ask for the value of a size would bind the graph to it."""
    args = torch.ones(B, I), torch.ones(I, H)
    alone = make_fx(product, tracing_mode="symbolic")(*args)
    with (
        pytest.warns(UncountedWarning, match="its sizes are symbols.*Count the program as it runs"),
        FlopCounterMode(display=False) as counter,
    ):
        counted = make_fx(product, tracing_mode="symbolic")(*args)
    assert counted.code == alone.code
    assert len(counted.shape_env.guards) == len(alone.shape_env.guards)
    profile = counter.profile
    assert profile.uncounted_ops() == {"aten.mm.default": 1, "aten.sin.default": 1}
    assert set(profile.formula_errors().values()) == {"its sizes are symbols"}
    assert profile.is_lower_bound
