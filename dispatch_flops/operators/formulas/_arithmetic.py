"""What the pieces of a fused operator cost: additions, multiplications, whole other operators."""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.registry import lookup
from dispatch_flops.profile.cost import ZERO, OpCost, Split, contraction

# Reals that one complex operation takes: (a+bi)+(c+di) adds two pairs,
# (a+bi)(c+di) takes 4 products and 2 sums.
COMPLEX_ADD = 2
COMPLEX_MUL = 6


def adds(count: int, *operands: torch.Tensor | None) -> int:
    """FLOPs of ``count`` additions on such operands: none on integers, 2 each on complex."""
    return count * _per_operation(COMPLEX_ADD, operands)


def muls(count: int, *operands: torch.Tensor | None) -> int:
    """FLOPs of ``count`` multiplications on such operands: none on integers, 6 each on complex."""
    return count * _per_operation(COMPLEX_MUL, operands)


def any_complex(*operands: torch.Tensor | None) -> bool:
    """True if one of the operands is complex."""
    return any(t is not None and t.is_complex() for t in operands)


def contract(macs: int, *operands: torch.Tensor | None, extra_flops: int = 0) -> OpCost:
    """``contraction`` of such operands; all are complex if one is."""
    return contraction(macs, complex_numbers=any_complex(*operands), extra_flops=extra_flops)


def cost_of(op: Any, *args: Any, out: Any, **kwargs: Any) -> OpCost:
    """What the registry says that ``op`` costs on these arguments.

    So that a fused operator costs what its parts cost. Raises LookupError if ``op`` has no formula.
    """
    rule = lookup(op)
    if rule is None:
        raise LookupError(f"{op} has no formula, and a fused operator contains it")
    cost = rule.answer(op, args, kwargs, out)
    if isinstance(cost, Split):
        return cost.total
    return OpCost(flops=cost) if isinstance(cost, int) else cost


def same_shaped(op: Any, like: torch.Tensor, *args: Any, **kwargs: Any) -> OpCost:
    """FLOPs of a pointwise ``op`` on a tensor like ``like``; it moves no bytes: it is fused."""
    return (
        OpCost(flops=cost_of(op, like, *args, out=like, **kwargs).flops) if like.numel() else ZERO
    )


def _per_operation(if_complex: int, operands: tuple[torch.Tensor | None, ...]) -> int:
    if any_complex(*operands):
        return if_complex
    return int(any(t is not None and t.is_floating_point() for t in operands))
