"""Elements that interpolation reads: the neighbours of each position of the result.

A result that is much smaller than the input leaves elements between the neighbours unread. A
neighbour is read even where its weight is 0. Antialiasing filters read all elements.
Source: aten/src/ATen/native/UpSample.h, cpu/UpSampleKernel.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dispatch_flops.operators.access import Access, Arguments, Declaration, declare_access
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.partial_access import read_in_part
from dispatch_flops.operators.formulas.resample import LINEAR, NEAREST, NEAREST_EXACT
from dispatch_flops.operators.numbers import depends_on_numbers

# Of one dimension: (its size, that of the result, elements per result, whether corners align).
CountElements = Callable[[int, int, float, bool], int]


def _resampling(count: CountElements) -> Declaration:
    @depends_on_numbers
    def resampling(arguments: Arguments, out: torch.Tensor) -> Access:
        """The neighbours of each position of the result."""
        name = "input" if "input" in arguments else "self"  # the former in ``.vec``
        source: torch.Tensor = arguments[name]
        align_corners = bool(arguments.get("align_corners"))
        sizes = zip(source.shape[2:], out.shape[2:], _scales(arguments, source), strict=True)
        elements = math.prod(
            count(size, results, 1 / scale if scale else size / results, align_corners)
            for size, results, scale in sizes
        )
        return read_in_part(arguments, {name: math.prod(source.shape[:2]) * elements})

    return resampling


def _scales(arguments: Arguments, source: torch.Tensor) -> Sequence[float | None]:
    """Return the factor of each dimension, None where the sizes give it."""
    if "scale_factors" in arguments:
        return arguments["scale_factors"] or [None] * len(source.shape[2:])
    return [value for name, value in arguments.items() if name.startswith("scales")]


def _nearest(offset: float) -> CountElements:
    def count(size: int, results: int, step: float, align_corners: bool) -> int:
        return len({min(int((i + offset) * step), size - 1) for i in range(results)})

    return count


def _neighbours(before: int, after: int, *, from_zero: bool) -> CountElements:
    """Return the counter of elements from ``before`` below a position to ``after`` above it."""

    def count(size: int, results: int, step: float, align_corners: bool) -> int:
        if align_corners:
            step = (size - 1) / (results - 1) if results > 1 else 0.0
        read = set[int]()
        for i in range(results):
            position = i * step if align_corners else (i + 0.5) * step - 0.5
            low = math.floor(max(position, 0.0) if from_zero else position)
            read.update(
                min(max(index, 0), size - 1) for index in range(low - before, low + after + 1)
            )
        return len(read)

    return count


declare_access(ops(*NEAREST))(_resampling(_nearest(0.0)))
declare_access(ops(*NEAREST_EXACT))(_resampling(_nearest(0.5)))
declare_access(ops(*LINEAR))(_resampling(_neighbours(0, 1, from_zero=True)))
declare_access(ops("upsample_bicubic2d"))(_resampling(_neighbours(1, 2, from_zero=False)))
