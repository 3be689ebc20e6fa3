"""Reals to small integers and back: quantise, dequantise, fake-quantise, observe.

Integer arithmetic is free and arithmetic on reals counts, as in torch.ao's reference:

    quantise    clamp(round(x * (1/scale)) + zero_point, low, high)    5 per element
    dequantise  (q - zero_point) * scale                               2 per element

A pointwise operator on quantised tensors dequantises them, computes, and quantises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import cost_of, same_shaped
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.registry import declare_free, register_flops
from dispatch_flops.operators.tensors import is_inexact, tensors_in
from dispatch_flops.profile.cost import OpCost, flops

Tensor = torch.Tensor
aten = torch.ops.aten

QUANTIZE, DEQUANTIZE = 5, 2
FAKE_QUANTIZE = QUANTIZE + DEQUANTIZE
IN_RANGE = 2  # which elements were not clamped: two comparisons
# Scale: difference, quotient, maximum with eps. Zero point: quotient, rounding, difference, two
# bounds. Before that, the range is extended to include zero: a minimum and a maximum.
CHOOSE_QPARAMS = 10
MOVING_AVERAGE = 3  # average + constant * (new - average)


declare_free(
    ops(
        *"""
        int_repr _make_per_tensor_quantized_tensor _make_per_channel_quantized_tensor
        _convert_weight_to_int4pack _convert_weight_to_int4pack_for_cpu
        _dyn_quant_pack_4bit_weight
        """.split()
    )
    + ops("convert_element_type", library="quantized_decomposed")
    + ops("_Bfloat16QuantizedToFloat", "_FloatToBfloat16Quantized", library="quantization"),
    "copies and packs elements",
)


@register_flops(
    ops("quantize_per_tensor", "quantize_per_channel")
    + ops(
        "quantize_per_tensor",
        "quantize_per_channel",
        "quantize_per_token",
        "quantize_per_channel_group",
        library="quantized_decomposed",
    )
)
def quantize(self: Any, *_args: Any, out: Any, **_: Any) -> OpCost:
    """FLOPs: 5 per element."""
    return flops(QUANTIZE * sum(t.numel() for t in tensors_in(self)))


@register_flops(
    ops("dequantize")
    + ops(
        "dequantize_per_tensor",
        "dequantize_per_channel",
        "dequantize_per_token",
        "dequantize_per_channel_group",
        library="quantized_decomposed",
    )
)
def dequantize(self: Any, *_args: Any, out: Any, **_: Any) -> OpCost:
    """FLOPs: 2 per element; 0 for a tensor of reals."""
    return flops(sum(DEQUANTIZE * t.numel() for t in tensors_in(self) if not is_inexact(t)))


@register_flops(ops("quantize_per_tensor_dynamic"))
def quantize_dynamic(self: Tensor, *_args: Any, out: Any, **_: Any) -> OpCost:
    """Minimum, maximum, scale and zero point of the whole tensor, then 5 per element."""
    return flops(dynamic(self.numel()))


def dynamic(elements: int) -> int:
    """FLOPs of quantising a tensor by its own range."""
    return extrema(elements, 1) + CHOOSE_QPARAMS + QUANTIZE * elements if elements else 0


def extrema(elements: int, groups: int) -> int:
    """FLOPs of the minimum and the maximum of each group."""
    return 2 * (elements - groups)


# -- observers -----------------------------------------------------------------------------


@register_flops(
    ops(
        "choose_qparams",
        "choose_qparams_symmetric",
        "choose_qparams_per_token",
        "choose_qparams_per_token_asymmetric",
        "_choose_qparams_per_token_asymmetric_impl",
        library="quantized_decomposed",
    )
)
def choose_qparams(self: Tensor, *_args: Any, out: Any, **_: Any) -> OpCost:
    """Minimum and maximum of each group that gets a scale, and 10 per group."""
    groups = out[0].numel()
    return flops(extrema(self.numel(), groups) + CHOOSE_QPARAMS * groups)


@register_flops(
    ops("_fused_moving_avg_obs_fq_helper", "_fused_moving_avg_obs_fq_helper_functional"),
    by_name=True,
)
def observe_and_fake_quantize(*, self: Tensor, scale: Tensor, out: Any, **_: Any) -> OpCost:
    """Observer and fake quantisation, both assumed to be enabled: the flags are data.

    FLOPs per group: minimum, maximum, two moving averages, scale and zero point. Per element:
    fake quantisation and its mask.
    """
    groups = scale.numel()
    observe = extrema(self.numel(), groups) + groups * (2 * MOVING_AVERAGE + CHOOSE_QPARAMS)
    return flops(observe + self.numel() * (FAKE_QUANTIZE + IN_RANGE))


# -- fake quantisation ---------------------------------------------------------------------


@register_flops(
    ops(
        "fake_quantize_per_tensor_affine_cachemask",
        "fake_quantize_per_channel_affine_cachemask",
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    )
)
def fake_quantize(self: Tensor, *_args: Any, out: Any, **_: Any) -> OpCost:
    """Quantise, dequantise, and a mask of the elements in range: 9 per element."""
    return flops(self.numel() * (FAKE_QUANTIZE + IN_RANGE))


@register_flops(
    ops("_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine")
    + ops("fake_quant_per_channel", library="quantized_decomposed")
)
def fake_quantize_learnable(self: Tensor, *_args: Any, out: Any, **_: Any) -> OpCost:
    """Quantise and dequantise: 7 per element."""
    return flops(self.numel() * FAKE_QUANTIZE)


@register_flops(
    ops(
        "_fake_quantize_learnable_per_tensor_affine_backward",
        "_fake_quantize_learnable_per_channel_affine_backward",
    )
)
def fake_quantize_learnable_backward(
    grad: Tensor, self: Tensor, scale: Tensor, *_args: Any, out: Any, **_: Any
) -> OpCost:
    """Per element: the fake-quantised value and its mask again (9), gradient times mask (1), the
    scale's gradient (fq - x) / scale · grad · factor (4), and the zero point's, grad · scale ·
    factor (2). The last two are summed to one number per scale.
    """
    per_element = FAKE_QUANTIZE + IN_RANGE + 1 + 4 + 2
    return flops(per_element * self.numel() + 2 * (self.numel() - scale.numel()))


# -- operators on quantised tensors --------------------------------------------------------


def requantized(real: Tensor, operands: Sequence[Any], cost: OpCost) -> OpCost:
    """Return ``cost`` plus dequantising the quantised operands and quantising the result."""
    inputs = sum(t.numel() for t in tensors_in(operands) if t.is_quantized)
    return flops(DEQUANTIZE * inputs + cost.flops + QUANTIZE * real.numel())


def reals(like: Tensor) -> Tensor:
    """Return a meta tensor of reals with this shape, to call a formula with."""
    return torch.empty(like.shape, dtype=torch.float32, device="meta")


#: Steps of an operator of the library quantized between dequantising and quantising.
POINTWISE: dict[str, tuple[Any, ...]] = {
    "add": (aten.add,),
    "add_relu": (aten.add, aten.relu),
    "add_scalar": (aten.add,),
    "add_scalar_relu": (aten.add, aten.relu),
    "mul": (aten.mul,),
    "mul_relu": (aten.mul, aten.relu),
    "mul_scalar": (aten.mul,),
    "mul_scalar_relu": (aten.mul, aten.relu),
    "sigmoid": (aten.sigmoid,),
    "hardswish": (aten.hardswish,),
    "leaky_relu": (aten.leaky_relu,),
    "elu": (aten.elu,),
    "celu": (aten.elu,),
    "cat": (),
    "cat_relu": (aten.relu,),
    "dropout": (),
}
_BINARY = (aten.add, aten.mul)


def between(steps: Sequence[Any], real: Tensor) -> OpCost:
    """FLOPs of pointwise steps on reals."""
    costs = (same_shaped(op, real, *([1.0] if op in _BINARY else [])) for op in steps)
    return sum(costs, start=OpCost())


def register_pointwise(name: str, steps: tuple[Any, ...]) -> None:
    """Register ``quantized::<name>``, its out= variant, and its equivalents in other libraries."""
    targets = ops(name, f"{name}_out", library="quantized")
    if name == "add":
        targets += ops(name, library="_quantized")
    if name in ("add", "add_relu", "mul"):
        targets += ops(f"q{name}", library="onednn")

    @register_flops(targets, note=f"{name} between dequantising and quantising")
    def formula(*args: Any, out: Tensor, **_: Any) -> OpCost:
        real = reals(out)
        return requantized(real, args, between(steps, real))


for _name, _steps in POINTWISE.items():
    register_pointwise(_name, _steps)

declare_free(
    ops("relu6", "clamp", "threshold", "max_pool1d", "max_pool2d", library="quantized"),
    "integer arithmetic",
)


@register_flops(ops("prelu", library="quantized"))
def prelu(qx: Tensor, weight: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """A comparison and a product between dequantising and quantising."""
    return requantized(reals(out), (qx, weight), flops(2 * out.numel()))


@register_flops(ops("softmax", library="quantized"))
def softmax(qx: Tensor, dim: int, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """softmax between dequantising and quantising."""
    real = reals(out)
    return requantized(real, (qx,), cost_of(aten._softmax, real, dim, False, out=real))


@register_flops(
    ops(
        *"""
        batch_norm batch_norm1d batch_norm2d batch_norm3d batch_norm_relu batch_norm1d_relu
        batch_norm2d_relu batch_norm3d_relu
        """.split(),
        library="quantized",
    )
    + ops("quantized_batch_norm")
    + ops("qbatch_norm2d", library="onednn")
)
def batch_norm(qx: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """x·a + b between dequantising and quantising: 2 per element; a = weight/sqrt(var + eps)
    and b = bias - mean·a: 5 per channel. A relu is part of the clamping."""
    return requantized(reals(out), (qx,), flops(2 * out.numel() + 5 * out.shape[1]))


@register_flops(ops("layer_norm", library="quantized"))
def layer_norm(
    qx: Tensor, shape: Any, weight: Any, bias: Any, eps: float, *_args: Any, out: Tensor, **_: Any
) -> OpCost:
    """layer_norm between dequantising and quantising."""
    real = reals(out)
    norm = aten.native_layer_norm
    result = norm(real, shape, _like(weight), _like(bias), eps)
    cost = cost_of(norm, real, shape, _like(weight), _like(bias), eps, out=result)
    return requantized(real, (qx,), cost)


@register_flops(ops("group_norm", library="quantized"))
def group_norm(
    qx: Tensor, groups: int, weight: Any, bias: Any, eps: float, *_args: Any, out: Tensor, **_: Any
) -> OpCost:
    """group_norm between dequantising and quantising."""
    return _grouped(qx, groups, weight, bias, eps, out)


@register_flops(ops("instance_norm", library="quantized"))
def instance_norm(
    qx: Tensor, weight: Any, bias: Any, eps: float, *_args: Any, out: Tensor, **_: Any
) -> OpCost:
    """group_norm with one channel per group, between dequantising and quantising."""
    return _grouped(qx, qx.shape[1], weight, bias, eps, out)


def _grouped(qx: Tensor, groups: int, weight: Any, bias: Any, eps: float, out: Tensor) -> OpCost:
    real = reals(out)
    batch, channels = real.shape[:2]
    area = real.numel() // (batch * channels)
    args = (real, _like(weight), _like(bias), batch, channels, area, groups, eps)
    norm = aten.native_group_norm
    return requantized(real, (qx,), cost_of(norm, *args, out=norm(*args)))


def _like(tensor: Tensor | None) -> Tensor | None:
    return reals(tensor) if tensor is not None else None
