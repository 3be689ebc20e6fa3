"""The last linear layer and cross entropy in one operator, a chunk of rows at a time.

Letters: N rows, F features, V classes. Source: torch.nn.modules.linear_cross_entropy, whose
loop over chunks is the reference; only the sums over chunks depend on how many there are.
"""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.registry import register_flops
from dispatch_flops.profile.cost import OpCost, contraction

Tensor = torch.Tensor


@register_flops("torch_nn::_linear_cross_entropy_batch_chunked", by_name=True)
def linear_cross_entropy(
    *,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    batch_chunk_size: int,
    compute_input_grad: bool,
    compute_linear_weight_grad: bool,
    compute_linear_bias_grad: bool,
    out: Any,
    **_: Any,
) -> OpCost:
    """Mean or sum of the losses, together with the gradients that its backward scales.

    MACs: N·V·F for the logits, N·V·F for each of the input's and the weight's gradient.
    FLOPs: 2·MACs; log-sum-exp, 4·N·V - 2·N and N·V for a bias; N logarithms and two weighted sums
    over rows, added to the loss, 5·N; the softmax, N·V + N, if any gradient is needed; the gradient
    of the bias, N·V + N, of the input, 3·N·F, and of the weight, 2·N·F, + V·F per chunk.
    """
    n, features, classes = *input.shape, linear_weight.shape[0]
    chunks = -(-n // batch_chunk_size) if batch_chunk_size else 0
    grads = compute_input_grad + compute_linear_weight_grad
    extra = log_sum_exp(n, classes, linear_bias) + 5 * n
    if grads or compute_linear_bias_grad:
        extra += n * classes + n
    extra += (n * classes + n) * compute_linear_bias_grad
    extra += 3 * n * features * compute_input_grad
    extra += (2 * n + chunks * classes) * features * compute_linear_weight_grad
    return contraction(n * classes * features * (1 + grads), extra_flops=extra)


@register_flops("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction", by_name=True)
def linear_cross_entropy_per_row(
    *, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, out: Any, **_: Any
) -> OpCost:
    """Loss of each row; its backward consists of operators that are counted themselves.

    MACs: N·V·F. FLOPs: 2·MACs, log-sum-exp (4·N·V - 2·N, N·V for a bias) and 3·N: logarithm,
    difference, class weight.
    """
    n, features, classes = *input.shape, linear_weight.shape[0]
    extra = log_sum_exp(n, classes, linear_bias) + 3 * n
    return contraction(n * classes * features, extra_flops=extra)


def log_sum_exp(n: int, classes: int, bias: Tensor | None) -> int:
    """FLOPs of bias, maximum, difference, exponential and sum over the classes of n rows."""
    return n * classes * (4 + (bias is not None)) - 2 * n
