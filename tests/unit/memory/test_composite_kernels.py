"""Kernels that run other operators below the dispatcher, and keep what these return."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch.nn import functional

from dispatch_flops import FlopCounterMode
from tests.helpers.allocator import allocations
from tests.unit.memory.test_casting_kernels import (
    COLUMNS,
    CPU,
    ELEMENTS,
    META,
    NUMBERS,
    ROWS,
    peak_of,
)


@pytest.mark.parametrize("device", [CPU, META], ids=str)
def test_operators_that_run_others_keep_their_results(device: torch.device) -> None:
    x = torch.ones(ROWS, COLUMNS, 2, device=device)
    size = ELEMENTS * 2 * 4
    assert peak_of(lambda: x.roll((1, 2, 3), (0, 1, 2)), x) == size + 2 * size
    assert peak_of(lambda: x.roll(1, 0), x) == size
    safe_softmax = torch.ops.aten._safe_softmax.default
    masks = ELEMENTS * 2 + ROWS * 2 + 4
    assert peak_of(lambda: safe_softmax(x, 1), x) == size + masks
    doubles = peak_of(lambda: safe_softmax(x, 1, torch.float64), x)
    assert doubles == ELEMENTS * 2 * 8 + ELEMENTS * 2 * 8
    transforms = torch.ones(3, 2, 3, device=device)
    grid = peak_of(lambda: functional.affine_grid(transforms, [3, 1, 41, 43], False), transforms)
    assert grid == 3 * 41 * 43 * (2 + 3) * 4


@pytest.mark.parametrize("function", [torch.abs, torch.angle])
def test_real_results_of_complex_numbers_are_complex_first(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.ones(ROWS, COLUMNS, dtype=torch.complex64)
    truth = max(accumulate(allocations(lambda: function(x)), initial=0))
    assert peak_of(lambda: function(x), x) == truth == ELEMENTS * (8 + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_isinf_keeps_absolute_values(dtype: torch.dtype) -> None:
    x = torch.ones(ROWS, COLUMNS).to(dtype)
    truth = max(accumulate(allocations(lambda: torch.isinf(x)), initial=0))
    assert abs(peak_of(lambda: torch.isinf(x), x) - truth) <= NUMBERS


@pytest.mark.parametrize("device", [CPU, META], ids=str)
def test_composite_operator_that_is_followed_by_its_parts_is_not_unseen(
    device: torch.device,
) -> None:
    """Inference mode hands it to the counter whole."""
    with torch.inference_mode():
        x = torch.ones(ROWS, COLUMNS, device=device)
        with FlopCounterMode(display=False, memory=True) as counter:
            x.repeat_interleave(3, 0)
    memory = counter.profile.memory
    assert memory is not None
    assert memory.unseen == ()
    assert memory.peak_bytes == ELEMENTS * 4 * (1 + 3)
