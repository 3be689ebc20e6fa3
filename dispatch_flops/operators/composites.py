"""Operators that torch implements by calling other operators."""

from __future__ import annotations

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload

_DEVICES = ("CPU", "CUDA")


def is_composite(func: OpOverload) -> bool:
    """Return True if ``func`` decomposes into other operators and has no CPU or CUDA kernel.

    The counter decomposes a composite operator and counts the operators that it calls. An
    operator with a kernel of its own is counted whole, whether it can be decomposed or not.
    """
    if not _torch.is_decomposable(func):
        return False
    return not any(_torch.has_kernel(func.name(), device) for device in _DEVICES)
