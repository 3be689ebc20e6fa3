"""Operators and packed weights of torch's libraries of quantised kernels."""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops


def quantized(*names: str) -> list[Any]:
    """Return operators of the library quantized and of its older form, _quantized."""
    return ops(*names, library="quantized") + ops(*names, library="_quantized")


def is_packed(weight: Any) -> bool:
    """Return True for a packed weight, which is an opaque object."""
    return isinstance(weight, torch.ScriptObject)
