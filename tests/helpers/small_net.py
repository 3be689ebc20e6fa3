"""A small network whose costs are known in closed form."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """Batch B: MACs B·(5·7 + 7·3) in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.drop = nn.Dropout(0.5)
        self.b = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.b(self.drop(self.a(x))) * scale

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + self(x)


B = 2
MACS = B * (5 * 7 + 7 * 3)
FLOPS = 2 * MACS + B * (7 + 3) + B * 3  # biases, and the scaling of the output
PARAMS = 5 * 7 + 7 + 7 * 3 + 3
