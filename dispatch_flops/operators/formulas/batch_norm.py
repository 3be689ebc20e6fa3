"""Batch normalisation, on one device and over several, forward and backward.

n: elements of the input. c: channels. Affine parameters cost a product or a sum per element.
Source, unless a docstring names another: torch._decomp.decompositions, without dead code.
"""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.norm import given, normalised
from dispatch_flops.operators.formulas.reduction import variance
from dispatch_flops.operators.registry import register_flops

Tensor = torch.Tensor


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
    return normalised(n, c) + 3 * c * given(mean) + 4 * c * given(var) + affine * n


@register_flops(
    ops(
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "_native_batch_norm_legit_functional",
        "_batch_norm_with_update",
        "_batch_norm_with_update_functional",
    )
    + ops("_native_batch_norm_legit.default", "_native_batch_norm_legit.out"),
    by_name=True,
)
def native_batch_norm(
    *,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    out: Any,
    **_: Any,
) -> int:
    """``batch_norm``; in training unless the argument ``training`` says otherwise.

    FLOPs: in training 6·n + 2·c, 3·c for a running mean, 4·c for a running variance; in evaluation
    2·n + 3·c; n for each of weight and bias.
    """
    return batch_norm(input, given(weight, bias), (running_mean, running_var), training)


@register_flops(ops("_native_batch_norm_legit.no_stats", "_native_batch_norm_legit.no_stats_out"))
def batch_norm_no_stats(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any, out: Any, **__: Any
) -> int:
    """``batch_norm`` with the batch's statistics and no running ones; instance norm calls it.

    FLOPs: 6·n + 2·c; n for each of weight and bias.
    """
    return batch_norm(input, given(weight, bias), (None, None), train=True)


@register_flops(ops("_native_batch_norm_legit_no_training", "_batch_norm_no_update"))
def batch_norm_no_training(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any, out: Any, **__: Any
) -> int:
    """``batch_norm`` in evaluation. FLOPs: 2·n + 3·c; n for each of weight and bias."""
    return batch_norm(input, given(weight, bias), (None, None), train=False)


def batch_norm_grads(
    input: Tensor, train: bool, needs_input: bool, needs_weight: bool, needs_bias: bool
) -> int:
    """Σg n-c; Σg·(x - mean) 3·n - c, both only if needed.

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


@register_flops(ops("native_batch_norm_backward"), by_name=True)
def native_batch_norm_backward(
    *, input: Tensor, train: bool, output_mask: list[bool], out: Any, **_: Any
) -> int:
    """Gradients as ``output_mask`` asks.

    FLOPs: in training n-c (Σg) for the bias or the input, 3·n - c (Σg·(x - mean)) for the weight or
    the input, 5·n + 5·c for the input, c for the weight. In evaluation n-c for the bias, 3·n for
    the weight, n + c for the input, 2·c for either (rsqrt).
    """
    return batch_norm_grads(input, train, *output_mask)


@register_flops(ops("batch_norm_backward"), by_name=True)
def batch_norm_backward(
    *, input: Tensor, update: bool, output_mask: list[bool], out: Any, **_: Any
) -> int:
    """FLOPs: those of ``aten.native_batch_norm_backward``; in training if ``update`` is True."""
    return batch_norm_grads(input, update, *output_mask)


@register_flops(ops("cudnn_batch_norm_backward", "miopen_batch_norm_backward"))
def vendor_batch_norm_backward(input: Tensor, *_: Any, out: Any, **__: Any) -> int:
    """All three gradients in training; both libraries always compute them. FLOPs: 9·n + 4·c."""
    return batch_norm_grads(input, True, True, True, True)


# Batch normalisation over several devices ------------------------------------------------


@register_flops(ops("batch_norm_stats"))
def batch_norm_stats(input: Tensor, eps: float, *, out: Any, **_: Any) -> int:
    """Mean and rsqrt(var + eps) of c channels: 4·n + 2·c."""
    return variance(input.numel()) + 2 * input.shape[1]


@register_flops(ops("batch_norm_elemt"))
def batch_norm_elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any, out: Any, **__: Any
) -> int:
    """(x - mean)·invstd, affine: (2 + affine)·n."""
    return (2 + given(weight, bias)) * input.numel()


@register_flops(ops("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"), by_name=True)
def batch_norm_gather_stats(
    *,
    mean: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    out: Any,
    **_: Any,
) -> int:
    """Statistics of r devices, mean[r, c], merged pair by pair.

    Per device and channel: its sum of squares from invstd 4, 1/(n+k) 2, the new sum
    v + s + (a-b)²·n·k·f 7, the new mean n·f·a + k·f·b 5, the new count 1: 19.
    Per channel: 1/√(v/n + eps) 4; running mean 3, running variance 5.
    Source: batch_norm_reduce_statistics_kernel, aten/src/ATen/native/cuda/Normalization.cuh.
    """
    c = mean.shape[-1]
    kept = 3 * given(running_mean) + 5 * given(running_var)
    return 19 * mean.numel() + (4 + kept) * c


@register_flops(ops("batch_norm_update_stats"))
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
    return variance(n) + (3 * given(running_mean) + 4 * given(running_var)) * c


@register_flops(ops("batch_norm_backward_reduce"), by_name=True)
def batch_norm_backward_reduce(*, input: Tensor, weight_g: bool, out: Any, **_: Any) -> int:
    """Σg n-c, Σg·(x - mean) 3·n - c, the weight's gradient c."""
    n, c = input.numel(), input.shape[1]
    return 4 * n - 2 * c + c * weight_g


@register_flops(ops("batch_norm_backward_elemt"))
def batch_norm_backward_elemt(grad_out: Tensor, input: Tensor, *_: Any, out: Any, **__: Any) -> int:
    """(g - m - (x - mean)·p)·s: 5·n; m, p = mean·invstd², s = weight·invstd: 5·c.

    Source: batch_norm_backward_elemt_kernel, aten/src/ATen/native/cuda/Normalization.cuh.
    """
    return 5 * input.numel() + 5 * input.shape[1]
