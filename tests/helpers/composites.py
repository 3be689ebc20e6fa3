"""Composite operators as cases, and a formula that tells them from what they consist of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dispatch_flops import OpCost

aten = torch.ops.aten
N, C, D, S = 7, 11, 13, 5
WEIGHT, KERNEL = torch.ones(D, C), torch.ones(D, C, 3, 3)
COMPOSITES: dict[Any, tuple[Callable[[Tensor], Tensor], tuple[int, ...], int, int]] = {
    # operator: the call, the shape of its input, elements of its result, its own MACs
    aten.linear: (lambda x: F.linear(x, WEIGHT), (N, C), N * D, N * C * D),
    aten.matmul: (lambda x: x @ WEIGHT.t(), (N, C), N * D, N * C * D),
    aten.einsum: (lambda x: torch.einsum("nc,dc->nd", x, WEIGHT), (N, C), N * D, N * C * D),
    aten.layer_norm: (lambda x: F.layer_norm(x, (C,)), (N, C), N * C, 0),
    aten.conv2d: (lambda x: F.conv2d(x, KERNEL), (2, C, 5, 7), 2 * D * 3 * 5, 2 * D * C * 9 * 15),
}


def stated(*args: Any, out: Tensor, **kwargs: Any) -> OpCost:
    """Formula with 17 MACs for each element of the result."""
    return OpCost(macs=17 * out.numel(), flops=35 * out.numel())
