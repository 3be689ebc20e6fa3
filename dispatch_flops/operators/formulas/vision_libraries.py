"""Layers of torchvision, once it is loaded."""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.errors import FormulaError
from dispatch_flops.operators.formulas._arithmetic import contract
from dispatch_flops.operators.formulas.sorting import comparisons
from dispatch_flops.operators.numbers import depends_on_numbers
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.profile.cost import OpCost, Share, Split, flops

Tensor = torch.Tensor

# Of two boxes: four corners of the overlap, its sides and their bounds by 0, its area, the union
# (sum and difference), the quotient, the comparison. The area of one box: two sides, their product.
_OVERLAP, _AREA = 4 + 4 + 1 + 2 + 1 + 1, 3


@register_flops("torchvision::nms", by_name=True)
def nms(*, dets: Tensor, scores: Tensor, out: Tensor, **_: Any) -> OpCost:
    """dets[N,4]. Which boxes are compared depends on data: all pairs are an upper bound.

    FLOPs: 13·N·(N-1)/2, 3·N (areas), and the comparisons that order the scores.
    Source: pytorch/vision, torchvision/csrc/ops/cpu/nms_kernel.cpp.
    """
    boxes = dets.shape[0]
    return flops(_OVERLAP * (boxes * (boxes - 1) // 2) + _AREA * boxes + comparisons(boxes))


# Four neighbours times their weights, and their sum.
_BILINEAR = 4 + 3


@register_flops(["torchvision::roi_align", "torchvision::ps_roi_align"], by_name=True)
@depends_on_numbers
def roi_align(*, sampling_ratio: int, out: Any, **_: Any) -> OpCost:
    """Average s·s bilinear samples for each result, s the sampling ratio.

    FLOPs: per result 7·s² for the samples, s²-1 for their sum, 1 for the mean. What is computed
    once for all channels is not counted.
    Source: pytorch/vision, torchvision/csrc/ops/cpu/roi_align_kernel.cpp, ps_roi_align_kernel.cpp.
    """
    results = out[0] if isinstance(out, tuple) else out
    samples = _samples(sampling_ratio)
    return flops(results.numel() * (samples * _BILINEAR + samples - 1 + 1))


def _samples(sampling_ratio: int) -> int:
    if sampling_ratio <= 0:
        raise FormulaError(
            "sampling_ratio is not positive: the number of samples depends on the boxes; pass one"
        )
    return sampling_ratio**2


@register_flops(
    ["torchvision::_roi_align_backward", "torchvision::_ps_roi_align_backward"], by_name=True
)
@depends_on_numbers
def roi_align_backward(*, grad: Tensor, sampling_ratio: int, out: Tensor, **_: Any) -> OpCost:
    """FLOPs: 12·s² per element of the gradient: to each of four neighbours a product, a quotient
    and a sum. Source: pytorch/vision, torchvision/csrc/ops/cpu/roi_align_kernel.cpp.
    """
    return flops(grad.numel() * _samples(sampling_ratio) * 4 * 3)


@register_flops("torchvision::deform_conv2d", by_name=True)
@depends_on_numbers
def deform_conv2d(
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    offset_groups: int,
    use_mask: bool,
    out: Tensor,
    **_: Any,
) -> OpCost:
    """weight[O,I/g,kh,kw] on samples of input[B,I,H,W], moved by offsets.

    MACs: B·O·H'·W'·(I/g)·kh·kw. FLOPs: 2·MACs + per sampled element, B·I·kh·kw·H'·W', 7 and 1 for
    the mask + 1 per result (bias). Positions, the same for all channels, are not counted.
    Source: pytorch/vision, torchvision/csrc/ops/deform_conv2d.cpp.
    """
    samples = out.numel() // out.shape[1] * input.shape[1] * weight.shape[2:].numel()
    extra = samples * (_BILINEAR + use_mask) + out.numel()
    return contract(out.numel() * weight.shape[1:].numel(), input, weight, extra_flops=extra)


# Difference of neighbours, weighted: two differences, two products, a sum.
_SLOPE = 2 + 2 + 1


@register_flops("torchvision::_deform_conv2d_backward", by_name=True)
@depends_on_numbers
def deform_conv2d_backward(
    *,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor,
    use_mask: bool,
    out: Any,
    **_: Any,
) -> Split:
    """Gradients of all five arguments, by those of the samples.

    MACs: 2·B·O·H'·W'·(I/g)·kh·kw. FLOPs: 2·MACs + per sampled element: input, four products and
    four sums, 4 for the mask; offset, twice a slope (5), its product and sum, and 1 for the mask;
    mask, 7 for the sample, its product and sum. Sums over n elements are n-1. The bias sums B·H'·W'
    elements. Recomputed: the samples, as in ``deform_conv2d``.
    Source: pytorch/vision, torchvision/csrc/ops/cpu/deform_conv2d_kernel.cpp.
    """
    channels = grad.shape[1]
    samples = grad.numel() // channels * input.shape[1] * weight.shape[2:].numel()
    extra = samples * (8 + 4 * use_mask)
    extra += samples * 2 * (_SLOPE + use_mask + 1 + 1) - offset.numel()
    extra += (samples * (_BILINEAR + 1 + 1) - mask.numel()) * use_mask
    extra += grad.numel() - channels
    macs = 2 * grad.numel() * weight.shape[1:].numel()
    own = contract(macs, input, weight, extra_flops=extra)
    again = flops(samples * (_BILINEAR + use_mask))
    return Split(own=own, shares=(Share(cost=again, phase="recompute"),))
