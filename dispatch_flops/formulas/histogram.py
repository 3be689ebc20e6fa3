"""The bin edges of multi-dimensional histograms; filling the bins is in scatter.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatch_flops.cost import OpCost
from dispatch_flops.formulas._arithmetic import cost_of
from dispatch_flops.formulas._ops import packets
from dispatch_flops.registry import register_flops
from dispatch_flops.tensors import flops

Tensor = torch.Tensor


@register_flops(packets("_histogramdd_bin_edges"))
def bin_edges(
    self: Tensor,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """self[..., d]: the minimum and maximum of each of d columns, unless a range is given, and
    for each an evenly spaced sequence.

    FLOPs: 2 (n - 1) per column of n points, and what linspace costs.
    """
    columns = self.shape[-1]
    extrema = 2 * (self.numel() - columns) if range is None and self.numel() else 0
    spaced = sum(cost_of(torch.ops.aten.linspace, out=edges).flops for edges in out)
    return flops(extrema + spaced)
