"""Figures of plans as text: memory, batches, and ranges of rates and times."""

from __future__ import annotations

from dispatch_flops.analysis.memory_fit import MemoryFit
from dispatch_flops.profile import MemoryProfile
from dispatch_flops.renderers.memory_table import marked_bytes
from dispatch_flops.units import NOT_AVAILABLE, bytes_text, count_text, seconds_text


def fits_text(fits: bool | None) -> str:
    """Return whether the peak is within the device's memory; "n/a" where that is unknown."""
    return {True: "yes", False: "no", None: NOT_AVAILABLE}[fits]


def peak_text(memory: MemoryProfile | None) -> str:
    """Return the bytes at the peak as text, marked if they are not exact."""
    return NOT_AVAILABLE if memory is None else marked_bytes(memory.peak_bytes, memory)


def headroom_text(free: float | None, memory: MemoryProfile | None) -> str:
    """Return free bytes as text, negative where memory is missing; marked as the peak is."""
    if free is None:
        return NOT_AVAILABLE
    text = bytes_text(int(free)) if free >= 0 else f"-{bytes_text(int(-free))}"
    return _at_most(text, memory)


def largest_text(choice: MemoryFit, memory: MemoryProfile | None) -> str:
    """Return the largest batch that fits; more may fit than was searched."""
    text = str(choice.largest_batch)
    if choice.largest_batch_is_lower_bound:
        return f">= {text}"
    return _at_most(text, memory)


def _at_most(text: str, memory: MemoryProfile | None) -> str:
    """Return what this memory leaves, marked with ``<=`` or ``~`` where the peak is not exact."""
    if memory is None:
        return text
    if memory.is_approximate:
        return f"~ {text}"
    return f"<= {text}" if memory.is_lower_bound else text


def range_text(rates: tuple[float | None, float | None]) -> str:
    """Return the lower and the higher rate as text."""
    low, high = rates
    if low is None or high is None:
        return NOT_AVAILABLE
    return _rate_text(high) if low == high else f"{_rate_text(low)} to {_rate_text(high)}"


def _rate_text(rate: float) -> str:
    """Return the rate, below 1 without a prefix: 0.3, not 300 m, which reads as millions."""
    return f"{rate:.3g}" if 0 < rate < 1 else count_text(rate)


def seconds_range_text(low: float | None, high: float | None) -> str:
    """Return the lower and the higher time as text."""
    if low is None or high is None:
        return NOT_AVAILABLE
    return seconds_text(low) if low == high else f"{seconds_text(low)} to {seconds_text(high)}"
