"""Fused optimizer steps and gradient scaling.

A fused step costs what the single-tensor algorithm of ``torch.optim`` costs in primitives,
per element of a parameter: ``lerp`` 3, ``add`` with alpha 2, ``addcmul`` and ``addcdiv`` with
a value 3, ``mul``, ``sqrt``, ``div``, ``neg`` and ``maximum`` 1. A complex element counts as
two reals. Scalars of a step, such as bias corrections, are not tensor arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.profile.cost import OpCost

Tensor = torch.Tensor
Tensors = Sequence[Tensor]

LERP, ADD_ALPHA, ADDCMUL, ADDCDIV = 3, 2, 3, 3


@register_flops(ops("_fused_adam"))
@tells_apart(0)
def adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_sqs: Tensors,
    steps: Tensors,
    *,
    weight_decay: float = 0,
    amsgrad: bool = False,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    out: Any,
    decay: int = ADD_ALPHA,
    **_: Any,
) -> OpCost:
    """Adam, per element: 13, + 2 weight decay, + 1 each for amsgrad, maximize, unscaling.

    exp_avg: lerp (3). exp_avg_sq: mul, addcmul (4). Denominator: sqrt, div, add (3).
    Parameter: addcdiv (3). Source: torch.optim.adam._single_tensor_adam.
    """
    per_element = (
        LERP
        + (1 + ADDCMUL)
        + 3
        + ADDCDIV
        + decay * (weight_decay != 0)
        + amsgrad
        + maximize
        + (grad_scale is not None)
    )
    written = [params, exp_avgs, exp_avg_sqs, max_sqs]
    return step(per_element, params, [grads, *written], written, unscaled(grads, grad_scale))


@register_flops(ops("_fused_adamw"))
@tells_apart(0)
def adamw(*args: Any, out: Any, **kwargs: Any) -> OpCost:
    """As ``aten._fused_adam``, but decoupled weight decay is one product."""
    return adam(*args, out=out, decay=1, **kwargs)


@register_flops(ops("_fused_sgd"))
@tells_apart(0)
def sgd(
    params: Tensors,
    grads: Tensors,
    buffers: Tensors,
    *,
    weight_decay: float = 0,
    momentum: float = 0,
    dampening: float = 0,
    nesterov: bool = False,
    maximize: bool = False,
    is_first_step: bool = False,
    grad_scale: Tensor | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """SGD, per element: 2, + 2 weight decay, + 2 momentum (mul, add; 3 with dampening; 0 in the
    first step, which copies), + 2 nesterov, + 1 each for maximize and unscaling.

    Source: torch.optim.sgd._single_tensor_sgd.
    """
    per_element = (
        ADD_ALPHA
        + ADD_ALPHA * (weight_decay != 0)
        + (3 if dampening else 2) * (momentum != 0 and not is_first_step)
        + ADD_ALPHA * (momentum != 0 and nesterov)
        + maximize
        + (grad_scale is not None)
    )
    read = [params, grads] if is_first_step else [params, grads, buffers]
    return step(per_element, params, read, [params, buffers], unscaled(grads, grad_scale))


@register_flops(ops("_fused_adagrad"))
@tells_apart(0)
def adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    steps: Tensors,
    *,
    weight_decay: float = 0,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """Adagrad, per element: 8, + 2 weight decay, + 1 each for maximize and unscaling.

    Sum: addcmul (3). Root: sqrt, add (2). Parameter: addcdiv (3). Source:
    torch.optim.adagrad._single_tensor_adagrad.
    """
    per_element = (
        ADDCMUL
        + 2
        + ADDCDIV
        + ADD_ALPHA * (weight_decay != 0)
        + maximize
        + (grad_scale is not None)
    )
    written = [params, sums]
    return step(per_element, params, [grads, *written], written, unscaled(grads, grad_scale))


@register_flops(ops("_amp_foreach_non_finite_check_and_unscale"))
def unscale(grads: Tensors, found_inf: Tensor, inv_scale: Tensor, *, out: Any, **_: Any) -> OpCost:
    """Each gradient is tested for finiteness and multiplied: 2 per element."""
    return step(2, grads, [grads, [found_inf, inv_scale]], [grads, [found_inf]], [])


@register_flops(ops("_amp_update_scale"))
def update_scale(scale: Tensor, *_args: Any, out: Any, **_: Any) -> OpCost:
    """One product with the growth or backoff factor."""
    return OpCost(flops=scale.numel())


def unscaled(grads: Tensors, grad_scale: Tensor | None) -> Tensors:
    """Return the gradients that a step writes back: all if it unscales them, else none."""
    return grads if grad_scale is not None else ()


def step(
    per_element: int,
    params: Tensors,
    read: Sequence[Tensors],
    written: Sequence[Tensors],
    rewritten: Tensors,
) -> OpCost:
    """Return the cost of a step: FLOPs per real number of ``params``, and the bytes of tensors.

    These operators return nothing, so the bytes written are not those of a result.
    """
    reals = sum(p.numel() * (2 if p.is_complex() else 1) for p in params)
    return OpCost(
        flops=per_element * reals,
        bytes_read=nbytes(*read),
        bytes_written=nbytes(*written, rewritten),
    )
