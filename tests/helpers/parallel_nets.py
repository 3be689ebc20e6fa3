"""A small model of coprime sizes for distributed runs, with its closed forms."""

from __future__ import annotations

import torch
from torch import nn

ROWS, WIDE, MID, CLASSES = 13, 7, 11, 3
LAYERS = 2
FLOAT = 4  # bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDE, MID)
        self.down = nn.Linear(MID, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two blocks below a head, which the root holds itself; ``unused`` takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDE, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


BLOCK_PARAMS = WIDE * MID + MID + MID * WIDE + WIDE
HEAD_PARAMS = WIDE * CLASSES + CLASSES
PARAMS = LAYERS * BLOCK_PARAMS + HEAD_PARAMS

BLOCK_MACS = ROWS * WIDE * MID + ROWS * MID * WIDE
HEAD_MACS = ROWS * WIDE * CLASSES
FORWARD_MACS = LAYERS * BLOCK_MACS + HEAD_MACS
FIRST_GRAD_MACS = ROWS * WIDE * MID  # of the input, which is not needed
BACKWARD_MACS = 2 * FORWARD_MACS - FIRST_GRAD_MACS


def inputs() -> torch.Tensor:
    return torch.ones(ROWS, WIDE)


def padded(size: int, ranks: int) -> int:
    """FSDP2 shards the first dimension, padded to a multiple of the ranks."""
    return -(-size // ranks) * ranks


def padded_block_params(ranks: int) -> int:
    up = padded(MID, ranks) * WIDE + padded(MID, ranks)
    return up + padded(WIDE, ranks) * MID + padded(WIDE, ranks)


def padded_head_params(ranks: int) -> int:
    return padded(CLASSES, ranks) * WIDE + padded(CLASSES, ranks)
