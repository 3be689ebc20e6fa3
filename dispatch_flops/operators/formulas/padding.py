"""Operators that copy an element to several places, and their adjoints.

Copying is free. The adjoint sums the copies: n terms in m places are n - m additions.
"""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import adds
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.profile.cost import OpCost, flops

Tensor = torch.Tensor

_PADS = [f"{mode}_pad{d}d" for mode in ("reflection", "replication") for d in (1, 2, 3)]


@register_flops(ops(*(f"{name}_backward" for name in _PADS)))
def pad_backward(grad: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Each element of the result is the sum of its own gradient and those of its copies: n - m."""
    return flops(adds(max(grad.numel() - out.numel(), 0), grad))


@register_flops(ops("col2im", "unfold_backward"))
def accumulate_windows(grad: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Every element of every window is added to a result of zeros: 1 per element.

    (Elements in the padding are dropped, so n - m would not be exact.)
    Source: torch._decomp, which accumulates with index_put.
    """
    return flops(adds(grad.numel(), grad))
