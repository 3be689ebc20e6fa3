"""Block with two layers, whose class has a formula in tests of opaque modules, and its models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dispatch_flops import OpCost
from dispatch_flops.compile import CountingBackend

A, I, H = 2, 3, 5  # noqa: E741
LINEAR = A * I * H  # MACs of one layer of a block


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(I, H, bias=False)
        self.down = nn.Linear(H, I, bias=False)

    def forward(self, x: Tensor, scale: int = 1) -> Tensor:
        return self.down(torch.relu(self.up(x))) * scale


class Chain(nn.Module):
    """Blocks of which the second is called twice, once by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.blocks[1](x, scale=7)


class Broken(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[1](x)


def block_formula(module: Block, x: Tensor, scale: int = 1, *, out: Tensor, **_: Any) -> OpCost:
    assert isinstance(module, Block)
    assert out.shape == x.shape
    macs = 1000 * x.shape[0] + module.up.out_features
    return OpCost(macs=macs, flops=2 * macs + scale)


BLOCK = 1000 * A + H  # MACs that the formula states


def five(module: nn.Module, x: Tensor, *, out: Tensor) -> OpCost:
    return OpCost(macs=5, flops=10)


def compile_blocks(model: nn.Module, backend: CountingBackend) -> Callable[..., Any]:
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(backend=backend)
    return model
