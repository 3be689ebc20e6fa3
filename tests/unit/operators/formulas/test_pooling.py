"""Pooling formulas, against windows counted one element at a time."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.profiling import forward_and_backward_flops as costs
from tests.helpers.profiling import profile_of


def seen(x: torch.Tensor, y: torch.Tensor, **window: Any) -> int:
    """Count the elements inside all windows by testing each tap of each output."""
    dims = len(window["kernel"])
    total = 0
    for output in itertools.product(*(range(size) for size in y.shape[-dims:])):
        for tap in itertools.product(*(range(size) for size in window["kernel"])):
            at = [
                o * s - p + t * d
                for o, s, p, t, d in zip(
                    output,
                    window["stride"],
                    window["padding"],
                    tap,
                    window["dilation"],
                    strict=True,
                )
            ]
            total += all(0 <= a < size for a, size in zip(at, x.shape[-dims:], strict=True))
    return total * math.prod(x.shape[:-dims])


WINDOWS = [
    # kernel, stride, padding, dilation, ceil_mode
    ((3,), (2,), (0,), (1,), False),
    ((3,), (2,), (1,), (2,), True),
    ((3, 2), (2, 3), (1, 0), (1, 1), False),
    ((3, 2), (2, 3), (1, 1), (2, 1), True),
    ((5, 4), (3, 3), (2, 2), (1, 3), True),
    ((2, 3, 2), (2, 2, 1), (1, 1, 0), (1, 2, 3), True),
]
SIZES = (11, 13, 7)


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "ceil"), WINDOWS)
def test_max_pool_matches_counted_windows(
    kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> None:
    dims = len(kernel)
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
    x = torch.rand(2, 3, *SIZES[:dims])
    y = pool(x, kernel, stride, padding, dilation, ceil)
    window = seen(x, y, kernel=kernel, stride=stride, padding=padding, dilation=dilation)
    forward, backward = costs(lambda x: pool(x, kernel, stride, padding, dilation, ceil), x)
    assert forward == window - y.numel()
    assert backward == y.numel()


@pytest.mark.parametrize("dims", [2, 3])
def test_max_pool_of_inductor_matches_that_of_torch(dims: int) -> None:
    from torch._inductor import inductor_prims

    pool = (F.max_pool2d, F.max_pool3d)[dims - 2]
    x, window = (
        torch.ones(2, 3, *(7, 6, 5)[:dims]),
        [[3] * dims, [2] * dims, [1] * dims, [1] * dims],
    )
    inductor = inductor_prims._low_memory_max_pool_with_offsets
    profile = profile_of(inductor, x, *window, False, strict=True)
    assert profile.total("forward").flops == profile_of(pool, x, *window).total("forward").flops > 0


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "ceil"),
    [(k, s, p, c) for k, s, p, d, c in WINDOWS if set(d) == {1}],
)
def test_avg_pool_matches_counted_windows(
    kernel: Any, stride: Any, padding: Any, ceil: bool
) -> None:
    dims = len(kernel)
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
    x = torch.rand(2, 3, *SIZES[:dims])
    y = pool(x, kernel, stride, padding, ceil)
    window = seen(x, y, kernel=kernel, stride=stride, padding=padding, dilation=(1,) * dims)
    assert costs(lambda x: pool(x, kernel, stride, padding, ceil), x) == (
        window,
        y.numel() + window,
    )


def test_pooling_with_whole_windows_matches_closed_form() -> None:
    """x[2,3,12,15], kernel 3 x 5, stride the same: 4 x 3 windows of 15."""
    outputs = 2 * 3 * 4 * 3
    x = torch.rand(2, 3, 12, 15)
    assert costs(lambda x: F.max_pool2d(x, (3, 5)), x) == (outputs * 14, outputs)
    assert costs(lambda x: F.avg_pool2d(x, (3, 5)), x) == (outputs * 15, outputs + outputs * 15)


@pytest.mark.parametrize("output", [(5, 3), (7, 9), (4, 4), (1, 2)])
def test_adaptive_pool_matches_counted_windows(output: tuple[int, int]) -> None:
    """Window o of O over I starts at ⌊oI/O⌋ and ends at ⌈(o+1)I/O⌉."""
    x = torch.rand(2, 3, 7, 9)
    count = math.prod(output) * 6
    lengths = [
        [math.ceil((o + 1) * size / out) - math.floor(o * size / out) for o in range(out)]
        for size, out in zip((7, 9), output, strict=True)
    ]
    window = 6 * sum(h * w for h in lengths[0] for w in lengths[1])
    assert costs(lambda x: F.adaptive_avg_pool2d(x, output), x) == (window, count + window)
    assert costs(lambda x: F.adaptive_max_pool2d(x, output), x) == (window - count, count)


def test_global_average_pool_is_a_mean() -> None:
    """A mean of 63 numbers in 6 channels; its backward divides the gradient, broadcast."""
    assert costs(lambda x: F.adaptive_avg_pool2d(x, 1), torch.rand(2, 3, 7, 9))[0] == 6 * 63


def test_pooling_without_a_batch_costs_the_same() -> None:
    assert costs(lambda x: F.max_pool2d(x, 2), torch.rand(3, 6, 8))[0] == 3 * 3 * 4 * 3


def test_fractional_pool_counts_whole_windows() -> None:
    x = torch.rand(2, 3, 9, 11)
    forward, backward = costs(lambda x: F.fractional_max_pool2d(x, (2, 3), (4, 5)), x)
    assert (forward, backward) == (6 * 4 * 5 * (2 * 3 - 1), 6 * 4 * 5)


def test_unpooling_is_free() -> None:
    y, where = F.max_pool2d(torch.rand(2, 3, 8, 6), 2, return_indices=True)
    assert profile_of(lambda: F.max_unpool2d(y, where, 2), strict=True).total().flops == 0
