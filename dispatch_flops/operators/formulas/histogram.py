"""Histograms: the edges of the bins, and the bin of each number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import cost_of
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.sorting import log2_ceil
from dispatch_flops.operators.numbers import depends_on_numbers
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_inexact
from dispatch_flops.profile.cost import OpCost, flops

Tensor = torch.Tensor


@register_flops(ops("_histogramdd_bin_edges"))
def bin_edges(
    self: Tensor,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """self[..., d]: the minimum and maximum of each of d columns, unless a range is given, and
    an evenly spaced sequence for each.

    FLOPs: 2 (n - 1) per column of n points, and what linspace costs.
    """
    columns = self.shape[-1]
    extrema = 2 * (self.numel() - columns) if range is None and self.numel() else 0
    spaced = sum(cost_of(torch.ops.aten.linspace, out=edges).flops for edges in out)
    return flops(extrema + spaced)


@register_flops(ops("bincount"))
def bincount(self: Tensor, weights: Tensor | None = None, *_: Any, out: Tensor, **__: Any) -> int:
    """Sum of the weights: n. Without weights only integers are added, which is free."""
    return self.numel() if weights is not None and is_inexact(weights) else 0


@register_flops(ops("histc"))
@depends_on_numbers
def histc(
    self: Tensor, bins: int = 100, min: Any = 0, max: Any = 0, *, out: Tensor, **_: Any
) -> int:
    """Per number, 2 comparisons with the range, 3 for its bin (x - min)·bins/width, 1 sum: 6·n.

    Equal bounds mean the smallest and the largest number: 2·(n-1) more.
    Source: aten/src/ATen/native/cpu/HistogramKernel.cpp.
    """
    n = self.numel()
    bounds = 2 * (n - 1) if n and min == max else 0
    return (6 * n + bounds) if is_inexact(self, out) else 0


@register_flops(ops("histogram", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors"))
def histogram(self: Tensor, bins: Any = 100, *_: Any, out: Any, **__: Any) -> int:
    """Each coordinate finds its bin, each point adds 1 or its weight.

    With given edges: 2 comparisons for the range and a binary search ⌈log2(edges + 1)⌉. With a
    number of bins: 2 comparisons, (x - min)·bins/width 3, and 2 comparisons with the bin's edges.
    Source: aten/src/ATen/native/cpu/HistogramKernel.cpp.
    """
    coordinates = self.numel()
    axes = self.shape[-1] if isinstance(bins, (list, tuple)) else 1
    given = list(bins) if isinstance(bins, (list, tuple)) else [bins]
    points = coordinates // axes if axes else 0
    searches = sum(
        2 + log2_ceil(edges.numel() + 1) if isinstance(edges, torch.Tensor) else 7
        for edges in given
    )
    return points * (searches + 1) if is_inexact(self) else 0
