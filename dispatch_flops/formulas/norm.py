"""Batch, layer, group and RMS normalisation, forward and backward.

n: elements of the input. c: channels. m: groups of numbers that share a mean (layer: rows,
group: N·G). Affine parameters cost one product or sum per element each.
Source, where a docstring names no other: torch._decomp.decompositions, dead code left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dispatch_flops.formulas._ops import overloads, packets
from dispatch_flops.formulas.reduction import variance, vector_norm
from dispatch_flops.registry import register_flops

Tensor = torch.Tensor


def _given(*tensors: Tensor | None) -> int:
    """How many of the optional tensors are there."""
    return sum(tensor is not None for tensor in tensors)


def _normalised(n: int, m: int) -> int:
    """(x - mean)·rsqrt(var + eps): variance 4·n, eps and rsqrt 2·m, subtract and scale 2·n."""
    return variance(n, m) + 2 * m + 2 * n


# Batch normalisation ---------------------------------------------------------------------


def batch_norm(input: Tensor, affine: int, running: tuple[Tensor | None, ...], train: bool) -> int:
    """x[n] in c channels.

    Training: normalise 6·n + 2·c; running mean (1-ρ)·r + ρ·mean 3·c; running variance the
    same after the unbiased factor 4·c. Evaluation: 1/√(var + eps) 3·c, subtract and scale
    2·n. Affine: n each.
    """
    n, c = input.numel(), input.shape[1]
    if not train:
        return 3 * c + 2 * n + affine * n
    mean, var = running
    return _normalised(n, c) + 3 * c * _given(mean) + 4 * c * _given(var) + affine * n


@register_flops(
    packets(
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "_native_batch_norm_legit_functional",
    )
    + overloads("_native_batch_norm_legit.default", "_native_batch_norm_legit.out")
)
def native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *_: Any,
    out: Any,
    **__: Any,
) -> int:
    """``batch_norm`` as ``training`` says."""
    return batch_norm(input, _given(weight, bias), (running_mean, running_var), training)


@register_flops(
    overloads("_native_batch_norm_legit.no_stats", "_native_batch_norm_legit.no_stats_out")
)
def batch_norm_no_stats(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any, out: Any, **__: Any
) -> int:
    """``batch_norm`` with the batch's own statistics and none kept (instance norm comes here)."""
    return batch_norm(input, _given(weight, bias), (None, None), train=True)


@register_flops(packets("_batch_norm_with_update", "_batch_norm_with_update_functional"))
def batch_norm_with_update(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    *_: Any,
    out: Any,
    **__: Any,
) -> int:
    """``batch_norm`` in training."""
    return batch_norm(input, _given(weight, bias), (running_mean, running_var), train=True)


@register_flops(packets("_native_batch_norm_legit_no_training", "_batch_norm_no_update"))
def batch_norm_no_training(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any, out: Any, **__: Any
) -> int:
    """``batch_norm`` in evaluation."""
    return batch_norm(input, _given(weight, bias), (None, None), train=False)


def batch_norm_grads(
    input: Tensor, train: bool, needs_input: bool, needs_weight: bool, needs_bias: bool
) -> int:
    """Σg n-c; Σg·(x - mean) 3·n - c, both only where something needs them.

    Input, training: mean of g c, projection 3·c, weight·invstd c, and
    (g - (x - mean)·p - m)·s 5·n. Input, evaluation: weight·invstd c, g·s n.
    Evaluation needs rsqrt(var + eps) 2·c first. Weight: c. Bias: nothing more.
    """
    n, c = input.numel(), input.shape[1]
    flops = 0
    if needs_bias or (needs_input and train):
        flops += n - c
    if needs_weight or (needs_input and train):
        flops += 3 * n - c
    if not train and (needs_input or needs_weight):
        flops += 2 * c
    if needs_input:
        flops += 5 * n + 5 * c if train else n + c
    return flops + c * needs_weight


@register_flops(packets("native_batch_norm_backward"))
def native_batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: list[bool],
    *,
    out: Any,
    **_: Any,
) -> int:
    """Gradients as ``output_mask`` asks."""
    return batch_norm_grads(input, train, *output_mask)


@register_flops(packets("batch_norm_backward"))
def batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    update: bool,
    eps: float,
    output_mask: list[bool],
    reserve: Tensor,
    *,
    out: Any,
    **_: Any,
) -> int:
    """Gradients as ``output_mask`` asks; ``update`` says that the forward was training."""
    return batch_norm_grads(input, update, *output_mask)


@register_flops(packets("cudnn_batch_norm_backward", "miopen_batch_norm_backward"))
def vendor_batch_norm_backward(input: Tensor, *_: Any, out: Any, **__: Any) -> int:
    """All three gradients, training: both libraries always compute them."""
    return batch_norm_grads(input, True, True, True, True)


# Batch normalisation over several devices ------------------------------------------------


@register_flops(packets("batch_norm_stats"))
def batch_norm_stats(input: Tensor, eps: float, *, out: Any, **_: Any) -> int:
    """Mean and rsqrt(var + eps) of c channels: 4·n + 2·c."""
    return variance(input.numel(), input.shape[1]) + 2 * input.shape[1]


@register_flops(packets("batch_norm_elemt"))
def batch_norm_elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any, out: Any, **__: Any
) -> int:
    """(x - mean)·invstd, affine: (2 + affine)·n."""
    return (2 + _given(weight, bias)) * input.numel()


@register_flops(packets("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"))
def batch_norm_gather_stats(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *_: Any,
    out: Any,
    **__: Any,
) -> int:
    """Statistics of r devices, mean[r, c], merged pair by pair.

    Per device and channel: its sum of squares from invstd 4, 1/(n+k) 2, the new sum
    v + s + (a-b)²·n·k·f 7, the new mean n·f·a + k·f·b 5, the new count 1: 19.
    Per channel: 1/√(v/n + eps) 4; running mean 3, running variance 5.
    Source: batch_norm_reduce_statistics_kernel, aten/src/ATen/native/cuda/Normalization.cuh.
    """
    c = mean.shape[-1]
    kept = 3 * _given(running_mean) + 5 * _given(running_var)
    return 19 * mean.numel() + (4 + kept) * c


@register_flops(packets("batch_norm_update_stats"))
def batch_norm_update_stats(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *_: Any,
    out: Any,
    **__: Any,
) -> int:
    """Mean and variance 4·n, running mean 3·c, running variance 4·c."""
    n, c = input.numel(), input.shape[1]
    return variance(n, c) + (3 * _given(running_mean) + 4 * _given(running_var)) * c


@register_flops(packets("batch_norm_backward_reduce"))
def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
    *,
    out: Any,
    **_: Any,
) -> int:
    """Σg n-c, Σg·(x - mean) 3·n - c, the weight's gradient c."""
    n, c = input.numel(), input.shape[1]
    return 4 * n - 2 * c + c * weight_g


@register_flops(packets("batch_norm_backward_elemt"))
def batch_norm_backward_elemt(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, *_: Any, out: Any, **__: Any
) -> int:
    """(g - m - (x - mean)·p)·s: 5·n; m, p = mean·invstd², s = weight·invstd: 5·c.

    Source: batch_norm_backward_elemt_kernel, aten/src/ATen/native/cuda/Normalization.cuh.
    """
    return 5 * input.numel() + 5 * input.shape[1]


# Layer, RMS and group normalisation ------------------------------------------------------


@register_flops(packets("native_layer_norm"))
def native_layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    out: Any,
    **_: Any,
) -> int:
    """x[m, D] normalised over D: 6·n + 2·m, affine n each. Source: torch._refs."""
    n = input.numel()
    m = _rows(input, normalized_shape)
    return _normalised(n, m) + _given(weight, bias) * n


@register_flops(packets("native_layer_norm_backward"))
def native_layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
    *,
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
        flops += 8 * n - m + n * _given(weight)
    return flops + (2 * n - size) * needs_weight + (n - size) * needs_bias


@register_flops(packets("_fused_rms_norm"))
def fused_rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    eps: float | None,
    *,
    out: Any,
    **_: Any,
) -> int:
    """x·rsqrt(mean x² + eps): square n, mean n, eps and rsqrt 2·m, scale n; weight n."""
    n = input.numel()
    return 3 * n + 2 * _rows(input, normalized_shape) + n * _given(weight)


@register_flops(packets("_fused_rms_norm_backward"))
def fused_rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: list[bool],
    *,
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
        flops += 6 * n - n // size + n * _given(weight)
    return flops + (2 * n - size) * needs_weight


@register_flops(packets("native_group_norm"))
def native_group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,  # noqa: N803
    C: int,  # noqa: N803
    HxW: int,  # noqa: N803
    group: int,
    eps: float,
    *,
    out: Any,
    **_: Any,
) -> int:
    """x[N, G, C/G·HW] normalised per (N, G), m = N·G: 6·n + 2·m, affine n each.

    Source: torch._refs, as decomposed off the CPU. (On the CPU it folds the affine
    parameters into the scale; the count is kept the same on every device.)
    """
    n = input.numel()
    return _normalised(n, N * group) + _given(weight, bias) * n


@register_flops(packets("native_group_norm_backward"))
def native_group_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,  # noqa: N803
    C: int,  # noqa: N803
    HxW: int,  # noqa: N803
    group: int,
    output_mask: list[bool],
    *,
    out: Any,
    **_: Any,
) -> int:
    """x[N, C, HW], k = N·C, m = N·G. ds = Σg·x 2·n - k (input, weight); db = Σg n-k.

    Input: ds and db summed per group 2·(k-m), weighted 2·k before; rstd·weight k; two
    coefficients 6·m and 5·m; g·c1 + x·c2 + c3 4·n.
    Weight: Σ(ds - db·mean)·rstd 3·k + k-C. Bias: Σdb k-C.
    """
    n, k, m = input.numel(), N * C, N * group
    needs_input, needs_weight, needs_bias = output_mask
    flops = 2 * n - k if needs_input or needs_weight else 0
    flops += n - k if any(output_mask) else 0
    if needs_input:
        flops += 2 * (k - m) + 2 * k * _given(weight) + k + 11 * m + 4 * n
    return flops + (4 * k - C) * needs_weight + (k - C) * needs_bias


def _rows(input: Tensor, normalized_shape: list[int]) -> int:
    size = math.prod(normalized_shape)
    return input.numel() // size if size else 0


# Normalising weights ---------------------------------------------------------------------


@register_flops(packets("renorm"))
def renorm(self: Tensor, p: Any, dim: int, maxnorm: Any, *, out: Any, **_: Any) -> int:
    """Slices along ``dim``, m of them, scaled down to a norm: norm, then m comparisons,
    m sums with eps, m reciprocals times maxnorm 2·m, n products. Source: torch._refs.
    """
    n, m = self.numel(), self.shape[dim]
    complex_numbers = self.is_complex()
    scale = 2 * n if complex_numbers else n
    return vector_norm(n, m, p, complex_numbers=complex_numbers) + 4 * m + scale


@register_flops(packets("_weight_norm_interface"))
def weight_norm(v: Tensor, g: Tensor, dim: int = 0, *, out: Any, **_: Any) -> int:
    """v·g/‖v‖: m norms, m quotients, n products."""
    return vector_norm(v.numel(), g.numel(), 2) + g.numel() + v.numel()


@register_flops(packets("_weight_norm_interface_backward"))
def weight_norm_backward(
    grad_w: Tensor,
    saved_v: Tensor,
    saved_g: Tensor,
    saved_norms: Tensor,
    dim: int,
    *,
    out: Any,
    **_: Any,
) -> int:
    """d = Σgrad·v 2·n - m; grad v = g/‖v‖·(grad - v·d/‖v‖²) 3·m + 3·n; grad g = d/‖v‖ m.

    Source: weight_norm_differentiable_backward, aten/src/ATen/native/WeightNorm.cpp.
    """
    return 5 * saved_v.numel() + 3 * saved_norms.numel()
