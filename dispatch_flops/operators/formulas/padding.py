"""Operators that copy an element to several places, and their adjoints.

Copying is free. The adjoint sums what was copied: n terms to m places are n - m additions.
"""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import adds
from dispatch_flops.operators.formulas._ops import packets
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.profile.cost import OpCost, flops

Tensor = torch.Tensor

_PADS = [f"{mode}_pad{d}d" for mode in ("reflection", "replication") for d in (1, 2, 3)]


@register_flops(packets(*(f"{name}_backward" for name in _PADS)))
def pad_backward(grad: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Every element of the result gets its own gradient, and those of its reflections."""
    return flops(adds(max(grad.numel() - out.numel(), 0), grad))


@register_flops(packets("col2im", "unfold_backward"))
def accumulate_windows(grad: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Every element of every window is added to a result that begins with zeros.

    (What falls into the padding is dropped, so n - m would be no exact count.)
    Source: torch._decomp, which accumulates with index_put.
    """
    return flops(adds(grad.numel(), grad))
