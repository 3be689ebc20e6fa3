"""The largest size that fits, on memory that grows as a known function of the size."""

from __future__ import annotations

import pytest

from dispatch_flops.planning.search import largest_that_fits


@pytest.mark.parametrize("start", [1, 2, 7, 50, 1000])
@pytest.mark.parametrize("capacity", [9, 10, 11, 137, 138, 5000])
@pytest.mark.parametrize("power", [1, 2])
def test_largest_that_fits_is_the_last_size_within_the_capacity(
    start: int, capacity: int, power: int
) -> None:
    def peak(size: int) -> int:
        return 7 + 3 * size**power

    sizes = [size for size in range(1, 3000) if peak(size) <= capacity]
    assert largest_that_fits(peak, capacity, start) == max(sizes, default=0)


def test_search_runs_few_sizes_where_memory_grows_linearly() -> None:
    ran: list[int] = []

    def peak(size: int) -> int:
        ran.append(size)
        return 1000 + 17 * size

    assert largest_that_fits(peak, 1000 + 17 * 777, 1) == 777
    assert len(ran) == len(set(ran)) < 20


def test_search_ends_where_memory_does_not_grow() -> None:
    assert largest_that_fits(lambda size: 1, 2, 1) == 2**20
