"""Losses that are operators of their own, forward and backward.

n: elements of the input. Reductions: 0 none, 1 mean, 2 sum. A mean of n losses is n-1 sums
and a division, a sum n-1. Source, unless a docstring names another: torch._decomp.
"""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import dtype_of_operands
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.pointwise import broadcast_elements, recipe_cost
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import register_flops

Tensor = torch.Tensor
MEAN, SUM = 1, 2


def _reduced(n: int, reduction: int) -> int:
    if n == 0 or reduction not in (MEAN, SUM):
        return 0
    return n if reduction == MEAN else n - 1


def _size(self: Tensor, target: Tensor) -> int:
    return broadcast_elements(self.shape, target.shape)


def _register_loss(name: str, per_element: str) -> None:
    """Register a loss of input and target, reduced as its argument says."""

    @register_flops(
        ops(name), note=f"{per_element}; then the sum or the mean", computes_in=dtype_of_operands
    )
    def formula(
        self: Tensor, target: Tensor, reduction: int = MEAN, *_: Any, out: Tensor, **__: Any
    ) -> int:
        n = _size(self, target)
        each = recipe_cost(per_element, complex_numbers=self.is_complex())
        return n * each + _reduced(n, reduction)


_register_loss("mse_loss", "sub pow")
# d = |x - y|; d < β ? d²/2/β : d - β/2
_register_loss("smooth_l1_loss", "sub abs lt pow mul div sub")
# d = |x - y|; d < δ ? d·d/2 : δ·(d - δ/2)
_register_loss("huber_loss", "sub abs lt mul mul sub mul")
# log1p(exp(-x·y))
_register_loss("soft_margin_loss", "neg mul exp log1p")


@register_flops(ops("mse_loss_backward"))
def mse_loss_backward(*_: Any, out: Tensor, **__: Any) -> int:
    """2/n·(x - y)·grad: 3·n."""
    return 3 * out.numel()


@register_flops(ops("smooth_l1_loss_backward"))
def smooth_l1_loss_backward(grad_output: Tensor, *_: Any, out: Tensor, **__: Any) -> int:
    """d = x - y, g = grad/n; |d| < β ? g·d/β : g·sign d: 7·n, and g once per element of grad."""
    return 7 * out.numel() + grad_output.numel()


@register_flops(ops("huber_loss_backward"))
def huber_loss_backward(grad_output: Tensor, *_: Any, out: Tensor, **__: Any) -> int:
    """d = x - y; d < -δ ? -grad/n·δ : d > δ ? grad/n·δ : d/n·grad.

    Subtract, 2 comparisons, 2 products: 5·n; grad/n·δ twice: 4 per element of grad.
    """
    return 5 * out.numel() + 4 * grad_output.numel()


@register_flops(ops("soft_margin_loss_backward"), by_name=True)
def soft_margin_loss_backward(*, reduction: int, out: Tensor, **_: Any) -> int:
    """y·grad·(s(y·x) - 1): 5·n; divided by n for a mean: n."""
    return (6 if reduction == MEAN else 5) * out.numel()


@register_flops(ops("binary_cross_entropy"))
def binary_cross_entropy(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    *,
    out: Tensor,
    **_: Any,
) -> int:
    """(y - 1)·max(log1p(-x), -100) - y·max(log x, -100): 9·n; weight n."""
    n = _size(self, target)
    return n * (9 + (weight is not None)) + _reduced(n, reduction)


@register_flops(ops("binary_cross_entropy_backward"), by_name=True)
def binary_cross_entropy_backward(
    *, weight: Tensor | None = None, reduction: int = MEAN, out: Tensor, **_: Any
) -> int:
    """grad·(x - y)/max(x·(1 - x), ε): 6·n; weight n; divided by n for a mean: n."""
    return out.numel() * (6 + (weight is not None) + (reduction == MEAN))


@register_flops(ops("binary_cross_entropy_with_logits"), computes_in=dtype_of_operands)
def binary_cross_entropy_with_logits(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = MEAN,
    *,
    out: Tensor,
    **_: Any,
) -> int:
    """(1 - y)·x - logsigmoid x: 3·n + 6·n; weight n.

    With a weight p of the positive class: logsigmoid times (p - 1)·y + 1: 3·n, and p-1 once per
    element of p.
    """
    n = _size(self, target)
    positive = 0 if pos_weight is None else 3 * n + pos_weight.numel()
    return n * (9 + (weight is not None)) + positive + _reduced(n, reduction)


@register_flops(ops("nll_loss_forward", "nll_loss2d_forward"))
def nll_loss_forward(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    *_: Any,
    out: Any,
    **__: Any,
) -> int:
    """x[N, C, ...] at t targets: -x[target].

    FLOPs: t negations. Weights: every log-probability is weighted, n. Reduced: t-1 sums; the
    weights of the targets t-1 sums (without weights, an integer count); mean: 1.
    Without a reduction the t losses are the result.
    """
    t = target.numel()
    flops = t + (0 if weight is None else self.numel())
    if reduction not in (MEAN, SUM) and self.dim() > 1:
        return flops
    summed = max(t - 1, 0)
    total_weight = 0 if weight is None else summed
    reduced = summed + (reduction == MEAN) if reduction in (MEAN, SUM) else 0
    return flops + total_weight + reduced


@register_flops(ops("nll_loss_backward", "nll_loss2d_backward"), by_name=True)
def nll_loss_backward(
    *,
    grad_output: Tensor,
    self: Tensor,
    weight: Tensor | None,
    reduction: int,
    out: Tensor,
    **_: Any,
) -> int:
    """-1 at the targets, 0 elsewhere, times the gradient: n.

    Mean: the gradient is divided by the total weight, 1 per element of it. Weights: times
    the gradient, for every class: C for one gradient, n for one gradient per target.
    """
    n = self.numel()
    flops = n + (grad_output.numel() if reduction == MEAN else 0)
    if weight is not None:
        flops += n if grad_output.dim() else weight.numel()
    return flops


@register_flops(ops("multi_margin_loss"), by_name=True)
@tells_apart(2)
def multi_margin_loss(
    *,
    self: Tensor,
    target: Tensor,
    p: Any = 1,
    weight: Tensor | None = None,
    out: Tensor,
    **_: Any,
) -> int:
    """x[N, C]; mean over classes of max(margin - x_t + x, 0)^p, weighted.

    FLOPs: margin - x_t N, add n, maximum n, square n if p is 2, weight n. Reduction: mean
    n-1 sums and 1 division, sum the same, none n-N sums and N divisions: n.
    """
    n = self.numel()
    return max(target.numel(), 1) + n * (3 + int(p == 2) + (weight is not None))


@register_flops(ops("multi_margin_loss_backward"), by_name=True)
@tells_apart(2)
def multi_margin_loss_backward(
    *,
    self: Tensor,
    target: Tensor,
    p: Any,
    weight: Tensor | None = None,
    out: Tensor,
    **_: Any,
) -> int:
    """x[N, C]; where z = margin - x_t + x is positive, g (p is 2: 2·g·z), weighted; the sum of
    a row is taken from the target; times the gradient.

    FLOPs: margin - x_t N, add n, compare n, 2·n if p is 2, weight n, the target's sum n, times
    the gradient n. Source: multi_margin_loss_backward_cpu_kernel.
    """
    return max(target.numel(), 1) + self.numel() * (4 + 2 * int(p == 2) + (weight is not None))


@register_flops(ops("multilabel_margin_loss_forward"))
def multilabel_margin_loss_forward(
    self: Tensor, target: Tensor, reduction: int, *, out: Any, **_: Any
) -> int:
    """x[N, C]: Σ max(1 - x_t + x, 0)/C over each label t and class.

    The number of labels is data: all C are counted, an upper bound, as in the reference.
    FLOPs: 1 - x_t n, then n·C each: add, maximum, divide, sum (less the rows; a mean divides
    once more): 4·n·C + n - 1 for sum, + n for mean, less N for none.
    """
    n, labels = self.numel(), self.shape[-1] if self.dim() else 1
    total = n * labels
    samples = n // labels if labels else 0
    sums = {MEAN: total, SUM: max(total - 1, 0)}.get(reduction, total - samples)
    return n + 3 * total + sums


@register_flops(ops("multilabel_margin_loss_backward"))
def multilabel_margin_loss_backward(
    grad_output: Tensor, self: Tensor, *_: Any, out: Tensor, **__: Any
) -> int:
    """x[N, C]: for each label and class 1 - x_t + x compared, g added to x, subtracted from x_t.

    The number of labels is data: all C are counted, an upper bound.
    FLOPs: 1 - x_t n; add, compare, two sums 4·n·C; times the gradient n.
    Source: aten/src/ATen/native/LossMultiLabelMargin.cpp.
    """
    n, labels = self.numel(), self.shape[-1] if self.dim() else 1
    return 2 * n + 4 * n * labels


# Connectionist temporal classification ---------------------------------------------------


def _states(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any
) -> tuple[int, int]:
    """Cells of the trellis, Σ T_b·(2·L_b + 1), and time steps, Σ T_b, over the batch.

    Lengths in tensors are data: T and the longest possible L are used, an upper bound.
    """
    frames = log_probs.shape[0]
    samples = log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = targets.shape[-1] if targets.dim() else 1
    times = _lengths(input_lengths, frames, samples)
    labels = _lengths(target_lengths, longest, samples)
    cells = sum(t * (2 * label + 1) for t, label in zip(times, labels, strict=True))
    return cells, sum(times)


def _lengths(lengths: Any, bound: int, samples: int) -> list[int]:
    return [bound] * samples if isinstance(lengths, torch.Tensor) else [int(x) for x in lengths]


@register_flops(ops("_ctc_loss", "_cudnn_ctc_loss", "miopen_ctc_loss"))
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *_: Any,
    out: Any,
    **__: Any,
) -> int:
    """α[t, s] = log Σ of three predecessors + log p: per cell of the trellis 2 maxima,
    3 subtractions, 3 exp, 2 sums, log, and 2 sums: 13.

    Source: ctc_loss_cpu_template, aten/src/ATen/native/LossCTC.cpp.
    """
    cells, _times = _states(log_probs, targets, input_lengths, target_lengths)
    return 13 * cells


@register_flops(ops("_ctc_loss_backward"))
def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *_: Any,
    out: Tensor,
    **__: Any,
) -> int:
    """β as α: 13 per cell. α + β is summed into its class as a logarithm: the sum 1, and
    maximum, 2 subtractions, 2 exp, sum, log, sum: 9. In total 22 per cell.
    Then (exp lp - exp(r + nll - lp))·grad per time step and class: 6.

    Source: ctc_loss_backward_cpu_template, aten/src/ATen/native/LossCTC.cpp.
    """
    cells, times = _states(log_probs, targets, input_lengths, target_lengths)
    return 22 * cells + 6 * times * log_probs.shape[-1]
