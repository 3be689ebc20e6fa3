"""Convolutions of any dimension, stride, padding, dilation and grouping, and their backward.

Letters: N batch, Cin, Cout channels, g groups, k the product of the kernel's sizes, in and out
the products of the input's and output's spatial sizes. Positions where the kernel meets padding
count as others do. A transposed convolution is the mirror of a convolution: input and output
change places, so each input element, not each output element, meets Cout/g·k weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dispatch_flops.cost import OpCost
from dispatch_flops.formulas._arithmetic import adds, contract, muls, same_shaped
from dispatch_flops.formulas._ops import overloads, packets
from dispatch_flops.formulas.linear import post_op
from dispatch_flops.registry import register_flops
from dispatch_flops.tensors import product

aten = torch.ops.aten


def forward_macs(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, transposed: bool
) -> int:
    """MACs of y = convolution(x, weight), which each of its two gradients takes as well.

    weight[Cout,Cin/g,k]: N·Cout·out·(Cin/g)·k. Transposed, weight[Cin,Cout/g,k]:
    N·Cin·in·(Cout/g)·k. Either way the leading dimension of the weight is the channel of the
    tensor that is counted once per element, so groups need not be known.
    """
    return (x if transposed else y).numel() * product(weight.shape[1:])


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

    MACs: the forward's for x and again for weight, whatever the groups. FLOPs: 2·MACs
    + N·Cout·out - Cout for bias (sum over batch and space).
    """
    to_x, to_weight, *rest = output_mask
    to_bias = any(rest)
    channels = weight.shape[0] if not transposed else _channels(grad, weight)
    summed = adds(max(0, grad.numel() - channels), grad) if to_bias else 0
    macs = (bool(to_x) + bool(to_weight)) * forward_macs(x, weight, grad, transposed=transposed)
    return contract(macs, grad, weight, extra_flops=summed)


def _channels(y: torch.Tensor, weight: torch.Tensor) -> int:
    """Channels of y, batched or not: they precede the spatial dimensions."""
    return y.shape[1 - weight.dim()] if y.dim() < weight.dim() else y.shape[1]


# -- forward -------------------------------------------------------------------------------


@register_flops(packets("convolution", "_convolution", "convolution_overrideable"))
def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    *_: Any,
    out: torch.Tensor,
    **__: Any,
) -> OpCost:
    """Any convolution, as eager runs it on every device.

    MACs: N·Cout·out·(Cin/g)·k; transposed N·Cin·in·(Cout/g)·k. FLOPs: 2·MACs + N·Cout·out (bias).
    """
    return forward_cost(x, weight, bias, out, transposed=transposed)


@register_flops(packets("cudnn_convolution"))
def cudnn_convolution(
    x: torch.Tensor, weight: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any
) -> OpCost:
    """A convolution without bias. MACs: N·Cout·out·(Cin/g)·k. FLOPs: 2·MACs."""
    return forward_cost(x, weight, None, out)


@register_flops(packets("cudnn_convolution_transpose", "_mps_convolution_transpose"))
def cudnn_convolution_transpose(
    x: torch.Tensor, weight: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any
) -> OpCost:
    """A transposed convolution without bias. MACs: N·Cin·in·(Cout/g)·k. FLOPs: 2·MACs."""
    return forward_cost(x, weight, None, out, transposed=True)


@register_flops(
    packets(
        "mkldnn_convolution",
        "miopen_convolution",
        "miopen_depthwise_convolution",
        "_mps_convolution",
        "_nnpack_spatial_convolution",
    )
)
def backend_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *_: Any,
    out: torch.Tensor,
    **__: Any,
) -> OpCost:
    """A convolution. MACs: N·Cout·out·(Cin/g)·k. FLOPs: 2·MACs + N·Cout·out (bias)."""
    return forward_cost(x, weight, bias, out)


@register_flops(packets("miopen_convolution_transpose"))
def miopen_convolution_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *_: Any,
    out: torch.Tensor,
    **__: Any,
) -> OpCost:
    """A transposed convolution. MACs: N·Cin·in·(Cout/g)·k. FLOPs: 2·MACs + N·Cout·out (bias)."""
    return forward_cost(x, weight, bias, out, transposed=True)


@register_flops(
    packets(
        "thnn_conv2d",
        "_slow_conv2d_forward",
        "slow_conv3d",
        "slow_conv3d_forward",
        "slow_conv_dilated2d",
        "slow_conv_dilated3d",
        "_conv_depthwise2d",
        "conv_depthwise3d",
    )
)
def slow_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: Sequence[int],
    bias: torch.Tensor | None = None,
    *_: Any,
    out: torch.Tensor,
    **__: Any,
) -> OpCost:
    """A convolution. MACs: N·Cout·out·(Cin/g)·k. FLOPs: 2·MACs + N·Cout·out (bias)."""
    return forward_cost(x, weight, bias, out)


@register_flops(packets("slow_conv_transpose2d", "slow_conv_transpose3d"))
def slow_conv_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: Sequence[int],
    bias: torch.Tensor | None = None,
    *_: Any,
    out: torch.Tensor,
    **__: Any,
) -> OpCost:
    """A transposed convolution. MACs: N·Cin·in·(Cout/g)·k. FLOPs: 2·MACs + N·Cout·out (bias)."""
    return forward_cost(x, weight, bias, out, transposed=True)


# -- forward with fused operations ---------------------------------------------------------


@register_flops(packets("cudnn_convolution_relu", "miopen_convolution_relu"))
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


@register_flops(packets("cudnn_convolution_add_relu", "miopen_convolution_add_relu"))
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
    extra = adds(out.numel(), out) + (muls(out.numel(), out) if alpha not in (None, 1) else 0)
    cost = forward_cost(x, weight, bias, out) + OpCost(flops=extra)
    return cost + same_shaped(aten.relu, out)


# oneDNN packs weights: their leading dimensions may be split or swapped, their size is kept.
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


@register_flops(overloads("_convolution_pointwise.default", library="mkldnn"))
def convolution_pointwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    attr: str,
    scalars: Sequence[Any],
    algorithm: str | None,
    *,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """A convolution and an activation. FLOPs: the convolution's + the activation's."""
    return _packed_cost(x, weight, bias, out, out) + post_op(attr, algorithm, out)


@register_flops(overloads("_convolution_pointwise.binary", library="mkldnn"))
def convolution_pointwise_binary(
    x: torch.Tensor,
    other: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    binary_attr: str,
    alpha: float | None,
    unary_attr: str | None,
    unary_scalars: Sequence[Any],
    unary_algorithm: str | None,
    *,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """A convolution, a binary op with another tensor, and an activation.

    FLOPs: the convolution's + one per output element, another if alpha is not 1, + the
    activation's.
    """
    extra = adds(out.numel(), out) + (muls(out.numel(), out) if alpha not in (None, 1) else 0)
    cost = _packed_cost(x, weight, bias, out, out) + OpCost(flops=extra)
    return cost + post_op(unary_attr, unary_algorithm, out)


@register_flops(overloads("_convolution_pointwise_.binary", library="mkldnn"))
def convolution_pointwise_binary_(
    other: torch.Tensor, x: torch.Tensor, *args: Any, out: torch.Tensor, **kwargs: Any
) -> OpCost:
    """``_convolution_pointwise.binary``, the other tensor first: the result is written over it."""
    return convolution_pointwise_binary(x, other, *args, out=out, **kwargs)


@register_flops(packets("_convolution_transpose_pointwise", library="mkldnn"))
def convolution_transpose_pointwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    output_padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    attr: str,
    scalars: Sequence[Any],
    algorithm: str | None,
    *,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """A transposed convolution and an activation. FLOPs: the convolution's + the activation's."""
    return _packed_cost(x, weight, bias, out, x) + post_op(attr, algorithm, out)


# -- backward ------------------------------------------------------------------------------


@register_flops(packets("convolution_backward"))
def convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
    *,
    out: Any,
    **_: Any,
) -> OpCost:
    """Gradients of ``convolution``.

    MACs: the forward's for each of x and weight that the mask asks for.
    FLOPs: 2·MACs + N·Cout·out - Cout for bias.
    """
    return backward_cost(grad, x, weight, output_mask, transposed=transposed)


@register_flops(packets("convolution_backward_overrideable"))
def convolution_backward_overrideable(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
    *,
    out: Any,
    **_: Any,
) -> OpCost:
    """As ``convolution_backward``."""
    return backward_cost(grad, x, weight, output_mask, transposed=transposed)


@register_flops(overloads("_slow_conv2d_backward.output_mask"))
def slow_conv2d_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_mask: Sequence[bool],
    *,
    out: Any,
    **_: Any,
) -> OpCost:
    """As ``convolution_backward``."""
    return backward_cost(grad, x, weight, output_mask, transposed=False)


@register_flops(overloads("_slow_conv2d_backward.grad_input"))
def slow_conv2d_backward_out(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *_: Any, out: Any, **__: Any
) -> OpCost:
    """As ``convolution_backward``, all three gradients, written into given tensors."""
    return backward_cost(grad, x, weight, (True, True, True), transposed=False)


def _mps_backward(*, transposed: bool) -> Callable[..., OpCost]:
    def formula(
        x: torch.Tensor,
        grad: torch.Tensor,
        weight: torch.Tensor,
        *args: Any,
        out: Any,
        **kwargs: Any,
    ) -> OpCost:
        """As ``convolution_backward``; the mask is the last argument."""
        mask = kwargs["output_mask"] if "output_mask" in kwargs else args[-1]
        return backward_cost(grad, x, weight, mask, transposed=transposed)

    formula.__module__ = __name__
    return formula


register_flops(packets("mps_convolution_backward"))(_mps_backward(transposed=False))
register_flops(packets("mps_convolution_transpose_backward"))(_mps_backward(transposed=True))


# -- over time -----------------------------------------------------------------------------


@register_flops(packets("conv_tbc"))
def conv_tbc(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    pad: int = 0,
    *,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """out[T',N,Cout] from x[T,N,Cin] and weight[k,Cin,Cout].

    MACs: T'·N·Cout·k·Cin. FLOPs: 2·MACs + T'·N·Cout (bias).
    """
    return contract(_tbc_macs(out, weight), x, weight, extra_flops=adds(out.numel(), x))


@register_flops(packets("conv_tbc_backward"))
def conv_tbc_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    pad: int,
    *,
    out: Any,
    **_: Any,
) -> OpCost:
    """Gradients for x, weight and bias, all three.

    MACs: 2 x forward. FLOPs: 2·MACs + T'·N·Cout - Cout for bias.
    """
    summed = adds(max(0, grad.numel() - bias.numel()), grad)
    return contract(2 * _tbc_macs(grad, weight), grad, weight, extra_flops=summed)


def _tbc_macs(y: torch.Tensor, weight: torch.Tensor) -> int:
    return y.numel() * product(weight.shape[:2])
