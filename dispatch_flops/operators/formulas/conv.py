"""Convolutions of any dimension, stride, padding, dilation and grouping, and their backward.

Letters: N batch, Cin, Cout channels, g groups, k the product of the kernel's sizes, in and out
the products of the input's and output's spatial sizes. Positions where the kernel covers padding
count like others. A transposed convolution mirrors a convolution: input and output swap roles, so
each input element, not each output element, meets Cout/g·k weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import (
    adds,
    contract,
    same_shaped,
    scaled_sum,
)
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.linear import post_op
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.profile.cost import OpCost

aten = torch.ops.aten


def forward_macs(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, transposed: bool
) -> int:
    """Return the MACs of y = convolution(x, weight), and of each of its two gradients.

    weight[Cout,Cin/g,k]: N·Cout·out·(Cin/g)·k. Transposed, weight[Cin,Cout/g,k]:
    N·Cin·in·(Cout/g)·k. Either way the leading dimension of the weight is the channel of the
    tensor that is counted once per element, so groups need not be known.
    """
    return (x if transposed else y).numel() * prod(weight.shape[1:])


def forward_cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    transposed: bool = False,
) -> OpCost:
    """MACs: ``forward_macs``. FLOPs: 2·MACs + one per output element (bias)."""
    extra = adds(y.numel(), x, weight) if bias is not None else 0
    return contract(forward_macs(x, weight, y, transposed=transposed), x, weight, extra_flops=extra)


def backward_cost(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    output_mask: Sequence[bool],
    *,
    transposed: bool,
) -> OpCost:
    """Gradients for x, weight and bias, each if its mask is set.

    MACs: the forward's for each of x and weight, with any groups. FLOPs: 2·MACs
    + N·Cout·out - Cout for bias (sum over batch and space).
    """
    to_x, to_weight, *rest = output_mask
    to_bias = any(rest)
    channels = weight.shape[0] if not transposed else _channels(grad, weight)
    summed = adds(max(0, grad.numel() - channels), grad) if to_bias else 0
    macs = (bool(to_x) + bool(to_weight)) * forward_macs(x, weight, grad, transposed=transposed)
    return contract(macs, grad, weight, extra_flops=summed)


def _channels(y: torch.Tensor, weight: torch.Tensor) -> int:
    """Return the channels of y, batched or not: they precede the spatial dimensions."""
    return y.shape[1 - weight.dim()] if y.dim() < weight.dim() else y.shape[1]


# -- forward -------------------------------------------------------------------------------


@register_flops(
    ops("convolution", "_convolution", "convolution_overrideable", "_nnpack_spatial_convolution"),
    by_name=True,
)
def convolution(
    *,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: bool = False,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """Any convolution, as eager runs it on every device.

    MACs: N·Cout·out·(Cin/g)·k; transposed N·Cin·in·(Cout/g)·k. FLOPs: 2·MACs + N·Cout·out (bias).
    """
    return forward_cost(input, weight, bias, out, transposed=transposed)


@register_flops(
    ops(
        "cudnn_convolution",
        "mkldnn_convolution",
        "miopen_convolution",
        "miopen_depthwise_convolution",
        "_mps_convolution",
        "thnn_conv2d",
        "_slow_conv2d_forward",
        "slow_conv3d",
        "slow_conv3d_forward",
        "slow_conv_dilated2d",
        "slow_conv_dilated3d",
        "_conv_depthwise2d",
        "conv_depthwise3d",
    ),
    by_name=True,
)
def backend_convolution(
    *,
    self: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """A convolution. MACs: N·Cout·out·(Cin/g)·k. FLOPs: 2·MACs + N·Cout·out (if it has a bias)."""
    return forward_cost(self, weight, bias, out)


@register_flops(
    ops(
        "cudnn_convolution_transpose",
        "miopen_convolution_transpose",
        "_mps_convolution_transpose",
        "slow_conv_transpose2d",
        "slow_conv_transpose3d",
    ),
    by_name=True,
)
def backend_convolution_transpose(
    *,
    self: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """A transposed convolution.

    MACs: N·Cin·in·(Cout/g)·k. FLOPs: 2·MACs + N·Cout·out (if it has a bias).
    """
    return forward_cost(self, weight, bias, out, transposed=True)


# -- forward with fused operations ---------------------------------------------------------


@register_flops(ops("cudnn_convolution_relu", "miopen_convolution_relu"))
def convolution_relu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *_: Any,
    out: torch.Tensor,
    **__: Any,
) -> OpCost:
    """relu(convolution + bias). FLOPs: the convolution's + relu's."""
    return forward_cost(x, weight, bias, out) + same_shaped(aten.relu, out)


@register_flops(ops("cudnn_convolution_add_relu", "miopen_convolution_add_relu"))
@tells_apart(1)
def convolution_add_relu(
    x: torch.Tensor,
    weight: torch.Tensor,
    z: torch.Tensor,
    alpha: float | None,
    bias: torch.Tensor | None,
    *_: Any,
    out: torch.Tensor,
    **__: Any,
) -> OpCost:
    """relu(convolution + alpha·z + bias).

    FLOPs: the convolution's + one per output element (z), another if alpha is not 1, + relu's.
    """
    cost = forward_cost(x, weight, bias, out) + _added(out, alpha)
    return cost + same_shaped(aten.relu, out)


def _added(out: torch.Tensor, alpha: float | None) -> OpCost:
    """out += alpha·other; None for alpha means 1."""
    scale = 1 if alpha is None else alpha
    return OpCost(flops=scaled_sum(out, out.numel(), out, alpha=scale))


# oneDNN packs weights: it may split or swap their leading dimensions, but keeps their size.
def _packed_cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    counted: torch.Tensor,
) -> OpCost:
    channels = counted.shape[1]
    per_element = weight.numel() // channels if channels else 0
    extra = adds(y.numel(), y) if bias is not None else 0
    return contract(counted.numel() * per_element, x, extra_flops=extra)


@register_flops(ops("_convolution_pointwise.default", library="mkldnn"), by_name=True)
def convolution_pointwise(
    *,
    X: torch.Tensor,
    W: torch.Tensor,
    B: torch.Tensor | None,
    attr: str,
    algorithm: str | None,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """A convolution and an activation. FLOPs: the convolution's + the activation's."""
    return _packed_cost(X, W, B, out, out) + post_op(attr, algorithm, out)


@register_flops(
    ops("_convolution_pointwise.binary", "_convolution_pointwise_.binary", library="mkldnn"),
    by_name=True,
)
@tells_apart(1)
def convolution_pointwise_binary(
    *,
    X: torch.Tensor,
    W: torch.Tensor,
    B: torch.Tensor | None,
    alpha: float | None,
    unary_attr: str | None,
    unary_algorithm: str | None,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """A convolution, a binary op with another tensor, and an activation.

    FLOPs: the convolution's + one per output element, another if alpha is not 1, + the
    activation's.
    """
    cost = _packed_cost(X, W, B, out, out) + _added(out, alpha)
    return cost + post_op(unary_attr, unary_algorithm, out)


@register_flops(ops("_convolution_transpose_pointwise", library="mkldnn"), by_name=True)
def convolution_transpose_pointwise(
    *,
    X: torch.Tensor,
    W: torch.Tensor,
    B: torch.Tensor | None,
    attr: str,
    algorithm: str | None,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """A transposed convolution and an activation. FLOPs: the convolution's + the activation's."""
    return _packed_cost(X, W, B, out, X) + post_op(attr, algorithm, out)


# -- backward ------------------------------------------------------------------------------


@register_flops(ops("convolution_backward", "convolution_backward_overrideable"), by_name=True)
def convolution_backward(
    *,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    transposed: bool,
    output_mask: Sequence[bool],
    out: Any,
    **_: Any,
) -> OpCost:
    """Gradients of ``convolution``.

    MACs: the forward's for each of x and weight that the mask asks for.
    FLOPs: 2·MACs + N·Cout·out - Cout for bias.
    """
    return backward_cost(grad_output, input, weight, output_mask, transposed=transposed)


@register_flops(ops("_slow_conv2d_backward", "mps_convolution_backward"), by_name=True)
def backend_convolution_backward(
    *,
    grad_output: torch.Tensor,
    self: torch.Tensor,
    weight: torch.Tensor,
    output_mask: Sequence[bool] = (True, True, True),
    out: Any,
    **_: Any,
) -> OpCost:
    """As ``convolution_backward``; an overload without a mask computes all three."""
    return backward_cost(grad_output, self, weight, output_mask, transposed=False)


@register_flops(ops("mps_convolution_transpose_backward"), by_name=True)
def mps_convolution_transpose_backward(
    *,
    grad_output: torch.Tensor,
    self: torch.Tensor,
    weight: torch.Tensor,
    output_mask: Sequence[bool],
    out: Any,
    **_: Any,
) -> OpCost:
    """As ``convolution_backward``."""
    return backward_cost(grad_output, self, weight, output_mask, transposed=True)


# -- over time -----------------------------------------------------------------------------


@register_flops(ops("conv_tbc"))
def conv_tbc(
    x: torch.Tensor, weight: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any
) -> OpCost:
    """out[T',N,Cout] from x[T,N,Cin] and weight[k,Cin,Cout].

    MACs: T'·N·Cout·k·Cin. FLOPs: 2·MACs + T'·N·Cout (bias).
    """
    return contract(_tbc_macs(out, weight), x, weight, extra_flops=adds(out.numel(), x))


@register_flops(ops("conv_tbc_backward"), by_name=True)
def conv_tbc_backward(
    *, self: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: Any, **_: Any
) -> OpCost:
    """Gradients for x, weight and bias; ``self`` is the result's gradient.

    MACs: 2 x forward. FLOPs: 2·MACs + T'·N·Cout - Cout for bias.
    """
    summed = adds(max(0, self.numel() - bias.numel()), self)
    return contract(2 * _tbc_macs(self, weight), self, weight, extra_flops=summed)


def _tbc_macs(y: torch.Tensor, weight: torch.Tensor) -> int:
    return y.numel() * prod(weight.shape[:2])
