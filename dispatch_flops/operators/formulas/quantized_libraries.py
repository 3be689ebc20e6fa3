"""Products of quantised operands in bitsandbytes, torchao and vLLM, once they are loaded.

Letters: M rows, K contracted, N columns. Packed weights have other shapes than [N, K].
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import dtype_of
from dispatch_flops.operators.formulas.layer_libraries import into
from dispatch_flops.operators.formulas.scaled_matmul import scaled_mm
from dispatch_flops.operators.numbers import depends_on_numbers
from dispatch_flops.operators.registry import declare_free, register_flops
from dispatch_flops.profile.cost import OpCost, contraction, flops

Tensor = torch.Tensor


# -- bitsandbytes ------------------------------------------------------------------------------
# Source of all: bitsandbytes-foundation/bitsandbytes, bitsandbytes/_ops.py (schemas) and
# bitsandbytes/backends/default/ops.py (what is computed).

# Values are looked up in a code, which is free, and multiplied with the maximum of their block.
DEQUANTISE = 1
# Row scale times column scale, times the integer, times a constant.
_RESCALE = 3
# |x| and its maximum; the reciprocal per block; the product with it, and two bounds. The search in
# the code compares with 8 (of 256 values) or 4 (of 16) bounds.
_SEARCH = {256: 8, 16: 4}


@register_flops("bitsandbytes::int8_linear_matmul", by_name=True)
def int8_linear_matmul(*, A: Tensor, B: Tensor, out: Any, **_: Any) -> OpCost:
    """A[M,K] @ B[N,K].T in integers.

    MACs: M·N·K. FLOPs: 2·MACs. Source: bitsandbytes/_ops.py.
    """
    return contraction(A.numel() * B.shape[0])


@register_flops("bitsandbytes::int8_mm_dequant", by_name=True)
def int8_mm_dequant(*, A: Tensor, bias: Tensor | None = None, out: Tensor, **_: Any) -> OpCost:
    """FLOPs: 3 per element for the scales of its row and column, 1 for a bias.

    Source: bitsandbytes/backends/default/ops.py.
    """
    return flops(A.numel() * (_RESCALE + (bias is not None)))


@register_flops("bitsandbytes::int8_scaled_mm", by_name=True, computes_in="int8")
def int8_scaled_mm(
    *, A: Tensor, B: Tensor, bias: Tensor | None = None, out: Tensor, **_: Any
) -> OpCost:
    """``int8_linear_matmul``, then ``int8_mm_dequant``.

    MACs: M·N·K. FLOPs: 2·MACs + 3·M·N + M·N (bias). Source: bitsandbytes/backends/default/ops.py.
    """
    rescaled = int8_mm_dequant(A=out, bias=bias, out=out)
    return int8_linear_matmul(A=A, B=B, out=out) + rescaled


@register_flops("bitsandbytes::int8_mixed_scaled_mm", by_name=True, computes_in="int8")
def int8_mixed_scaled_mm(
    *,
    CA: Tensor,
    CB: Tensor,
    outlier_cols: Tensor | None = None,
    bias: Tensor | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """``int8_scaled_mm`` of CA[M,K] and CB[N,K], and L columns of outliers in A's own precision.

    MACs: M·N·(K+L). FLOPs: 2·MACs + 3·M·N + M·N (bias) + 2·N·L (the weights of the outliers,
    dequantised) + M·N (their sum). Source: bitsandbytes/backends/default/ops.py.
    """
    result: Tensor = out[0]
    cost = int8_scaled_mm(A=CA, B=CB, bias=bias, out=result)
    outliers = 0 if outlier_cols is None else outlier_cols.numel()
    if not outliers:
        return cost
    extra = 2 * CB.shape[0] * outliers + result.numel()
    return cost + contraction(result.numel() * outliers, extra_flops=extra)


@register_flops("bitsandbytes::int8_vectorwise_quant", by_name=True)
@depends_on_numbers
def int8_vectorwise_quant(*, A: Tensor, threshold: float = 0.0, out: Any, **_: Any) -> OpCost:
    """A[M,K] in 8 bits, by the maximum of each row.

    FLOPs: M·K each for the absolute values, the product with 127/maximum and the rounding,
    M·(K-1) comparisons, M quotients: 4·M·K; a threshold for outliers 2·M·K (absolute values and
    comparisons). Source: bitsandbytes/backends/default/ops.py.
    """
    return flops(A.numel() * (6 if threshold > 0 else 4))


@register_flops("bitsandbytes::int8_double_quant", by_name=True)
@depends_on_numbers
def int8_double_quant(*, A: Tensor, threshold: float = 0.0, out: Any, **_: Any) -> OpCost:
    """``int8_vectorwise_quant`` by rows, then the same by columns.

    FLOPs by columns: M·K each for the absolute values, the product with 127, the quotient and the
    rounding, (M-1)·K comparisons; a threshold M·K. Source: bitsandbytes/backends/cuda/ops.py.
    """
    by_rows = int8_vectorwise_quant(A=A, threshold=threshold, out=out)
    columns = A.shape[-1] if A.numel() else 0
    return by_rows + flops(A.numel() * (6 if threshold > 0 else 5) - columns)


@register_flops("bitsandbytes::int8_vectorwise_dequant", by_name=True)
def int8_vectorwise_dequant(*, A: Tensor, out: Tensor, **_: Any) -> OpCost:
    """A · stats / 127. FLOPs: 2 per element. Source: bitsandbytes/_ops.py."""
    return flops(2 * A.numel())


@register_flops(["bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit"], by_name=True)
@depends_on_numbers
def gemm_4bit(
    *,
    A: Tensor,
    shapeB: Sequence[int],
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    out: Tensor | None,
    **_: Any,
) -> OpCost:
    """A[...,K] @ dequantised(B)[N,K].T + bias; B is packed, so its shape is an argument.

    MACs: M·N·K. FLOPs: 2·MACs + N·K (maxima of blocks) + M·N (bias); a maximum that is itself in
    8 bits costs 2. Source: bitsandbytes/backends/default/ops.py.
    """
    weights = prod(shapeB)
    rows = A.numel() // shapeB[-1] if shapeB[-1] else 0
    extra = weights * DEQUANTISE + (rows * shapeB[0] if bias is not None else 0)
    if absmax_8bit is not None:
        extra += 2 * absmax_8bit.numel()
    return contraction(rows * weights, extra_flops=extra)


@register_flops("bitsandbytes::dequantize_4bit", by_name=True)
@depends_on_numbers
def dequantize_4bit(*, shape: Sequence[int], out: Any, **_: Any) -> OpCost:
    """FLOPs: 1 per element. Source: bitsandbytes/backends/default/ops.py."""
    return flops(prod(shape) * DEQUANTISE)


@register_flops("bitsandbytes::dequantize_blockwise", by_name=True)
def dequantize_blockwise(*, A: Tensor, out: Any, **_: Any) -> OpCost:
    """FLOPs: 1 per element. Source: bitsandbytes/backends/default/ops.py."""
    return flops(A.numel() * DEQUANTISE)


@register_flops(["bitsandbytes::quantize_blockwise", "bitsandbytes::quantize_4bit"], by_name=True)
@depends_on_numbers
def quantize_blockwise(
    *, A: Tensor, blocksize: int, code: Tensor | None = None, out: Any, **_: Any
) -> OpCost:
    """FLOPs: 5 per element less 1 per block (absolute value, maximum, product, two bounds), 2 per
    block (bound and reciprocal); 8 comparisons per element in a code of 256 values, 4 in one of 16.

    Source: bitsandbytes/backends/default/ops.py.
    """
    elements = A.numel()
    blocks = -(-elements // blocksize)
    search = _SEARCH[256 if code is not None else 16]
    return flops(elements * (5 + search) - blocks + 2 * blocks)


# -- torchao -------------------------------------------------------------------------------------
# Source of all: pytorch/ao, torchao/ops.py.


@register_flops("torchao::mx_fp8_bf16", by_name=True)
def mx_fp8_bf16(
    *, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, **_: Any
) -> OpCost:
    """``aten._scaled_mm`` with a scale per block of 32.

    MACs: M·N·K. FLOPs: 2·MACs + 2·M·N. Source: pytorch/ao, torchao/ops.py.
    """
    return scaled_mm(self=a, scale_a=a_scale, scale_b=b_scale, out=out)


@register_flops(["torchao::blockwise_scaled_mm", "ao::blockwise_fp8_gemm"], by_name=True)
def blockwise_scaled_mm(
    *, a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor, out: Tensor, **_: Any
) -> OpCost:
    """``aten._scaled_mm_v2`` with a scale per block.

    MACs: M·N·K. FLOPs: 2·MACs + 2·M·N.
    Source: pytorch/ao, torchao/prototype/blockwise_fp8_training/kernels.py,
    torchao/quantization/quantize_/workflows/float8/kernels.py.
    """
    return scaled_mm(self=a, scale_a=a_s, scale_b=b_s, out=out)


@register_flops(
    ["torchao::float8_linear_cpu", "torchao::da8w4_linear_cpu"],
    by_name=True,
    computes_in=dtype_of("input"),
)
def quantized_linear(
    *,
    input: Tensor,
    input_scales: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    **_: Any,
) -> OpCost:
    """input[...,K] @ packed weight, N is the result's.

    MACs: M·N·K. FLOPs: as ``aten._scaled_mm``; zero points are integers. Source: torchao/ops.py.
    """
    return scaled_mm(self=input, scale_a=input_scales, scale_b=weight_scales, bias=bias, out=out)


@register_flops("torchao::rowwise_scaled_linear_sparse_cutlass_f8f8", by_name=True)
def sparse_linear(
    *, input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor, **_: Any
) -> OpCost:
    """input[...,K] @ weight.T with 2 of 4 weights stored, weight[N,K/2].

    MACs: M·N·K/2. FLOPs: 2·MACs + 2·M·N (scales) + M·N (bias). Source: torchao/ops.py.
    """
    rows = input.numel() // input.shape[-1] if input.numel() else 0
    return contraction(rows * weight.numel(), extra_flops=out.numel() * (2 + (bias is not None)))


# -- vLLM ----------------------------------------------------------------------------------------
# Source of all: vllm-project/vllm, csrc/torch_bindings.cpp. Results are arguments of most.


@register_flops("_C::cutlass_scaled_mm", computes_in=dtype_of("a"))
def cutlass_scaled_mm(
    result: Tensor,
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    bias: Tensor | None = None,
    *,
    out: None,
    **_: Any,
) -> OpCost:
    """result[M,N] = a_scales·b_scales·(a[M,K] @ b[K,N]) + bias.

    MACs: M·N·K. FLOPs: 2·MACs + 2·M·N + M·N (bias). Source: csrc/torch_bindings.cpp.
    """
    cost = scaled_mm(self=a, scale_a=a_scales, scale_b=b_scales, bias=bias, out=result)
    return into(cost, result, a, b, a_scales, b_scales, bias)


@register_flops("_C::awq_gemm", by_name=True)
def awq_gemm(*, _in_feats: Tensor, out: Tensor, **_: Any) -> OpCost:
    """_in_feats[M,K] @ dequantised(_kernel)[K,N].

    MACs: M·N·K. FLOPs: 2·MACs + 2·N·K (a scale and a zero point for each weight).
    Source: csrc/torch_bindings.cpp.
    """
    macs = _in_feats.numel() * out.shape[-1]
    return contraction(macs, extra_flops=2 * _in_feats.shape[-1] * out.shape[-1])


@register_flops("_C::marlin_gemm", by_name=True)
@depends_on_numbers
def marlin_gemm(
    *,
    size_m: int,
    size_n: int,
    size_k: int,
    b_bias_or_none: Tensor | None = None,
    b_zeros_or_none: Tensor | None = None,
    out: Tensor,
    **_: Any,
) -> OpCost:
    """a[M,K] @ dequantised(b_q_weight)[K,N] + bias.

    MACs: M·N·K. FLOPs: 2·MACs + N·K (scales) + N·K (zero points) + M·N (bias).
    Source: csrc/torch_bindings.cpp.
    """
    per_weight = 1 + (b_zeros_or_none is not None and b_zeros_or_none.numel() > 0)
    extra = size_n * size_k * per_weight + size_m * size_n * (b_bias_or_none is not None)
    return contraction(size_m * size_n * size_k, extra_flops=extra)


declare_free(
    [
        "_C::gptq_marlin_repack", "_C::awq_marlin_repack", "_C::marlin_int4_fp8_preprocess",
        "torchao::da8w4_linear_prepack_cpu", "torchao::float8_linear_prepack_cpu",
        "torchao::to_sparse_semi_structured_cutlass_sm9x_f8",
    ],
    "packs weights, ahead of the products",
)  # fmt: skip
