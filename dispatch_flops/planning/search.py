"""Search for the size from which on a figure has a value, by running."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dispatch_flops.analysis.memory_fit import LARGEST_SEARCHED


def without_batch(sizes: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the sizes other than the batch: choices that agree in them share a search."""
    return tuple((name, value) for name, value in sizes.items() if name != "batch")


def followed(peak_bytes: int | None) -> int:
    """Return the peak of what was counted with its memory, as all is that a search tries."""
    assert peak_bytes is not None
    return peak_bytes


def largest_that_fits(peak_bytes: Callable[[int], int], capacity: float, start: int) -> int:
    """Return the largest size whose peak is within the capacity; 0 if not even 1 is.

    peak_bytes: memory of a run of that size, which does not shrink as the size grows. Every answer
        was run, and so was the next larger size, which does not fit; sizes end at 2^20.
    """
    first = first_not_below(lambda size: peak_bytes(size) - capacity, start, is_inclusive=False)
    return LARGEST_SEARCHED if first is None else first - 1


def first_not_below(
    figure: Callable[[int], float], start: int = 1, *, is_inclusive: bool = True
) -> int | None:
    """Return the smallest size at which a figure is at least 0; None if none up to 2^20 is.

    figure: of a run of that size. Once it is at least 0, it stays so as the size grows. The answer
        was run, and so was the next smaller size, at which the figure is below 0.
    is_inclusive: False asks for more than 0.

    Figures grow nearly linearly, so that each guess is on the line through two known sizes.
    """
    known: dict[int, float] = {}

    def is_reached(size: int) -> bool:
        if size not in known:
            known[size] = figure(size)
        return known[size] > 0 or (is_inclusive and known[size] == 0)

    low, high = 0, start
    while not is_reached(high):
        if high == LARGEST_SEARCHED:
            return None
        guess = max(_on_line(known, low, high, default=2 * high), high + high // 8 + 1)
        low, high = high, min(guess, LARGEST_SEARCHED)
    while high - low > 1:
        guess = _on_line(known, low, high, default=(low + high) // 2)
        guess = min(max(guess, low + 1), high - 1)
        if is_reached(guess):
            high = guess
        else:
            low = guess
    return high


def _on_line(known: dict[int, float], low: int, high: int, *, default: int) -> int:
    """Return the first size beyond the zero of the line through two sizes."""
    if low not in known or known[high] <= known[low]:
        return default
    slope = (known[high] - known[low]) / (high - low)
    return low + max(int(-known[low] / slope) + 1, 1)
