"""Pooling, forward and backward.

O is the number of outputs and V the number of input elements that the windows cover, summed over
windows and channels. Windows are products of intervals, so V is a product over the dimensions.
Only the part of an interval inside the input counts, so padding and ``ceil_mode`` are exact. (The
reference pads with -inf and compares those too.)

Average: V-O sums and O divisions: V. Maximum: V-O comparisons. Backward of an average: O
divisions and V sums. Backward of a maximum: one sum per output, O, as a scatter.
Source: aten/src/ATen/native/cpu/AvgPoolKernel.cpp, MaxPoolKernel.cpp; torch._decomp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_inexact, tensors_in

Tensor = torch.Tensor
Formula = Callable[..., int]


def window_elements(
    shape: torch.Size,
    outputs: torch.Size,
    dims: int,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
) -> int:
    """Return V of sliding windows over the last ``dims`` dimensions.

    stride: empty for the kernel's size.
    """
    kernel = spread(kernel_size, dims)
    step = spread(stride, dims) if stride not in ((), []) else kernel
    parameters = zip(
        shape[-dims:],
        outputs[-dims:],
        kernel,
        step,
        spread(padding, dims),
        spread(dilation, dims),
        strict=True,
    )
    return math.prod(shape[:-dims]) * math.prod(_seen(*each) for each in parameters)


def spread(value: Any, dims: int) -> list[int]:
    """Return a number for each dimension."""
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * dims if len(sizes) == 1 else sizes


def _seen(size: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Elements of [0, size) that the windows of one dimension cover, summed over them."""
    starts = (index * stride - padding for index in range(outputs))
    return sum(len(_inside(size, start, kernel, dilation)) for start in starts)


def _inside(size: int, start: int, kernel: int, dilation: int) -> range:
    """Taps k of a window with 0 <= start + k·dilation < size."""
    first = max(-(start // dilation), 0)
    end = min(-((start - size) // dilation), kernel)
    return range(first, end)


def adaptive_elements(shape: torch.Size, outputs: torch.Size, dims: int) -> int:
    """Return V of adaptive windows: output o of count covers [⌊o·I/count⌋, ⌈(o+1)·I/count⌉)."""
    return math.prod(shape[:-dims]) * math.prod(
        sum(-(-(o + 1) * size // count) - o * size // count for o in range(count))
        for size, count in zip(shape[-dims:], outputs[-dims:], strict=True)
    )


# Average ---------------------------------------------------------------------------------


def _average(dims: int) -> Formula:
    def avg_pool(
        self: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        *_: Any,
        out: Tensor,
        **__: Any,
    ) -> int:
        """V, the elements that the windows cover, summed over the windows."""
        seen = window_elements(self.shape, out.shape, dims, kernel_size, stride, padding)
        return seen * is_inexact(self)

    return avg_pool


def _average_backward(dims: int) -> Formula:
    def avg_pool_backward(
        grad_output: Tensor,
        self: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        *_: Any,
        out: Tensor,
        **__: Any,
    ) -> int:
        """O + V: the outputs, and the elements that their windows cover."""
        seen = window_elements(self.shape, grad_output.shape, dims, kernel_size, stride, padding)
        return grad_output.numel() + seen

    return avg_pool_backward


def _adaptive_average(dims: int) -> Formula:
    def adaptive_avg_pool(self: Tensor, *_: Any, out: Tensor, **__: Any) -> int:
        """V, the elements that the windows cover, summed over the windows."""
        return adaptive_elements(self.shape, out.shape, dims) * is_inexact(self)

    return adaptive_avg_pool


def _adaptive_average_backward(dims: int) -> Formula:
    def adaptive_avg_pool_backward(
        grad_output: Tensor, self: Tensor, *, out: Tensor, **_: Any
    ) -> int:
        """O + V: the outputs, and the elements that their windows cover."""
        return grad_output.numel() + adaptive_elements(self.shape, grad_output.shape, dims)

    return adaptive_avg_pool_backward


# Maximum ---------------------------------------------------------------------------------


def _maximum(dims: int) -> Formula:
    def max_pool(
        self: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        *_: Any,
        out: Any,
        **__: Any,
    ) -> int:
        """V - O: the elements that the windows cover, less one per output; 0 for integers."""
        if not is_inexact(self):
            return 0
        result = next(tensors_in(out))
        seen = window_elements(
            self.shape, result.shape, dims, kernel_size, stride, padding, dilation
        )
        return seen - result.numel()

    return max_pool


def _adaptive_maximum(dims: int) -> Formula:
    def adaptive_max_pool(self: Tensor, *_: Any, out: Any, **__: Any) -> int:
        """V - O: the elements that the windows cover, less one per output."""
        result = next(tensors_in(out))
        return adaptive_elements(self.shape, result.shape, dims) - result.numel()

    return adaptive_max_pool


for _dims in (1, 2, 3):
    register_flops(ops(f"avg_pool{_dims}d"))(_average(_dims))
    register_flops(ops(f"avg_pool{_dims}d_backward"))(_average_backward(_dims))
    register_flops(
        ops(
            f"adaptive_avg_pool{_dims}d",
            f"_adaptive_avg_pool{_dims}d",
            f"mkldnn_adaptive_avg_pool{_dims}d",
        )
    )(_adaptive_average(_dims))
    register_flops(
        ops(
            f"adaptive_avg_pool{_dims}d_backward",
            f"_adaptive_avg_pool{_dims}d_backward",
            f"mkldnn_adaptive_avg_pool{_dims}d_backward",
        )
    )(_adaptive_average_backward(_dims))
    register_flops(
        ops(
            f"max_pool{_dims}d",
            f"max_pool{_dims}d_with_indices",
            f"mkldnn_max_pool{_dims}d",
            f"quantized_max_pool{_dims}d",
        )
    )(_maximum(_dims))
    register_flops(ops(f"adaptive_max_pool{_dims}d"))(_adaptive_maximum(_dims))


@register_flops(
    ops(
        "max_pool2d_backward",
        "max_pool2d_with_indices_backward",
        "max_pool3d_with_indices_backward",
        "mkldnn_max_pool2d_backward",
        "mkldnn_max_pool3d_backward",
        "adaptive_max_pool2d_backward",
        "adaptive_max_pool3d_backward",
        "fractional_max_pool2d_backward",
        "fractional_max_pool3d_backward",
    )
)
def max_pool_backward(grad_output: Tensor, *_: Any, out: Tensor, **__: Any) -> int:
    """Each output's gradient is added where its maximum was: O."""
    return grad_output.numel()


@register_flops(ops("fractional_max_pool2d", "fractional_max_pool3d"))
def fractional_max_pool(self: Tensor, kernel_size: Any, *_: Any, out: Any, **__: Any) -> int:
    """Windows lie fully inside the input: O·(∏kernel - 1). Their positions are not counted."""
    window = math.prod(spread(kernel_size, self.dim() - 2))
    return next(tensors_in(out)).numel() * (window - 1)
