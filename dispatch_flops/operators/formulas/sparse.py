"""Operators on sparse tensors: work depends on the stored elements, never on the logical size.

For ``mm``, ``addmm`` and similar, matmul.py covers sparse operands; for pointwise operators,
pointwise.py does. The formulas here read the number of stored elements, which shapes do not show,
so their costs are not cached.

Letters: s stored elements, K contracted, N columns of the dense operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import (
    adds,
    contract,
    dtype_of,
    dtype_of_result,
    muls,
    same_shaped,
    scaled_sum,
)
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.matmul import inner_products
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import declare_free, register_flops
from dispatch_flops.operators.tensors import stored_elements
from dispatch_flops.profile.cost import OpCost, flops

Tensor = torch.Tensor
aten = torch.ops.aten

declare_free(
    ops(
        *"""
        _to_sparse _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc _to_dense
        _sparse_broadcast_to_copy _spdiags copy_sparse_to_sparse resize_as_sparse sparse_resize
        sparse_resize_and_clear _sparse_mask_projection sparse_mask
        _to_sparse_semi_structured _sparse_semi_structured_tile _sparse_semi_structured_apply
        _sparse_semi_structured_apply_dense _cslt_compress
        _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo
        _sparse_sum_backward
        """.split()
    ),
    "moves elements and indices between layouts",
)
declare_free(
    ops(
        *"""
        _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors sparse_coo_tensor
        _sparse_compressed_tensor_with_dims sparse_compressed_tensor
        _sparse_broadcast_to _validate_compressed_sparse_indices
        _nnz dense_dim sparse_dim is_coalesced _coalesced _dimI _dimV
        """.split()
    ),
    "wraps or describes tensors that exist",
    moves=False,
)
declare_free(ops("_cslt_sparse_mm_search"), "looks for the fastest kernel")


# -- products ------------------------------------------------------------------------------


@register_flops(ops("_sparse_addmm"), cacheable=False)
@tells_apart(0, 1)
def sparse_addmm(
    bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor, **_: Any
) -> OpCost:
    """beta·bias + alpha·(a @ b), a or b sparse; ``torch.sparse.mm`` calls it.

    MACs: s·N; for two sparse operands an upper bound. FLOPs: 2·MACs; per
    result element one product if alpha is not 1, and one sum unless beta is 0, which drops the
    bias; per bias element one product if beta is neither.
    """
    extra = scaled_sum(bias, stored_elements(out), a, beta=beta, alpha=alpha)
    return contract(inner_products(a, b), a, b, extra_flops=extra)


@register_flops(ops("_sparse_sparse_matmul", "hspmm", "_sspmm"), cacheable=False)
def sparse_product(a: Tensor, b: Tensor, *, out: Tensor, **_: Any) -> OpCost:
    """a @ b. MACs: s·N; for two sparse operands an upper bound."""
    return contract(inner_products(a, b), a, b)


@register_flops(ops("sspaddmm"), cacheable=False)
@tells_apart(0, 1)
def sspaddmm(
    bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor, **_: Any
) -> OpCost:
    """beta·bias + alpha·(a @ b), all but b sparse: each stored bias element is added once."""
    extra = scaled_sum(bias, stored_elements(bias), a, beta=beta)
    extra += muls(stored_elements(a) * b.shape[-1], a, b) if alpha != 1 else 0
    return contract(inner_products(a, b), a, b, extra_flops=extra)


@register_flops(ops("sparse_sampled_addmm"), cacheable=False)
@tells_apart(0, 1)
def sampled_addmm(
    bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor, **_: Any
) -> OpCost:
    """beta·bias + alpha·(a[.., M, K] @ b[.., K, N]), only where bias stores elements.

    MACs: s·K. FLOPs: 2·MACs, and per stored element as ``_sparse_addmm``.
    """
    extra = scaled_sum(bias, stored_elements(bias), a, beta=beta, alpha=alpha)
    return contract(stored_elements(bias) * a.shape[-1], a, b, extra_flops=extra)


@register_flops(ops("_sparse_mm_reduce_impl"), cacheable=False)
def mm_reduce(a: Tensor, b: Tensor, reduce: str, *, out: Any, **_: Any) -> OpCost:
    """out[i, n] = reduce over stored a[i, k] of a[i, k]·b[k, n].

    MACs: s·N for sum and mean, which also divides each result. amax and amin keep one of the
    products: s·N products and as many comparisons, no MACs.
    """
    products = stored_elements(a) * b.shape[-1]
    if reduce in ("amax", "amin"):
        return flops(2 * products)
    return contract(products, a, b, extra_flops=out[0].numel() if reduce == "mean" else 0)


@register_flops(ops("_sparse_mm_reduce_impl_backward"), cacheable=False)
def mm_reduce_backward(
    a: Tensor,
    grad: Tensor,
    b: Tensor,
    reduce: str,
    arg: Tensor,
    output_mask: Sequence[bool],
    *,
    out: Any,
    **_: Any,
) -> OpCost:
    """Gradients of a (at its stored elements) and of b.

    MACs: s·N for each that is needed; mean divides s·N times. amax and amin pass each gradient
    to one product: a product and an accumulation, no MACs.
    """
    needed = sum(output_mask)
    if reduce in ("amax", "amin"):
        return flops(2 * needed * grad.numel())
    products = needed * stored_elements(a) * b.shape[-1]
    return contract(products, a, b, extra_flops=products if reduce == "mean" else 0)


# -- sums, softmax -------------------------------------------------------------------------


@register_flops(
    ops("_coalesce", "_sparse_sum", "_sparse_csr_sum"), cacheable=False, computes_in=dtype_of_result
)
def add_up(self: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Stored elements summed into fewer: one addition for each that disappears."""
    return flops(adds(max(stored_elements(self) - stored_elements(out), 0), out))


@register_flops(ops("_sparse_csr_prod"), cacheable=False, computes_in=dtype_of_result)
def multiply_up(self: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Stored elements multiplied into fewer: one product for each that disappears."""
    return flops(muls(max(stored_elements(self) - stored_elements(out), 0), out))


@register_flops(
    ops("_sparse_softmax", "_sparse_log_softmax"), cacheable=False, computes_in=dtype_of_result
)
def softmax(self: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Maximum, difference, exponential, sum, and quotient or difference: 5 per stored element.

    (Exactly 2 less per line for softmax and 1 less for log_softmax, but how many lines store
    something is data.)
    """
    return flops(5 * stored_elements(self))


@register_flops(
    ops("_sparse_softmax_backward_data", "_sparse_log_softmax_backward_data"), cacheable=False
)
def softmax_backward(grad: Tensor, output: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """softmax: y·(g - Σ g·y); log_softmax: g - e^y·Σ g: 4 per stored element, as above."""
    return flops(4 * stored_elements(output))


# -- 2:4 semi-structured -------------------------------------------------------------------
# Two of every four consecutive weights are stored, so K counts half.


@register_flops(ops("_sparse_semi_structured_mm"))
def semi_structured_mm(
    a: Tensor, meta: Tensor, b: Tensor, *_args: Any, out: Tensor, **_: Any
) -> OpCost:
    """a[M, K/2] @ b[K, N]. MACs: M·N·K/2."""
    return contract(a.numel() * b.shape[-1], a, b)


@register_flops(ops("_sparse_semi_structured_addmm"), computes_in=dtype_of("mat1"))
@tells_apart(0, 1)
def semi_structured_addmm(
    bias: Tensor,
    a: Tensor,
    meta: Tensor,
    b: Tensor,
    *,
    alpha: Any = 1,
    beta: Any = 1,
    out: Tensor,
    **_: Any,
) -> OpCost:
    """beta·bias + alpha·(a[M, K/2] @ b[K, N]). MACs: M·N·K/2."""
    extra = scaled_sum(bias, out.numel(), out, beta=beta, alpha=alpha)
    return contract(a.numel() * b.shape[-1], a, b, extra_flops=extra)


@register_flops(ops("_sparse_semi_structured_linear"))
def semi_structured_linear(
    x: Tensor,
    weight: Tensor,
    meta: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out: Tensor,
    **_: Any,
) -> OpCost:
    """x[T, K] @ weight[O, K/2]^T + bias, then relu or silu. MACs: T·O·K/2."""
    rows = x.numel() // x.shape[-1]
    cost = contract(rows * weight.numel(), x, extra_flops=out.numel() if bias is not None else 0)
    if activation in ("relu", "silu"):
        return cost + same_shaped(getattr(aten, activation), out)
    return cost


@register_flops(ops("_cslt_sparse_mm"), computes_in=dtype_of("dense_B"))
def cslt_mm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    *_args: Any,
    out: Tensor,
    **_: Any,
) -> OpCost:
    """alpha·(a @ b[K, N]) + bias, a compressed to an opaque buffer. MACs: M·N·K/2.

    FLOPs: 2·MACs, and one more per result element for each of alpha and bias that is given.
    """
    given = (bias is not None) + (alpha is not None)
    return contract(out.numel() * b.shape[0] // 2, b, extra_flops=out.numel() * given)
