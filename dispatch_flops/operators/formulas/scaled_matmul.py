"""Products of grouped, scaled and weight-quantised operands.

Letters: M rows, K contracted, N columns, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatch_flops.operators.access import Access, Arguments, declare_access
from dispatch_flops.operators.formulas._arithmetic import adds, contract
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.linear import post_op
from dispatch_flops.operators.formulas.partial_access import read_in_part
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.profile.cost import OpCost, contraction

#: One tensor of scales, or one for each level of them.
Scale = torch.Tensor | Sequence[torch.Tensor]

# Two 4-bit floats share one element of this dtype. For other packed weights N is the result's.
_TWO_IN_ONE = getattr(torch, "float4_e2m1fn_x2", None)


def _contracted(a: torch.Tensor) -> int:
    return a.shape[-1] * (2 if a.dtype == _TWO_IN_ONE else 1)


# -- scaled --------------------------------------------------------------------------------


def _passes(*operands: Scale | None) -> int:
    """Number of tensors applied to the result: a bias, a scale, or each level of a scale."""
    return sum(1 for _ in tensors_in(operands))


@register_flops(ops("_scaled_mm", "_scaled_mm_v2"), by_name=True)
def scaled_mm(
    *,
    self: torch.Tensor,
    scale_a: Scale,
    scale_b: Scale,
    scale_result: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """out[M,N] = scale_a·scale_b·(a[M,K] @ b[K,N]) + bias, a and b in 8 or 4 bits.

    MACs: M·N·K. FLOPs: 2·MACs + one product per output element and scale (2·M·N; 3·M·N with a
    scale of the result; M·N more for each further level of an operand's) + M·N (bias). Scales of
    blocks of K cost more than is counted.
    """
    passes = _passes(scale_a, scale_b, scale_result, bias)
    return contraction(out.numel() * _contracted(self), extra_flops=passes * out.numel())


# -- grouped -------------------------------------------------------------------------------


def _grouped_macs(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> int:
    """MACs of a product per group, by the dimensions of the operands.

    a[rows,K] and b[G,K,N]: each row meets the one matrix of its group, rows·K·N.
    a[G,M,K] and b[K,columns]: likewise M·K·columns. a[G,M,K] and b[G,K,N]: G·M·K·N.
    a[M,K] and b[K,N] with K split into groups, out[G,M,N]: each slice of K once, M·K·N.
    Group boundaries are data, so padding rows past the last group count.
    """
    if a.dim() == 2 and b.dim() == 2:
        return a.shape[0] * _contracted(a) * b.shape[1]
    return out.numel() * _contracted(a)


@register_flops(ops("_grouped_mm"))
def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *_: Any,
    out: torch.Tensor,
    **__: Any,
) -> OpCost:
    """One product per group, as in a mixture of experts.

    MACs: K·N for each row of a group's operand, whose matrix is [K,N]. FLOPs: 2·MACs + one per
    output element (bias).
    """
    extra = adds(out.numel(), out) if bias is not None else 0
    return contract(_grouped_macs(a, b, out), a, b, extra_flops=extra)


@register_flops(ops("_scaled_grouped_mm", "_scaled_grouped_mm_v2"), by_name=True)
def scaled_grouped_mm(
    *,
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: Scale,
    scale_b: Scale,
    scale_result: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """``_grouped_mm`` of scaled operands.

    MACs: K·N for each row of a group's operand, whose matrix is [K,N]. FLOPs: 2·MACs + one per
    output element for each scale (and level of it) and bias.
    """
    passes = _passes(scale_a, scale_b, scale_result, bias)
    return contraction(_grouped_macs(self, mat2, out), extra_flops=passes * out.numel())


@declare_access(ops("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"))
def matrices_of_groups(arguments: Arguments, out: Any) -> Access:
    """A matrix for each row or column of the other operand, at most all of them.

    Which groups are empty is data: as few as the rows allow.
    """
    a, b = arguments["self"], arguments["mat2"]
    if a.dim() == b.dim():
        return Access()
    if b.dim() == 3:
        return read_in_part(arguments, {"mat2": a.shape[0] * b.shape[1:].numel()})
    return read_in_part(arguments, {"self": b.shape[1] * a.shape[1:].numel()})


# -- quantised weights ---------------------------------------------------------------------


@register_flops(ops("_weight_int8pack_mm"))
def weight_int8pack_mm(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor, **_: Any
) -> OpCost:
    """out[M,N] = (x[M,K] @ weight[N,K].T) · scales[N].

    MACs: M·N·K. FLOPs: 2·MACs + M·N (scales).
    """
    return contraction(x.numel() * out.shape[-1], extra_flops=out.numel())


@register_flops(
    ops(
        "_weight_int4pack_mm",
        "_weight_int4pack_mm_for_cpu",
        "_weight_int4pack_mm_with_scales_and_zeros",
    )
)
def weight_int4pack_mm(x: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> OpCost:
    """out[M,N] = x[M,K] @ dequantised(weight).T; N is the result's, as the weight is packed.

    MACs: M·N·K. FLOPs: 2·MACs + 2·N·K (a scale and a zero point for each weight).
    """
    k, n = x.shape[-1], out.shape[-1]
    return contraction(x.numel() * n, extra_flops=2 * n * k)


@register_flops(ops("_dyn_quant_matmul_4bit"), computes_in="int8")
def dyn_quant_matmul_4bit(
    x: torch.Tensor,
    packed_weights: torch.Tensor,
    block_size: int,
    in_features: int,
    out_features: int,
    *,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """out[M,N] = x[M,K] @ weight.T, x quantised on the fly to 8 bits, row by row.

    MACs: M·N·K. FLOPs: 2·MACs + 2·M·K (quantise: scale, round) + 2·M·N per block (both scales).
    """
    blocks = -(-in_features // block_size) if block_size else 1
    rows = x.numel() // in_features if in_features else 0
    extra = 2 * x.numel() + 2 * rows * out_features * blocks
    return contraction(rows * out_features * in_features, extra_flops=extra)


@register_flops(ops("_mixed_dtypes_linear"))
def mixed_dtypes_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """out[T,N] = activation(x[T,K] @ (weight · scale[N]) + bias), weight in 8 or 4 bits.

    MACs: T·N·K. FLOPs: 2·MACs + T·N for each of scale and bias + the activation's.
    """
    passes = 1 + (bias is not None)
    return contraction(x.numel() * out.shape[-1], extra_flops=passes * out.numel()) + post_op(
        activation, None, out
    )
