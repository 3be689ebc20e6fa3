"""Layer, RMS and group normalisation, forward and backward; weight normalisation, renorm.

n: elements of the input. m: groups of numbers that share a mean (layer: rows, group: N·G).
Affine parameters cost a product or a sum per element. Batch normalisation: batch_norm.py.
Source, unless a docstring names another: torch._decomp.decompositions, without dead code.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.reduction import variance, vector_norm
from dispatch_flops.operators.numbers import depends_on_numbers
from dispatch_flops.operators.registry import register_flops

Tensor = torch.Tensor


def given(*tensors: Tensor | None) -> int:
    """Return how many of the optional tensors are given."""
    return sum(tensor is not None for tensor in tensors)


def normalised(n: int, m: int) -> int:
    """(x - mean)·rsqrt(var + eps): variance 4·n, eps and rsqrt 2·m, subtract and scale 2·n."""
    return variance(n) + 2 * m + 2 * n


@register_flops(ops("native_layer_norm"))
def native_layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    *_: Any,
    out: Any,
    **__: Any,
) -> int:
    """x[m, D] normalised over D: 6·n + 2·m, affine n each. Source: torch._refs."""
    n = input.numel()
    m = _rows(input, normalized_shape)
    return normalised(n, m) + given(weight, bias) * n


@register_flops(ops("native_layer_norm_backward"), by_name=True)
def native_layer_norm_backward(
    *,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
    out: Any,
    **_: Any,
) -> int:
    """x̂ = (x - mean)·rstd 2·n, for the input's and the weight's gradient.

    Input: h = g·w n (affine); rstd/D·(h·D - Σh - x̂·Σ(h·x̂)): n, n-m, n, n-m, n, 2·n, m, n:
    8·n - m. Weight: Σg·x̂ 2·n - D. Bias: Σg n-D.
    """
    n, size = input.numel(), math.prod(normalized_shape)
    if n == 0:
        return 0
    m = n // size
    needs_input, needs_weight, needs_bias = output_mask
    needs_weight &= weight is not None
    needs_bias &= bias is not None
    flops = 2 * n if needs_input or needs_weight else 0
    if needs_input:
        flops += 8 * n - m + n * given(weight)
    return flops + (2 * n - size) * needs_weight + (n - size) * needs_bias


@register_flops(ops("_fused_rms_norm"))
def fused_rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    *_: Any,
    out: Any,
    **__: Any,
) -> int:
    """x·rsqrt(mean x² + eps): square n, mean n, eps and rsqrt 2·m, scale n; weight n."""
    n = input.numel()
    return 3 * n + 2 * _rows(input, normalized_shape) + n * given(weight)


@register_flops(ops("_fused_rms_norm_backward"), by_name=True)
def fused_rms_norm_backward(
    *,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    output_mask: list[bool],
    out: Any,
    **_: Any,
) -> int:
    """x̂ = x·rstd n, for either gradient.

    Input: h = g·w n (weighted); (h - x̂/D·Σ(x̂·h))·rstd: n, n-m, n, n, n, n: 6·n - m.
    Weight: Σg·x̂ 2·n - D.
    """
    n, size = input.numel(), math.prod(normalized_shape)
    if n == 0:
        return 0
    needs_input, needs_weight = output_mask[0], output_mask[1] and weight is not None
    flops = n if needs_input or needs_weight else 0
    if needs_input:
        flops += 6 * n - n // size + n * given(weight)
    return flops + (2 * n - size) * needs_weight


@register_flops(ops("native_group_norm"), by_name=True)
def native_group_norm(
    *,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    group: int,
    out: Any,
    **_: Any,
) -> int:
    """x[N, G, C/G·HW] normalised per (N, G), m = N·G: 6·n + 2·m, affine n each.

    Source: torch._refs, as decomposed off the CPU. (On the CPU it folds the affine
    parameters into the scale; the count is the same on every device.)
    """
    n = input.numel()
    return normalised(n, N * group) + given(weight, bias) * n


@register_flops(ops("native_group_norm_backward"), by_name=True)
def native_group_norm_backward(
    *,
    input: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    group: int,
    output_mask: list[bool],
    out: Any,
    **_: Any,
) -> int:
    """x[N, C, HW], k = N·C, m = N·G. ds = Σg·x 2·n - k (input, weight); db = Σg n-k.

    Input: ds and db summed per group 2·(k-m), weighted 2·k before; rstd·weight k; two
    coefficients 6·m and 5·m; g·c1 + x·c2 + c3 4·n.
    Weight: Σ(ds - db·mean)·rstd 3·k + k-C. Bias: Σdb k-C.
    """
    n, k, m = input.numel(), N * C, N * group
    # An empty tensor has nothing to sum.
    folded, summed = max(n - k, 0), max(k - C, 0)
    needs_input, needs_weight, needs_bias = output_mask
    flops = n + folded if needs_input or needs_weight else 0
    flops += folded if any(output_mask) else 0
    if needs_input:
        flops += 2 * (k - m) + 2 * k * given(weight) + k + 11 * m + 4 * n
    return flops + (3 * k + summed) * needs_weight + summed * needs_bias


def _rows(input: Tensor, normalized_shape: list[int]) -> int:
    size = math.prod(normalized_shape)
    return input.numel() // size if size else 0


@register_flops(ops("renorm"))
@depends_on_numbers
def renorm(self: Tensor, p: Any, dim: int, maxnorm: Any, *, out: Any, **_: Any) -> int:
    """m slices along ``dim``, scaled down to a maximal norm: their norm, then m comparisons,
    m sums with eps, m quotients of maxnorm, n products. Source: torch._refs.
    """
    n, m = self.numel(), self.shape[dim]
    complex_numbers = self.is_complex()
    scale = 2 * n if complex_numbers else n
    return vector_norm(n, m, p, complex_numbers=complex_numbers) + 3 * m + scale


@register_flops(ops("_weight_norm_interface"))
def weight_norm(v: Tensor, g: Tensor, dim: int = 0, *, out: Any, **_: Any) -> int:
    """v·g/‖v‖: m norms, m quotients, n products."""
    return vector_norm(v.numel(), g.numel(), 2) + g.numel() + v.numel()


@register_flops(ops("_weight_norm_interface_backward"), by_name=True)
def weight_norm_backward(*, saved_v: Tensor, saved_norms: Tensor, out: Any, **_: Any) -> int:
    """d = Σgrad·v 2·n - m; grad v = g/‖v‖·(grad - v·d/‖v‖²) 3·m + 3·n; grad g = d/‖v‖ m.

    Source: weight_norm_differentiable_backward, aten/src/ATen/native/WeightNorm.cpp.
    """
    return 5 * saved_v.numel() + 3 * saved_norms.numel()
