"""Search for the largest size that fits, by running."""

from __future__ import annotations

from collections.abc import Callable

_LARGEST = 2**20


def largest_that_fits(peak_bytes: Callable[[int], int], capacity: float, start: int) -> int:
    """Return the largest size whose peak is within the capacity; 0 if not even 1 is.

    peak_bytes: memory of a run of that size, which does not shrink as the size grows. Every answer
        was run, and so was the next larger size, which does not fit; sizes end at 2^20.

    Memory grows nearly linearly, so that each guess between a size that fits and one that does not
    is on the line through both.
    """
    known = {start: peak_bytes(start)}

    def peak(size: int) -> int:
        if size not in known:
            known[size] = peak_bytes(size)
        return known[size]

    low, high = 0, start
    while peak(high) <= capacity:
        if high == _LARGEST:
            return high
        low, high = high, min(2 * high, _LARGEST)
    while high - low > 1:
        guess = (low + high) // 2
        if low and peak(high) > peak(low):
            share = (capacity - peak(low)) / (peak(high) - peak(low))
            guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        if peak(guess) <= capacity:
            low = guess
        else:
            high = guess
    return low
