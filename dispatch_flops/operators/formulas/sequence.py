"""Sequences and windows: tensors computed from a few numbers.

N elements. The integers that they start from (``arange``) are free.
"""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import dtype_of_result
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.pointwise import elementwise
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_inexact

Tensor = torch.Tensor


def _evenly_spaced(out: Tensor) -> int:
    """FLOPs of a ``linspace`` with this result."""
    if out.numel() <= 1 or not is_inexact(out):
        return 0
    return out.numel() + elementwise("mul add mul sub", (), out)


@register_flops(ops("linspace"), computes_in=dtype_of_result)
def linspace(*_: Any, out: Tensor, **__: Any) -> int:
    """start + i·step where i < N/2, end - (N-1-i)·step elsewhere, both computed: 5·N, of complex
    numbers 17·N.

    A single point is the start itself. Source: torch._refs.
    """
    return _evenly_spaced(out)


@register_flops(ops("logspace"), computes_in=dtype_of_result)
def logspace(*_: Any, out: Tensor, **__: Any) -> int:
    """base to the power of each of ``linspace``: N more, of complex numbers 17·N.

    Source: torch._refs.
    """
    return _evenly_spaced(out) + elementwise("pow", (), out)


def _points(window_length: int, periodic: bool) -> int:
    """Number of computed points: a periodic window has one more, windows of 0 and 1 have none."""
    return 0 if window_length <= 1 else window_length + periodic


@register_flops(ops("hann_window", "hamming_window"))
def cosine_window(
    window_length: int, periodic: bool = True, *_: Any, out: Tensor, **__: Any
) -> int:
    """α - β·cos(2πi/(N-1)): 4 per point. Source: torch._decomp's hann_window."""
    return 4 * _points(window_length, periodic)


@register_flops(ops("blackman_window"))
def blackman_window(window_length: int, periodic: bool = True, *, out: Tensor, **_: Any) -> int:
    """t = πi/(N-1); 0.08·cos 4t - 0.5·cos 2t + 0.42: 9 per point.

    Source: aten/src/ATen/native/TensorFactories.cpp, as the two below.
    """
    return 9 * _points(window_length, periodic)


@register_flops(ops("bartlett_window"))
def bartlett_window(window_length: int, periodic: bool = True, *, out: Tensor, **_: Any) -> int:
    """2i/(N-1): 1 per point; in the second half 2 minus it: 2 per point there."""
    points = _points(window_length, periodic)
    return points + 2 * (points - (points + 1) // 2)


@register_flops(ops("kaiser_window"))
def kaiser_window(
    window_length: int, periodic: bool = True, *_: Any, out: Tensor, **__: Any
) -> int:
    """x = 2i/(N-1) - 1; I0(β·√(1 - x²)) / I0(β): 8 per point."""
    return 8 * _points(window_length, periodic)
