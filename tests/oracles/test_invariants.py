"""Invariants of all formulas.

Twice the batch is twice the cost, and a call costs the same with gradients, without, in inference
mode, on the meta device and on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.oracles.comparing import cost_everywhere, macs_of, tensor

Call = Callable[..., Any]

# name: (call, shapes of which the first gets the batch in front, MACs of one sample)
CALLS: dict[str, tuple[Call, list[tuple[int, ...]], int]] = {
    "linear": (F.linear, [(3, 5), (7, 5), (7,)], 3 * 5 * 7),
    "matmul": (torch.matmul, [(3, 5), (5, 7)], 3 * 5 * 7),
    "einsum": (lambda x, w: torch.einsum("bsk,kn->bsn", x, w), [(3, 5), (5, 7)], 3 * 5 * 7),
    "conv1d": (F.conv1d, [(3, 11), (2, 3, 5)], 2 * 3 * 5 * 7),
    "conv2d same": (
        lambda x, w: F.conv2d(x, w, padding="same"),
        [(3, 5, 7), (2, 3, 4, 3)],
        2 * 3 * (4 * 3) * (5 * 7),
    ),
    "conv3d": (F.conv3d, [(2, 4, 5, 3), (3, 2, 2, 3, 1)], 3 * 2 * (2 * 3) * (3 * 3 * 3)),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        [(3, 5, 7), (3, 2, 4, 3)],
        3 * 2 * (4 * 3) * (5 * 7),
    ),
    "grouped conv": (
        lambda x, w: F.conv2d(x, w, groups=3),
        [(3, 5, 7), (6, 1, 2, 3)],
        6 * (2 * 3) * (4 * 5),
    ),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x),
        [(3, 5, 7)],
        3 * 5 * 5 * (7 + 7),
    ),
    "bilinear": (F.bilinear, [(5,), (5,), (2, 5, 5)], 2 * 5 * 5 + 2 * 5),
}
BATCHED_INPUTS = {"bilinear": 2}


def _inputs(name: str, batch: int, *, grad: bool = False) -> list[torch.Tensor]:
    _, shapes, _ = CALLS[name]
    batched = BATCHED_INPUTS.get(name, 1)
    return [
        tensor(*((batch, *shape) if i < batched else shape), seed=i, grad=grad)
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("name", CALLS)
def test_twice_the_batch_doubles_the_cost(name: str) -> None:
    call, _, macs = CALLS[name]
    one = macs_of(lambda: call(*_inputs(name, 3, grad=True)))
    two = macs_of(lambda: call(*_inputs(name, 6, grad=True)))
    assert one[0] == 3 * macs
    assert two == (2 * one[0], 2 * one[1])


@pytest.mark.parametrize("name", CALLS)
def test_call_in_every_mode_costs_the_same(name: str) -> None:
    call, _, macs = CALLS[name]
    assert cost_everywhere(call, *_inputs(name, 2, grad=True)) == {2 * macs}


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "LSTM": (lambda: nn.LSTM(3, 4, batch_first=True), (2, 5, 3), 2 * 5 * 4 * 4 * (3 + 4)),
    "GRU": (lambda: nn.GRU(3, 4, batch_first=True), (2, 5, 3), 2 * 5 * 3 * 4 * (3 + 4)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 11, dropout=0.0, batch_first=True).eval(),
        (2, 5, 6),
        2 * (4 * 6 * 6 * 5 + 2 * 5 * 5 * 6 + 2 * 6 * 11 * 5),
    ),
    "multi-head attention": (
        lambda: _SelfAttention().eval(),
        (2, 5, 6),
        2 * (4 * 6 * 6 * 5 + 2 * 5 * 5 * 6),
    ),
}


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.attention(x, x, x)[0]
        return out


@pytest.mark.parametrize("name", MODULES)
def test_module_in_every_mode_costs_the_same(name: str) -> None:
    make, shape, macs = MODULES[name]
    module = make()
    x = tensor(*shape, dtype=torch.float32)

    def call(x: torch.Tensor, *state: torch.Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, state, strict=True)), (x,))

    names = [name for name, _ in module.named_parameters()]
    assert cost_everywhere(call, x, *module.parameters()) == {macs}
