"""Block with two layers, whose class has a formula in tests of opaque modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dispatch_flops import OpCost

A, I, H = 2, 3, 5  # noqa: E741
LINEAR = A * I * H  # MACs of one layer of a block


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(I, H, bias=False)
        self.down = nn.Linear(H, I, bias=False)

    def forward(self, x: Tensor, scale: int = 1) -> Tensor:
        return self.down(torch.relu(self.up(x))) * scale


def block_formula(module: Block, x: Tensor, scale: int = 1, *, out: Tensor, **_: Any) -> OpCost:
    assert isinstance(module, Block)
    assert out.shape == x.shape
    macs = 1000 * x.shape[0] + module.up.out_features
    return OpCost(macs=macs, flops=2 * macs + scale)


BLOCK = 1000 * A + H  # MACs that the formula states


def five(module: nn.Module, x: Tensor, *, out: Tensor) -> OpCost:
    return OpCost(macs=5, flops=10)
