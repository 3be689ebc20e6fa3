"""Elements that sliding windows touch: convolution, pooling, im2col, col2im.

Window w of a dimension covers the positions w·stride - padding + k·dilation for its taps k. Windows
that are further apart than they are wide leave elements untouched. A product with padding is
computed, so it needs its other factor. Each dimension is counted by itself: windows are products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dispatch_flops.operators.access import Access, Arguments, Declaration, declare_access
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.partial_access import read_in_part
from dispatch_flops.operators.formulas.pooling import spread

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """What windows over a few dimensions touch.

    elements: covered by a window. taps, windows: those that cover an element. pairs: of a window
    and one of its taps that cover an element.
    """

    elements: int
    taps: int
    windows: int
    pairs: int


def touched_by_windows(
    sizes: Sequence[int],
    windows: Sequence[int],
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
) -> Touched:
    """Return what ``windows`` windows touch of ``sizes`` elements, each by dimension."""
    dims = len(sizes)
    parameters = (spread(value, dims) for value in (kernel, stride, padding, dilation))
    found = [_touched(*each) for each in zip(sizes, windows, *parameters, strict=True)]
    return Touched(
        elements=math.prod(each.elements for each in found),
        taps=math.prod(each.taps for each in found),
        windows=math.prod(each.windows for each in found),
        pairs=math.prod(each.pairs for each in found),
    )


def _touched(
    size: int, windows: int, kernel: int, stride: int, padding: int, dilation: int
) -> Touched:
    seeing: list[range] = []  # for each tap, the windows in which it covers an element
    covered: dict[int, list[range]] = {}  # by residue: the elements' quotients by the stride
    for tap in range(kernel):
        quotient, residue = divmod(tap * dilation - padding, stride)
        end = -(-(size - residue) // stride)
        found = range(max(-quotient, 0), min(end - quotient, windows))
        if found:
            seeing.append(found)
            shown = range(found.start + quotient, found.stop + quotient)
            covered.setdefault(residue, []).append(shown)
    return Touched(
        elements=sum(map(_union, covered.values())),
        taps=len(seeing),
        windows=_union(seeing),
        pairs=sum(map(len, seeing)),
    )


def _union(ranges: list[range]) -> int:
    """Return how many numbers are in one range or more."""
    total, end = 0, 0  # no range begins below 0
    for each in sorted(ranges, key=lambda each: each.start):
        total += max(each.stop - max(each.start, end), 0)
        end = max(end, each.stop)
    return total


# -- pooling and unfolding ------------------------------------------------------------------


def _pooling(dims: int) -> Declaration:
    def pooling(arguments: Arguments, out: Any) -> Access:
        """The elements that the windows cover."""
        source: Tensor = arguments["self"]
        result: Tensor = out[0] if isinstance(out, (tuple, list)) else out
        kernel = arguments["kernel_size"]
        touched = touched_by_windows(
            source.shape[-dims:],
            result.shape[-dims:],
            kernel,
            arguments["stride"] or kernel,
            arguments["padding"],
            arguments.get("dilation", 1),
        )
        return read_in_part(arguments, {"self": math.prod(source.shape[:-dims]) * touched.elements})

    return pooling


for _dims in (1, 2, 3):
    declare_access(
        ops(
            f"avg_pool{_dims}d",
            f"max_pool{_dims}d",
            f"max_pool{_dims}d_with_indices",
            f"mkldnn_max_pool{_dims}d",
            f"quantized_max_pool{_dims}d",
        )
    )(_pooling(_dims))


@declare_access(ops("im2col"))
def im2col(arguments: Arguments, out: Tensor) -> Access:
    """The elements that the windows cover."""
    source: Tensor = arguments["self"]
    touched = _columns(arguments, source.shape[-2:])
    return read_in_part(arguments, {"self": math.prod(source.shape[:-2]) * touched.elements})


@declare_access(ops("col2im"))
def col2im(arguments: Arguments, out: Tensor) -> Access:
    """The elements of columns that do not fall on padding."""
    touched = _columns(arguments, out.shape[-2:])
    return read_in_part(arguments, {"self": math.prod(out.shape[:-2]) * touched.pairs})


def _columns(arguments: Arguments, sizes: Sequence[int]) -> Touched:
    names = ("kernel_size", "stride", "padding", "dilation")
    kernel, stride, padding, dilation = (spread(arguments[name], 2) for name in names)
    windows = [
        (size + 2 * pad - apart * (taps - 1) - 1) // step + 1
        for size, taps, step, pad, apart in zip(
            sizes, kernel, stride, padding, dilation, strict=True
        )
    ]
    return touched_by_windows(sizes, windows, kernel, stride, padding, dilation)


# -- convolution ----------------------------------------------------------------------------


@declare_access(
    ops("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution")
    + ops("_slow_conv2d_forward", "slow_conv3d_forward", "slow_conv_dilated2d")
    + ops("slow_conv_dilated3d", "_conv_depthwise2d", "conv_depthwise3d", "cudnn_convolution")
    + ops("cudnn_convolution_relu", "miopen_convolution", "miopen_depthwise_convolution")
)
def convolution(arguments: Arguments, out: Tensor) -> Access:
    """The elements under a tap. What a transposed convolution crops, it does not compute."""
    source = _source_of(arguments)
    touched, outer = _touched_by_taps(arguments, arguments[source], out)
    if arguments.get("transposed"):
        parts = {source: outer * touched.windows, "weight": _taps(arguments, touched)}
    else:
        parts = {source: outer * touched.elements}
    return read_in_part(arguments, parts)


@declare_access(
    ops("convolution_backward", "convolution_backward_overrideable", "_slow_conv2d_backward")
)
def convolution_backward(arguments: Arguments, out: Any) -> Access:
    """The weight for the input's gradient, the input for the weight's, neither for the bias's.

    The weight's gradient has products with padding in it, the input's has none.
    """
    source, grad = _source_of(arguments), arguments["grad_output"]
    mask = arguments.get("output_mask") or (True, True, True)
    to_input, to_weight, to_bias = mask
    touched, outer = _touched_by_taps(arguments, arguments[source], grad)
    of_grad, of_source, taps = grad.numel(), arguments[source].numel(), arguments["weight"].numel()
    channels = math.prod(grad.shape[: grad.dim() - _spatial_dims(arguments)])
    if arguments.get("transposed"):
        of_grad = of_grad if to_bias else channels * touched.elements
    else:
        of_source, taps = outer * touched.elements, _taps(arguments, touched)
        of_grad = of_grad if to_bias or to_weight else channels * touched.windows
    parts = {"grad_output": of_grad, source: of_source * to_weight, "weight": taps * to_input}
    unneeded = tuple(g for g, is_needed in zip(out, mask, strict=False) if not is_needed)
    return replace(read_in_part(arguments, parts), unneeded=unneeded)


def _source_of(arguments: Arguments) -> str:
    return "input" if "input" in arguments else "self"


def _spatial_dims(arguments: Arguments) -> int:
    return int(arguments["weight"].dim()) - 2


def _taps(arguments: Arguments, touched: Touched) -> int:
    """Return the elements of the weight whose taps cover an element."""
    outer: int = math.prod(arguments["weight"].shape[:2])
    return outer * touched.taps


def _touched_by_taps(arguments: Arguments, source: Tensor, result: Tensor) -> tuple[Touched, int]:
    """Return what the windows touch in one channel, and the number of channels of all samples.

    The elements are the input's and the windows the result's; with ``transposed`` it is the other
    way round. The channels are the input's.
    """
    dims = _spatial_dims(arguments)
    covered, windows = (result, source) if arguments.get("transposed") else (source, result)
    touched = touched_by_windows(
        covered.shape[-dims:],
        windows.shape[-dims:],
        arguments["weight"].shape[2:],
        arguments["stride"],
        arguments["padding"],
        arguments.get("dilation", 1),
    )
    return touched, math.prod(source.shape[: source.dim() - dims])
