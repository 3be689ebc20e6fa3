"""Profile of a call, and the version of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dispatch_flops import FlopCounterMode, Profile

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def profile_of(
    fn: Callable[..., Any], *args: Any, model: nn.Module | None = None, **options: Any
) -> Profile:
    """Return the profile of ``fn(*args)``; ``options`` are those of ``FlopCounterMode``."""
    with FlopCounterMode(model, display=False, **options) as counter:
        fn(*args)
    return counter.profile
