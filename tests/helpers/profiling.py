"""Profile of a call, and the version of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dispatch_flops import FlopCounterMode, Profile

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
