"""Matrix products, dense and stored sparsely.

Letters: M rows, K contracted, N columns, B batch.
A product costs one MAC per output element and contracted element; additions and scaling cost only
FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import (
    Number,
    adds,
    contract,
    dtype_of_operands,
    muls,
    same_shaped,
    scaled_sum,
)
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import (
    is_sparse,
    is_strided_nested,
    nested_sizes,
    stored_elements,
)
from dispatch_flops.profile.cost import ZERO, OpCost

aten = torch.ops.aten


def inner_products(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the MACs of a[..., M, K] @ b[..., K, N]; a vector lacks M or N, which counts as 1.

    Dense: B·M·N·K. One sparse operand: each stored element meets a row or column of the other.
    Both sparse: how many pairs meet depends on where they are stored; the smaller of the two
    one-sided counts is an upper bound.
    """
    rows = a.shape[-2] if a.dim() > 1 else 1
    columns = b.shape[-1] if b.dim() > 1 else 1
    if not is_sparse(a) and not is_sparse(b):
        return prod(a.shape) * columns
    # A matrix multiplied with a batch meets every item.
    items_of_b = prod(b.shape[:-2]) if a.dim() < b.dim() else 1
    items_of_a = prod(a.shape[:-2]) if b.dim() < a.dim() else 1
    bounds = [stored_elements(a) * columns * items_of_b] if is_sparse(a) else []
    if is_sparse(b):
        bounds.append(stored_elements(b) * rows * items_of_a)
    return min(bounds)


def product_and_bias(
    macs: int,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    beta: Number = 1,
    alpha: Number = 1,
) -> OpCost:
    """Cost of ``beta·bias + alpha·product``. FLOPs: 2·MACs + those of ``scaled_sum``."""
    extra = scaled_sum(bias, out.numel(), a, b, beta=beta, alpha=alpha)
    return contract(macs, a, b, extra_flops=extra)


# -- two matrices, or a matrix and a vector ------------------------------------------------


@register_flops(ops("mm", "bmm", "mv", "_int_mm"))
def mm(a: torch.Tensor, b: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> OpCost:
    """a[B,M,K] @ b[B,K,N], with or without B, M and N.

    MACs: B·M·N·K. FLOPs: 2·MACs. Source: the ops' schemas.
    """
    return contract(inner_products(a, b), a, b)


@register_flops(ops("dot", "vdot"), cacheable=False)
def dot(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, **_: Any) -> OpCost:
    """MACs: K. FLOPs: 2·MACs. Nothing if the result is a zero tensor, which is not computed, as for
    the tangent of a constant.
    """
    return ZERO if out._is_zerotensor() else contract(inner_products(a, b), a, b)


@register_flops(ops("addmm", "baddbmm", "addbmm", "addmv"))
@tells_apart(0, 1)
def addmm(
    bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *_: Any,
    beta: Number = 1,
    alpha: Number = 1,
    out: torch.Tensor,
    **__: Any,
) -> OpCost:
    """beta·bias + alpha·(a[B,M,K] @ b[B,K,N]); addbmm also sums over B.

    MACs: B·M·N·K. FLOPs: 2·MACs + one per result for the bias, one more for an
    alpha other than 1, and one per element of the bias for such a beta. Source: the ops' schemas.
    """
    return product_and_bias(inner_products(a, b), a, b, out, bias=bias, beta=beta, alpha=alpha)


@register_flops(ops("_addmm_activation"), cacheable=False)  # the cost depends on the device
@tells_apart(0, 1)
def addmm_activation(
    bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: Number = 1,
    alpha: Number = 1,
    use_gelu: bool = False,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """addmm, then relu or gelu.

    MACs: M·N·K. FLOPs: addmm's + the activation's on M·N elements.
    Source: torch._decomp's _addmm_activation: gelu is the tanh form only on CUDA.
    """
    linear = addmm(bias, a, b, beta=beta, alpha=alpha, out=out)
    if not use_gelu:
        return linear + same_shaped(aten.relu, out)
    return linear + same_shaped(aten.gelu, out, approximate="tanh" if out.is_cuda else "none")


@register_flops(ops("addr"), computes_in=dtype_of_operands)
@tells_apart(0, 1)
def addr(
    bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: Number = 1,
    alpha: Number = 1,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """out[M,N] = beta·bias + alpha·outer(a[M], b[N]): no dimension is contracted, so no MACs.

    FLOPs: M·N products, M·N more if alpha is not 1, M·N sums unless beta is 0, one product per
    bias element if beta is not 1. Source: torch._refs.addr; torch.outer is likewise a product.
    """
    elements = out.numel()
    count = product_and_bias(0, a, b, out, bias=bias, beta=beta, alpha=alpha)
    return count + OpCost(flops=muls(elements, a, b))


@register_flops(ops("_foreach_mm") + ops("_foreach_mm_native_0", library="_native"))
def foreach_mm(
    a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], *, out: Any, **_: Any
) -> OpCost:
    """Pairwise a[i][M,K] @ b[i][K,N].

    MACs: Σ M·N·K. FLOPs: 2·MACs. Source: aten::_foreach_mm schema.
    """
    return sum((contract(inner_products(x, y), x, y) for x, y in zip(a, b, strict=True)), OpCost())


@register_flops(ops("_mm_plus_mm", library="inductor"))
def mm_plus_mm(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, *_: Any, out: Any, **__: Any
) -> OpCost:
    """a @ b + c @ d, as inductor fuses it.

    MACs: those of both products. FLOPs: 2·MACs + one sum per output element.
    """
    cost = contract(inner_products(a, b), a, b) + contract(inner_products(c, d), c, d)
    return cost + OpCost(flops=adds(a.shape[0] * b.shape[1], a))


# -- matmul as one operator --------------------------------------------------------------------


@register_flops(ops("matmul"))
def matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, **_: Any) -> OpCost:
    """a[..., M, K] @ b[..., K, N] with broadcasting; vectors lack M or N; nested: per item.

    MACs: output elements · K. FLOPs: 2·MACs. Source: aten::matmul schema.
    """
    return contract(_matmul_macs(a, b), a, b)


@register_flops(ops("matmul_backward"))
def matmul_backward(
    grad_out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    mask: Sequence[bool],
    *,
    out: Any,
    **_: Any,
) -> OpCost:
    """Gradients of ``matmul`` for a (grad @ b.T) and b (a.T @ grad), each if its mask is set.

    MACs: the forward's for each. FLOPs: 2·MACs.
    """
    return contract(sum(map(bool, mask)) * _matmul_macs(a, b), grad_out, a, b)


def _matmul_macs(a: torch.Tensor, b: torch.Tensor) -> int:
    if is_strided_nested(a) and is_strided_nested(b):
        pairs = zip(nested_sizes(a), nested_sizes(b), strict=True)
        return sum(prod(x) * y[-1] for x, y in pairs)
    if is_strided_nested(a):
        return a.numel() * (b.shape[-1] if b.dim() > 1 else 1)
    if is_strided_nested(b):
        return b.numel() * (a.shape[-2] if a.dim() > 1 else 1)
    if is_sparse(a) or is_sparse(b):
        return inner_products(a, b)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    rows = a.shape[-2] if a.dim() > 1 else 1
    columns = b.shape[-1] if b.dim() > 1 else 1
    return int(prod(batch)) * rows * columns * a.shape[-1]
