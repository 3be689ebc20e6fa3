"""Bytes that torch's CPU allocator reports, as an oracle of memory, and what a counter finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from dispatch_flops import FlopCounterMode


def allocations(run: Callable[[], object]) -> list[int]:
    """Return the bytes of each allocation (positive) and release (negative) in ``run``, in order.

    Releases of what was allocated before are not reported.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak_bytes(run: Callable[[], object], before: Iterable[torch.Tensor]) -> int:
    """Return the most bytes that were allocated at a time, with the tensors that were there."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in before}
    return sum(storages.values()) + max(accumulate(allocations(run), initial=0))


def counted_peak_bytes(run: Callable[[], object], model: nn.Module | None) -> int:
    """Return the peak that a counter finds, once it is exact and the sum of its parts."""
    with FlopCounterMode(model, display=False, memory=True) as counter:
        run()
    memory = counter.profile.memory
    assert memory is not None
    assert not memory.is_lower_bound
    assert sum(use.bytes for use in memory.at_peak) == memory.peak_bytes
    return memory.peak_bytes
