"""Quantised linear layers and convolutions.

Products of integers count as MACs (2 FLOPs each, like all MACs); the integer bias is free. The
rest is arithmetic on reals: quantising inputs by their range (dynamic), rescaling results to
integers (5 per result) or to reals (1 per result, 1 more for a bias).
Weights are opaque packages; their shapes follow from inputs and results, or from ``unpack``.

Letters: T rows, K contracted, O results per row.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import dtype_of
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas._quantized import is_packed, quantized
from dispatch_flops.operators.formulas.fake_quantize import (
    DEQUANTIZE,
    QUANTIZE,
    dequantize,
    dynamic,
    quantize,
    reals,
)
from dispatch_flops.operators.formulas.linear import post_op
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.registry import declare_free, register_flops
from dispatch_flops.profile.cost import OpCost, contraction, flops

Tensor = torch.Tensor
aten = torch.ops.aten

_PREPACK = """
    conv_prepack conv1d_prepack conv2d_prepack conv3d_prepack conv_transpose1d_prepack
    conv_transpose2d_prepack conv_transpose3d_prepack conv_unpack conv1d_unpack conv2d_unpack
    conv3d_unpack conv_transpose1d_unpack conv_transpose2d_unpack conv_transpose3d_unpack
    linear_prepack linear_prepack_fp16 linear_prepack_legacy linear_prepack_fp16_legacy
    linear_unpack linear_unpack_fp16 embedding_bag_prepack embedding_bag_unpack
    embedding_bag_byte_prepack embedding_bag_byte_prepack_with_rowwise_min_max
    embedding_bag_byte_unpack embedding_bag_4bit_prepack embedding_bag_4bit_unpack
    embedding_bag_4bit_prepack_with_rowwise_min_max embedding_bag_2bit_prepack
    embedding_bag_2bit_prepack_with_rowwise_min_max embedding_bag_2bit_unpack
    make_quantized_cell_params make_quantized_cell_params_dynamic
    make_quantized_cell_params_fp16 _wrapped_linear_prepack
    wrapped_fbgemm_pack_gemm_matrix_fp16
"""
for _library in ("quantized", "_quantized"):
    declare_free(ops(*_PREPACK.split(), library=_library), "packs weights, ahead of the run")
declare_free(
    ops("qconv_prepack", "qlinear_prepack", "linear_prepack_fp16", library="onednn")
    + ops("qlinear_prepack", "qlinear_unpack", library="sparse"),
    "packs weights, ahead of the run",
)


# -- linear --------------------------------------------------------------------------------


def matmul_cost(x: Tensor, out: Tensor) -> OpCost:
    """x[T, K] @ weight[K, O]: T·O·K MACs."""
    return contraction(out.numel() * x.shape[-1])


@register_flops(
    quantized(
        *"""
        linear linear_relu linear_leaky_relu linear_tanh matmul
        """.split()
    )
    + ops("qlinear", "qlinear_relu", library="sparse")
)
def linear(x: Tensor, *args: Any, out: Tensor, **_: Any) -> OpCost:
    """Integers to integers. MACs: T·O·K. FLOPs: 2·MACs + 5·T·O.

    relu is part of the clamping. leaky_relu and tanh, which backends look up, count as such too.
    A block-sparse weight (library sparse) counts as dense: how much it stores is not visible.
    """
    cost = matmul_cost(x, out) + flops(QUANTIZE * out.numel())
    return cost + packed_linear_bytes(x, args[0], out) if is_packed(args[0]) else cost


@register_flops(quantized("wrapped_quantized_linear"), computes_in="int8")
def linear_of_reals(
    x: Tensor, scale: Any, zero_point: Any, weight: Tensor, *_args: Any, out: Tensor, **_: Any
) -> OpCost:
    """``quantized.linear`` of reals: x and weight are quantised, 5 each, results dequantised, 2."""
    reals = quantize((x, weight), out=out).flops + DEQUANTIZE * out.numel()
    return linear(x, weight, out=out) + flops(reals)


@register_flops(quantized("_wrapped_quantized_linear_prepacked"), computes_in="int8")
def linear_of_reals_prepacked(x: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """As ``_quantized.wrapped_quantized_linear``, with O·K packed integers and a float32 bias."""
    features = out.shape[-1]
    weight = OpCost(bytes_read=nbytes(x) + features * (x.shape[-1] + 4), bytes_written=nbytes(out))
    return linear_of_reals(x, None, None, x[:0], out=out) + weight


def packed_linear_bytes(x: Tensor, packed: Any, out: Tensor, *, item: int = 1) -> OpCost:
    """Bytes of x, O·K packed weights of ``item`` bytes, a float32 bias, and the result."""
    features = out.shape[-1]
    weight = features * x.shape[-1] * item + 4 * features * has_bias(packed)
    return OpCost(bytes_read=nbytes(x) + weight, bytes_written=nbytes(out))


def packed_conv_bytes(operands: Any, packed: Any, out: Tensor) -> OpCost:
    """Bytes of the operands, the packed weight and bias, and the result."""
    return OpCost(bytes_read=nbytes(operands, packed.unpack()), bytes_written=nbytes(out))


@register_flops(
    quantized("linear_dynamic", "linear_relu_dynamic")
    + ops("qlinear_dynamic", "qlinear_relu_dynamic", library="sparse"),
    cacheable=False,
    computes_in="int8",
)
def linear_dynamic(x: Tensor, packed: Any, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Reals to reals. MACs: T·O·K. FLOPs: 2·MACs + quantising x by its range + per result one
    product with the scales and, with a bias, one sum.
    """
    rescale = out.numel() * (1 + has_bias(packed))
    cost = matmul_cost(x, out) + flops(dynamic(x.numel()) + rescale)
    return cost + packed_linear_bytes(x, packed, out)


@register_flops(
    quantized("linear_dynamic_fp16", "linear_relu_dynamic_fp16"),
    cacheable=False,
)
def linear_fp16(x: Tensor, packed: Any, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Reals times half-precision weights. MACs: T·O·K. FLOPs: 2·MACs + T·O with a bias."""
    cost = matmul_cost(x, out) + flops(out.numel() * has_bias(packed))
    return cost + packed_linear_bytes(x, packed, out, item=2)


@register_flops(
    quantized("linear_dynamic_fp16_unpacked_weight", "wrapped_fbgemm_linear_fp16_weight")
    + ops("linear_dynamic_fp16", "linear_relu_dynamic_fp16", library="onednn")
)
def linear_fp16_unpacked(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *_args: Any, out: Tensor, **_: Any
) -> OpCost:
    """As ``quantized.linear_dynamic_fp16``, with an unpacked bias."""
    return matmul_cost(x, out) + flops(out.numel() if bias is not None else 0)


@register_flops(
    quantized(
        "linear_with_input_q_dq_qweight_dq_output_fp32",
        "linear_with_input_q_dq_qweight_dq_relu_output_fp32",
    ),
    cacheable=False,
    computes_in="int8",
)
def linear_fake(
    x: Tensor, scale: Any, zero_point: Any, packed: Any, *, out: Tensor, **_: Any
) -> OpCost:
    """Reals to reals with given scales: x is quantised, results are rescaled."""
    surround = quantize(x, out=x).flops + out.numel() * (1 + has_bias(packed))
    cost = matmul_cost(x, out) + flops(surround)
    parameters = OpCost(bytes_read=nbytes(scale, zero_point))
    return cost + packed_linear_bytes(x, packed, out) + parameters


@register_flops(
    ops("qlinear_pointwise", library="onednn"), by_name=True, computes_in=dtype_of("qx")
)
def qlinear_pointwise(
    *,
    qx: Tensor,
    post_op_name: str = "none",
    post_op_algorithm: str = "none",
    binary_post_op: str = "none",
    unary_post_op: str = "none",
    unary_post_op_algorithm: str = "none",
    out: Tensor,
    **_: Any,
) -> OpCost:
    """qx[T, K] @ qw, then post-operations. MACs: T·O·K.

    FLOPs: 2·MACs + the rescaling of results, 5 to integers and 1 to reals, and post-operations.
    """
    activations = (post_op_name, post_op_algorithm), (unary_post_op, unary_post_op_algorithm)
    return matmul_cost(qx, out) + rescaled(out, binary_post_op, activations)


@register_flops(ops("int4mm_packed_weight_cpu", library="quantized"))
def int4_linear(x: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Reals times packed 4-bit weights, dequantised as they are read. MACs: T·O·K."""
    return matmul_cost(x, out)


def has_bias(packed: Any) -> bool:
    """Return True if a packed linear weight comes with a bias."""
    return packed.bias() is not None


def rescaled(
    out: Tensor, binary: str, activations: Iterable[tuple[str | None, str | None]]
) -> OpCost:
    """FLOPs of a oneDNN result: rescaled to integers or reals, after post-operations.

    binary: the operation with another tensor, "sum", "add", "mul" or "none".
    activations: names, possibly "none", each with its algorithm.
    """
    steps = (1 if out.is_floating_point() else QUANTIZE) + (binary != "none")
    real = reals(out)
    after = (post_op(name, algorithm, real) for name, algorithm in activations)
    return sum(after, start=flops(steps * out.numel()))


# -- convolution ---------------------------------------------------------------------------


@register_flops(
    quantized(*(f"conv{d}d{relu}" for d in (1, 2, 3) for relu in ("", "_relu"))), cacheable=False
)
def conv(x: Tensor, packed: Any, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Integers to integers. MACs: results · K, K one filter's elements. FLOPs: 2·MACs + 5 per
    result."""
    cost = conv_macs(packed, out) + flops(QUANTIZE * out.numel())
    return cost + packed_conv_bytes(x, packed, out)


@register_flops(quantized("conv2d_add", "conv2d_add_relu"), cacheable=False)
def conv_add(x: Tensor, other: Tensor, packed: Any, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """As ``quantized.conv2d``, and a dequantised tensor is added: 2 + 1 per result."""
    added = dequantize(other, out=other).flops + out.numel()
    cost = conv_macs(packed, out) + flops(QUANTIZE * out.numel() + added)
    return cost + packed_conv_bytes((x, other), packed, out)


@register_flops(
    quantized(*(f"conv{d}d_dynamic" for d in (1, 2, 3))), cacheable=False, computes_in="int8"
)
def conv_dynamic(x: Tensor, packed: Any, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Reals to reals, as ``quantized.linear_dynamic``."""
    cost = conv_macs(packed, out) + surround_dynamic(x, packed, out)
    return cost + packed_conv_bytes(x, packed, out)


@register_flops(quantized(*(f"conv_transpose{d}d" for d in (1, 2, 3))), cacheable=False)
def conv_transpose(x: Tensor, packed: Any, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Integers to integers. MACs: inputs · K, as for a convolution from results to inputs."""
    cost = conv_transpose_macs(x, packed) + flops(QUANTIZE * out.numel())
    return cost + packed_conv_bytes(x, packed, out)


@register_flops(
    quantized(*(f"conv_transpose{d}d_dynamic" for d in (1, 2, 3))),
    cacheable=False,
    computes_in="int8",
)
def conv_transpose_dynamic(x: Tensor, packed: Any, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Reals to reals, as ``quantized.linear_dynamic``."""
    cost = conv_transpose_macs(x, packed) + surround_dynamic(x, packed, out)
    return cost + packed_conv_bytes(x, packed, out)


@register_flops(
    ops("qconv_pointwise", *(f"qconv{d}d_pointwise" for d in (1, 2, 3)), library="onednn"),
    by_name=True,
    computes_in=dtype_of("qx"),
)
def qconv_pointwise(
    *,
    qw: Tensor,
    attr: str = "none",
    algorithm: str | None = None,
    binary_attr: str = "none",
    unary_attr: str | None = None,
    unary_algorithm: str | None = None,
    out: Tensor,
    **_: Any,
) -> OpCost:
    """A convolution, then post-operations. MACs: results · K.

    FLOPs: 2·MACs + the rescaling of results, 5 to integers and 1 to reals, and post-operations.
    """
    per_result = qw.numel() // out.shape[1]
    activations = (attr, algorithm), (unary_attr, unary_algorithm)
    return contraction(out.numel() * per_result) + rescaled(out, binary_attr, activations)


def conv_macs(packed: Any, out: Tensor) -> OpCost:
    """weight[O, I/groups, *kernel]: each result takes one filter's elements."""
    return contraction(out.numel() * prod(packed.unpack()[0].shape[1:]))


def conv_transpose_macs(x: Tensor, packed: Any) -> OpCost:
    """weight[I, O/groups, *kernel]: each input meets one filter's elements."""
    return contraction(x.numel() * prod(packed.unpack()[0].shape[1:]))


def surround_dynamic(x: Tensor, packed: Any, out: Tensor) -> OpCost:
    """x quantised by its range; per result one product and, with a bias, one sum."""
    bias = packed.unpack()[1] is not None
    return flops(dynamic(x.numel()) + out.numel() * (1 + bias))
