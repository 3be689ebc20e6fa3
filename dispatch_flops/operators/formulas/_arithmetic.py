"""Costs of the pieces of a fused operator: additions, multiplications, whole other operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

from dispatch_flops.operators.registry import lookup
from dispatch_flops.operators.tensors import (
    is_inexact,
    is_inexact_dtype,
    promoted_dtype,
    stored_elements,
    tensors_in,
)
from dispatch_flops.profile.cost import ZERO, OpCost, Split, contraction

# Reals that one complex operation takes: (a+bi)+(c+di) adds two pairs,
# (a+bi)(c+di) takes 4 products and 2 sums.
COMPLEX_ADD = 2
COMPLEX_MUL = 6

Number = int | float | complex


def adds(count: int, *operands: torch.Tensor | None) -> int:
    """Return the FLOPs of ``count`` additions of such operands: 0 if integer, 2 each if complex."""
    return count * _per_operation(COMPLEX_ADD, operands)


def muls(count: int, *operands: torch.Tensor | None) -> int:
    """Return the FLOPs of ``count`` products of such operands: 0 if integer, 6 each if complex."""
    return count * _per_operation(COMPLEX_MUL, operands)


def dtype_of_literal(arguments: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype in which whole numbers are compared with a number such as 0.5, or None.

    arguments: those of a comparison by name; the first two are compared.
    """
    pair = tuple(islice(arguments.values(), 2))
    literal = next((value for value in pair if isinstance(value, (float, complex))), None)
    if literal is None or is_inexact(*filter(torch.is_tensor, pair)):
        return None
    default = torch.get_default_dtype()
    return default.to_complex() if isinstance(literal, complex) else default


def dtype_of(name: str) -> Callable[[Mapping[str, Any]], torch.dtype]:
    """Return a function that returns the dtype of the argument ``name``."""
    return lambda arguments: arguments[name].dtype


def dtype_of_operands(arguments: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that torch promotes operands to before it compares or subtracts them.

    None for quantized numbers, which it does not promote, and unless the dtype is inexact.
    """
    operands = [t for name, value in arguments.items() if name != "out" for t in tensors_in(value)]
    with suppress(RuntimeError):
        promoted = dtype_of_literal(arguments) or promoted_dtype(operands)
        return promoted if is_inexact_dtype(promoted) else None
    return None


def dtype_of_result(arguments: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of the result, to which a sum with ``dtype=`` casts what it adds."""
    return next((tensor.dtype for tensor in tensors_in(arguments["out"])), None)


def dtype_asked_for(arguments: Mapping[str, Any]) -> torch.dtype | None:
    """Return the argument ``dtype``, or None: the result may be real where the numbers are not."""
    return arguments.get("dtype")


def any_complex(*operands: torch.Tensor | None) -> bool:
    """Return True if one of the operands is complex."""
    return any(t is not None and t.is_complex() for t in operands)


def contract(macs: int, *operands: torch.Tensor | None, extra_flops: int = 0) -> OpCost:
    """Return the ``contraction`` of these operands, a complex one if one of them is."""
    return contraction(macs, complex_numbers=any_complex(*operands), extra_flops=extra_flops)


def scaled_sum(
    bias: torch.Tensor | None,
    results: int,
    *operands: torch.Tensor,
    beta: Number = 1,
    alpha: Number = 1,
) -> int:
    """Return the FLOPs of ``beta·bias + alpha·product``, for ``results`` elements of a product.

    One multiplication per result if alpha is not 1. Unless there is no bias or beta is 0, one
    addition per result, and one multiplication per stored element of the bias if beta is not 1.
    Source: torch._decomp's addmm, which drops the bias at beta 0.
    """
    count = muls(results, *operands) if alpha != 1 else 0
    if bias is None or beta == 0:
        return count
    count += adds(results, *operands, bias)
    return count + (muls(stored_elements(bias), bias) if beta != 1 else 0)


def cost_of(op: Any, *args: Any, out: Any, **kwargs: Any) -> OpCost:
    """Return what ``op`` costs on these arguments, for a fused operator that contains it.

    Raises LookupError if ``op`` has no formula.
    """
    rule = lookup(op)
    if rule is None:
        raise LookupError(f"{op} has no formula, and a fused operator contains it")
    cost = rule.answer(op, args, kwargs, out)
    if isinstance(cost, Split):
        return cost.total
    return OpCost(flops=cost) if isinstance(cost, int) else cost


def same_shaped(op: Any, like: torch.Tensor, *args: Any, **kwargs: Any) -> OpCost:
    """Return the FLOPs of a fused pointwise ``op`` on a tensor like ``like``; it moves no bytes."""
    return (
        OpCost(flops=cost_of(op, like, *args, out=like, **kwargs).flops) if like.numel() else ZERO
    )


def _per_operation(if_complex: int, operands: tuple[torch.Tensor | None, ...]) -> int:
    if any_complex(*operands):
        return if_complex
    return int(any(t is not None and t.is_floating_point() for t in operands))
