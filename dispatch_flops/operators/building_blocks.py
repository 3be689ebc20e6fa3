"""Costs of whole contractions, for formulas of kernels that users write."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal, overload

import torch

from dispatch_flops.errors import FormulaError
from dispatch_flops.operators.formulas._arithmetic import adds, any_complex
from dispatch_flops.operators.formulas._attention import (
    Band,
    backward,
    causal_band,
    forward,
    heads_first,
    heads_third,
)
from dispatch_flops.profile.cost import OpCost, Split, contraction

Layout = Literal["BHSD", "BSHD"]
Operand = torch.Tensor | Sequence[int]
_SCORES = {"BHSD": heads_first, "BSHD": heads_third}


@overload
def attention_cost(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = ...,
    *,
    is_masked: bool = ...,
    has_dropout: bool = ...,
    layout: Layout = ...,
    is_backward: Literal[False] = ...,
) -> OpCost: ...


@overload
def attention_cost(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = ...,
    *,
    is_masked: bool = ...,
    has_dropout: bool = ...,
    layout: Layout = ...,
    is_backward: Literal[True],
) -> Split: ...


def attention_cost(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    is_masked: bool = False,
    has_dropout: bool = False,
    layout: Layout = "BHSD",
    is_backward: bool = False,
) -> OpCost | Split:
    """Return the cost of softmax(q·kᵀ·scale + mask)·v, as the package counts its own kernels.

    q, k, v: [B, H, S, D] with layout "BHSD", or [B, S, H, D] with "BSHD". Keys and values may have
        fewer heads than queries, and values a size of their own.
    causal: with the counter's ``causal="half"``, only the scores that a causal kernel needs count.
        Queries and keys are aligned at their first positions.
    is_masked: a mask or bias is added to the scores. has_dropout: probabilities are dropped.
    is_backward: return the cost of the gradients of q, k and v. The scores that a fused kernel
        computes again are a share of the phase "recompute".

    Raises FormulaError for another layout, for tensors without a dimension of heads, and for a
    flag that is not a bool, such as a mask.

    Example::

        @register_flops(torch.ops.mylib.attention)
        def attention(q, k, v, causal, *, out, **_):
            return attention_cost(q, k, v, causal=causal)
    """
    if not isinstance(layout, str) or layout not in _SCORES:
        raise FormulaError(f'layout={layout!r:.60}: choose "BHSD" or "BSHD"')
    if not all(isinstance(t, torch.Tensor) and t.dim() > 2 for t in (q, k, v)):
        raise FormulaError("q, k and v are not all tensors with heads; pass [B, H, S, D]")
    flags = {"causal": causal, "is_masked": is_masked, "has_dropout": has_dropout}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise FormulaError(f"{name} is of type {type(flag).__name__}; pass True or False")
    band: Band = causal_band(causal)
    scores = _SCORES[layout](q, k, v, band)
    cost: Any = backward if is_backward else forward
    result: OpCost | Split = cost(scores, masked=causal or is_masked, dropout=has_dropout)
    return result


def matmul_cost(a: Operand, b: Operand, *, bias: torch.Tensor | None = None) -> OpCost:
    """Return the cost of a[..., M, K] @ b[..., K, N] + bias, batch dimensions broadcast.

    a, b: tensors, or their shapes where a kernel's tensors have others, as packed weights do.
    bias: None for a product without one.

    Raises FormulaError if the contracted sizes differ, or for an argument of the wrong type.

    Example::

        @register_flops(torch.ops.mylib.linear_4bit)
        def linear_4bit(x, packed, *, out, **_):
            return matmul_cost(x, (x.shape[-1], out.shape[-1]))
    """
    left, right = _shape(a), _shape(b)
    if not isinstance(bias, torch.Tensor | None):
        raise FormulaError(f"bias={bias!r:.60} is not a tensor; pass one, or None")
    if not left or not right or left[-1] != right[max(len(right) - 2, 0)]:
        raise FormulaError(
            f"{list(left)!s:.60} @ {list(right)!s:.60} is not a product; pass [..., M, K] and "
            "[..., K, N]"
        )
    batch = torch.broadcast_shapes(left[:-2], right[:-2])  # type: ignore[no-untyped-call]
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    results = int(prod(batch)) * rows * columns
    tensors = [t for t in (a, b) if isinstance(t, torch.Tensor)]
    extra = adds(results, *tensors, bias) if bias is not None else 0
    return contraction(results * left[-1], complex_numbers=any_complex(*tensors), extra_flops=extra)


def _shape(operand: Operand) -> tuple[int, ...]:
    try:
        return tuple(operand.shape if isinstance(operand, torch.Tensor) else operand)
    except TypeError:
        raise FormulaError(f"{operand!r:.60} is not a tensor or a shape; pass one") from None
