"""Interpolation: upsample_*, grid_sampler_* and related operators.

Positions and weights of neighbours cost FLOPs per coordinate, blending the neighbours costs FLOPs
per output element, and reading them is free. The counts are those of torch._decomp's
decompositions. A backward has no decomposition: it adds each gradient to every neighbour, with a
product for the weight of each dimension and one accumulation.

Letters: N batch, C channels, d spatial dimensions; a point is one position in all channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.numbers import depends_on_numbers
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_inexact
from dispatch_flops.profile.cost import OpCost, contraction, flops

Tensor = torch.Tensor

LINEAR_TAPS, CUBIC_TAPS = 2, 4
LERP = 3  # a + (b - a) * weight
CUBIC_BLEND = 7  # 4 products, 3 sums
# t, 1-t, 1+t, 2-t: 3 sums; the inner polynomial twice, 5 each; the outer one twice, 6 each.
CUBIC_WEIGHTS = 25

NEAREST = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
NEAREST_EXACT = (
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
)
LINEAR = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")


def backward_of(names: Sequence[str]) -> list[Any]:
    """Return the backward forms of these operators."""
    return ops(*(f"{name}_backward" for name in names))


# -- upsampling ----------------------------------------------------------------------------


@register_flops(ops(*NEAREST, *NEAREST_EXACT))
def nearest(self: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """A copy of the nearest element, found by (i + offset) * scale: 2 per coordinate."""
    return flops(2 * sum(out.shape[2:]))


@register_flops(backward_of(NEAREST + NEAREST_EXACT))
def nearest_backward(grad: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Each gradient is added to the element that was copied: n terms in m places, n - m.

    A dimension that shrinks copies as many elements as it has results; one that grows, all.
    """
    return flops(grad.numel() - prod(map(min, grad.shape, out.shape)))


@register_flops(ops(*LINEAR))
def linear(
    self: Tensor, output_size: Any, align_corners: bool, *_args: Any, out: Tensor, **_: Any
) -> OpCost:
    """The two neighbours of each dimension, blended dimension by dimension.

    FLOPs: 3 (2^d - 1) per output element. Per coordinate: its source and one bound, the
    distance to the neighbour and two bounds.
    """
    lerps = LINEAR_TAPS ** (out.dim() - 2) - 1
    blend = out.numel() * LERP * lerps if is_inexact(self) else 0
    return flops(blend + sum(out.shape[2:]) * (source_index(align_corners) + 4))


@register_flops(ops("upsample_bicubic2d"))
def cubic(
    self: Tensor, output_size: Any, align_corners: bool, *_args: Any, out: Tensor, **_: Any
) -> OpCost:
    """Four neighbours in x on each of four lines, then the four lines.

    FLOPs: 5 * 7 per output element. Per coordinate: its source, rounded down, the distance
    and two bounds, four weights.
    """
    blend = out.numel() * (CUBIC_TAPS + 1) * CUBIC_BLEND if is_inexact(self) else 0
    coordinate = source_index(align_corners) + 4 + CUBIC_WEIGHTS
    return flops(blend + sum(out.shape[2:]) * coordinate)


@register_flops(backward_of(LINEAR), by_name=True)
def linear_backward(*, grad_output: Tensor, align_corners: bool, out: Tensor, **_: Any) -> OpCost:
    """FLOPs: (d + 1) 2^d per gradient, and two weights per coordinate, 1 - w among them."""
    coordinates = sum(grad_output.shape[2:]) * (source_index(align_corners) + 5)
    return flops(coordinates + spread(grad_output, LINEAR_TAPS))


@register_flops(backward_of(("upsample_bicubic2d",)), by_name=True)
def cubic_backward(*, grad_output: Tensor, align_corners: bool, out: Tensor, **_: Any) -> OpCost:
    """FLOPs: 3 * 4^2 per gradient, and four weights per coordinate."""
    coordinates = sum(grad_output.shape[2:]) * (source_index(align_corners) + 4 + CUBIC_WEIGHTS)
    return flops(coordinates + spread(grad_output, CUBIC_TAPS))


def source_index(align_corners: bool) -> int:
    """FLOPs of one coordinate's source: scale * i, or scale * (i + 1/2) - 1/2."""
    return 1 if align_corners else 3


def spread(grad: Tensor, taps: int) -> int:
    """FLOPs of adding each gradient, times d weights, to taps^d elements."""
    d = grad.dim() - 2
    return grad.numel() * int(taps**d) * (d + 1)


# -- antialiased upsampling ----------------------------------------------------------------

#: Half the width of the filter, in elements of the output.
ANTIALIAS = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}


def antialiased(name: str) -> None:
    """Register ``_upsample_<name>2d_aa`` and its backward."""
    half_width = ANTIALIAS[name]

    @register_flops(ops(f"_upsample_{name}2d_aa"))
    @depends_on_numbers
    def forward(
        self: Tensor,
        output_size: Any,
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
        *,
        out: Tensor,
        **_: Any,
    ) -> OpCost:
        """A filter along the width, then one along the height, as wide as the scale demands.

        FLOPs: 2 t - 1 per result of a filter of t taps. The weights, one per tap and coordinate
        for all channels and lines, are not counted.
        """
        if not is_inexact(self):
            return flops(0)
        planes = prod(self.shape[:2])
        (in_h, in_w), (out_h, out_w) = self.shape[2:], out.shape[2:]
        along_w = 2 * taps(in_w, out_w, align_corners, scales_w, half_width) - out_w
        along_h = 2 * taps(in_h, out_h, align_corners, scales_h, half_width) - out_h
        return flops(planes * (in_h * along_w + out_w * along_h))

    @register_flops(ops(f"_upsample_{name}2d_aa_backward"))
    @depends_on_numbers
    def backward(
        grad: Tensor,
        output_size: Any,
        input_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
        *,
        out: Tensor,
        **_: Any,
    ) -> OpCost:
        """Each gradient, times two weights, is added to all elements under both filters: 3 each."""
        height = taps(input_size[2], grad.shape[2], align_corners, scales_h, half_width)
        width = taps(input_size[3], grad.shape[3], align_corners, scales_w, half_width)
        return flops(3 * prod(grad.shape[:2]) * height * width)


def taps(
    size_in: int, size_out: int, align_corners: bool, scale: float | None, half_width: float
) -> int:
    """Taps of all ``size_out`` filters together, cut off at the borders.

    Source: HelperInterpBase::_compute_indices_min_size_weights_aa (ATen, UpSampleKernel.cpp).
    """
    if align_corners:
        step = (size_in - 1) / (size_out - 1) if size_out > 1 else 0.0
    else:
        step = 1 / scale if scale else size_in / size_out
    support = half_width * max(step, 1.0)
    total = 0
    for index in range(size_out):
        centre = step * (index + 0.5)
        first = max(math.floor(centre - support + 0.5), 0)
        total += min(math.floor(centre + support + 0.5), size_in) - first
    return total


for _name in ANTIALIAS:
    antialiased(_name)


# -- sampling at given points --------------------------------------------------------------

BILINEAR, NEAREST_MODE = 0, 1
# Padding modes: zeros, border (two bounds), reflection (7 to reflect, two bounds).
PADDING = (0, 2, 9)
UNNORMALISE = 2


@register_flops(ops("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback"))
def grid_sampler(
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    *,
    out: Tensor,
    **_: Any,
) -> OpCost:
    """input[N, C, ...] at the points grid[N, ..., d].

    FLOPs per point: its neighbours, their weights, and the tests whether they lie inside. Per point
    and channel: the nearest element times 1 or 0, inside or not (1); 2^d products and their sum
    (linear); 4^2 products with 1 or 0, then 5 * 7 (cubic).
    """
    d = grid.shape[-1]
    points, channels = grid.numel() // d if d else 0, input.shape[1]
    if interpolation_mode == NEAREST_MODE:
        blend = 1
    elif interpolation_mode == BILINEAR:
        blend = 2 * LINEAR_TAPS**d - 1
    else:
        blend = CUBIC_TAPS**2 + (CUBIC_TAPS + 1) * CUBIC_BLEND
    return flops(points * (per_point(d, interpolation_mode, padding_mode) + channels * blend))


@register_flops(
    ops(
        "grid_sampler_2d_backward",
        "grid_sampler_3d_backward",
        "_grid_sampler_2d_cpu_fallback_backward",
    )
)
def grid_sampler_backward(
    grad: Tensor,
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool] = (True, True),
    *,
    out: Any,
    **_: Any,
) -> OpCost:
    """Gradients of the input and of the points.

    FLOPs per point: the weights again. Per point and channel, with T neighbours: for the input, a
    product and an accumulation per neighbour; for the points, per neighbour and dimension, d
    products (gradient, value, the other weights) and an accumulation, then d products. Nearest:
    one accumulation, no gradient of the points.
    """
    d = grid.shape[-1]
    points, channels = grid.numel() // d if d else 0, input.shape[1]
    to_input, to_grid = output_mask
    if interpolation_mode == NEAREST_MODE:
        per_channel, at_end = int(to_input), 0
    else:
        neighbours = (LINEAR_TAPS if interpolation_mode == BILINEAR else CUBIC_TAPS) ** d
        per_channel = neighbours * (2 * to_input + d * (d + 1) * to_grid)
        at_end = d * to_grid
    weights = per_point(d, interpolation_mode, padding_mode)
    return flops(points * (weights + at_end + channels * per_channel))


def per_point(d: int, interpolation_mode: int, padding_mode: int) -> int:
    """FLOPs of a point's neighbours, their weights, and the tests whether they lie inside.

    Each neighbour is compared with two bounds per dimension. Linear: per dimension the
    coordinate rounded down and 1 added; each neighbour's weight is d distances and their
    product. Cubic, in two dimensions only: the coordinates rounded down and the distances; four
    lines, and three other columns and four weights on each; four weights of the lines; the
    coordinates of every neighbour are padded.
    """
    pad = PADDING[padding_mode]
    if interpolation_mode == NEAREST_MODE:
        return d * (UNNORMALISE + pad + 1) + 2 * d
    if interpolation_mode == BILINEAR:
        weight = d + (d - 1)
        return d * (UNNORMALISE + pad + 2) + int(LINEAR_TAPS**d) * (weight + 2 * d)
    lines = CUBIC_TAPS * (1 + 3 + CUBIC_WEIGHTS) + CUBIC_WEIGHTS
    return d * (UNNORMALISE + 2) + lines + CUBIC_TAPS**2 * d * (pad + 2)


@register_flops(ops("cudnn_grid_sampler"))
def cudnn_grid_sampler(input: Tensor, grid: Tensor, *, out: Tensor, **_: Any) -> OpCost:
    """``aten.grid_sampler_2d``, linear, padded with zeros."""
    return grid_sampler(input, grid, BILINEAR, 0, True, out=out)


@register_flops(ops("cudnn_grid_sampler_backward"))
def cudnn_grid_sampler_backward(
    input: Tensor, grid: Tensor, grad: Tensor, *, out: Any, **_: Any
) -> OpCost:
    """``aten.grid_sampler_2d_backward``, linear, padded with zeros."""
    return grid_sampler_backward(grad, input, grid, BILINEAR, 0, True, out=out)


@register_flops(ops("affine_grid_generator", "cudnn_affine_grid_generator"))
def affine_grid(theta: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """grid[N, points, d] = base[points, d + 1] @ theta[N, d, d + 1]^T.

    MACs: N * points * d * (d + 1), with 1 as the last coordinate. FLOPs: 2·MACs. Source: ATen,
    AffineGridGenerator.cpp, whose backward is a visible matrix product.
    """
    return contraction(out.numel() * theta.shape[-1])


@register_flops(ops("cudnn_affine_grid_generator_backward"))
def affine_grid_backward(grad: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """theta's gradient[N, d, d + 1] = grad[N, points, d]^T @ base[points, d + 1].

    MACs: N * points * d * (d + 1). FLOPs: 2·MACs.
    """
    return contraction(grad.numel() * out.shape[-1])
