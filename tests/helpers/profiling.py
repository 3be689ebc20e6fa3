"""Profile of a call, and the version of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dispatch_flops import FlopCounterMode, OpCost, Profile

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
TRIAL_STEPS = 1 if TORCH < (2, 12) else 0  # by which an eager scan learns what its step returns


def profile_of(
    fn: Callable[..., Any], *args: Any, model: nn.Module | None = None, **options: Any
) -> Profile:
    """Return the profile of ``fn(*args)``; ``options`` are those of ``FlopCounterMode``."""
    with FlopCounterMode(model, display=False, **options) as counter:
        fn(*args)
    return counter.profile


def macs_and_flops(fn: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """Return the totals of ``fn(*args)``; every operator must have a known cost."""
    total = profile_of(fn, *args, strict=True).total()
    return total.macs, total.flops


def numbers(cost: OpCost) -> tuple[int, int]:
    return cost.macs, cost.flops


def forward_and_backward_flops(
    fn: Callable[..., Any], x: torch.Tensor, *, needs_input: bool = True
) -> tuple[int, int]:
    """Return the FLOPs of ``fn(x)`` and of the backward pass from a given gradient.

    Every operator must have a known cost. needs_input: whether ``x`` requires a gradient.
    """
    x = x.clone().requires_grad_(needs_input)

    def run() -> None:
        y = fn(x)
        y.backward(torch.ones_like(y))

    profile = profile_of(run, strict=True)
    return profile.total("forward").flops, profile.total("backward").flops
