"""Reductions that cast their operand, against the events of torch's allocator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, product

import pytest
import torch

from dispatch_flops import FlopCounterMode
from tests.helpers.allocator import allocations

ROWS, COLUMNS = 67, 31
ELEMENTS = ROWS * COLUMNS
NUMBERS = 16  # bytes of the numbers that a kernel makes tensors of
CPU, META = torch.device("cpu"), torch.device("meta")

REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": lambda x, **options: x.sum(**options),
    "sum of rows": lambda x, **options: x.sum(1, **options),
    "sum of columns": lambda x, **options: x.sum(0, keepdim=True, **options),
    "product": lambda x, **options: x.prod(0, **options),
    "cumulative sum": lambda x, **options: x.cumsum(1, **options),
    "cumulative product": lambda x, **options: x.cumprod(0, **options),
    "sum without nan": lambda x, **options: x.nansum(**options),
    "mean": lambda x, **options: x.mean(**options),
    "mean of rows": lambda x, **options: x.mean(-1, **options),
    "mean over both": lambda x, **options: x.mean((0, 1), **options),
    "norm": lambda x, **options: torch.linalg.vector_norm(x, dim=0, **options),
}
WITHOUT_DTYPE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda x: x.all(),
    "any of a row": lambda x: x.any(1),
    "count of a row": lambda x: x.count_nonzero(0),
    "count": lambda x: x.count_nonzero(),
    "count over no dimension": lambda x: x.count_nonzero([]),
}
DTYPES = [
    torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.complex64,
]  # fmt: skip
LAYOUTS: dict[str, Callable[[torch.dtype, torch.device], torch.Tensor]] = {
    "contiguous": lambda dtype, device: torch.ones(ROWS, COLUMNS, device=device).to(dtype),
    "transposed": lambda dtype, device: torch.ones(ROWS, COLUMNS, device=device).to(dtype).t(),
    "expanded": lambda dtype, device: torch.ones(COLUMNS, device=device).to(dtype).expand(ROWS, -1),
}


def peak_of(run: Callable[[], object], *held: torch.Tensor) -> int:
    """Return the bytes of a peak over what is held."""
    with FlopCounterMode(display=False, memory=True) as counter:
        for tensor in held:
            tensor.detach()  # is met, and counts as there before
        run()
    memory = counter.profile.check().memory
    assert memory is not None and not memory.is_lower_bound
    return memory.peak_bytes - sum(tensor.untyped_storage().nbytes() for tensor in held)


def assert_equals_the_allocators(run: Callable[[], object], x: torch.Tensor) -> None:
    run()  # what torch keeps from the first call on is there before
    truth = max(accumulate(allocations(run), initial=0))
    assert abs(peak_of(run, x) - truth) <= NUMBERS


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_peak_of_a_reduction_is_the_allocators(name: str, layout: str) -> None:
    compared = 0
    for dtype, to in product(DTYPES, (None, torch.float32, torch.float64, torch.bfloat16)):
        x = LAYOUTS[layout](dtype, CPU)
        run = partial(REDUCTIONS[name], x, **({} if to is None else {"dtype": to}))
        try:
            run()
        except RuntimeError:
            continue  # torch does not reduce this dtype to that
        assert_equals_the_allocators(run, x)
        compared += 1
    assert compared >= len(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WITHOUT_DTYPE)
def test_peak_of_a_count_or_a_test_is_the_allocators(
    name: str, layout: str, dtype: torch.dtype
) -> None:
    x = LAYOUTS[layout](dtype, CPU)
    assert_equals_the_allocators(lambda: WITHOUT_DTYPE[name](x), x)


@pytest.mark.parametrize("device", [CPU, META], ids=str)
def test_cast_operand_has_the_size_of_the_results_dtype(device: torch.device) -> None:
    truths = torch.ones(ROWS, COLUMNS, device=device) > 0
    assert peak_of(lambda: truths.sum(), truths) == ELEMENTS * 8 + 8
    assert peak_of(lambda: truths.sum(0), truths) == ELEMENTS * 8 + COLUMNS * 8
    floats = torch.ones(ROWS, COLUMNS, device=device)
    assert peak_of(lambda: floats.sum(), floats) == 4
    assert peak_of(lambda: floats.sum(dtype=torch.float64), floats) == ELEMENTS * 8 + 8
    halves = floats.bfloat16()
    assert peak_of(lambda: halves.mean(0), halves) == ELEMENTS * 4 + COLUMNS * (4 + 2)
