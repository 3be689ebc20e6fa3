"""Small questions about tensors that every formula asks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dispatch_flops.cost import OpCost


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def product(sizes: Iterable[int]) -> int:
    """The product of sizes; 1 for none."""
    return math.prod(sizes)


def is_inexact(*tensors: torch.Tensor | None) -> bool:
    """True if one of the tensors holds floating-point or complex numbers."""
    return any(t is not None and (t.is_floating_point() or t.is_complex()) for t in tensors)


def flops(count: int) -> OpCost:
    """A cost of ``count`` FLOPs that are no MACs."""
    return OpCost(flops=count)
