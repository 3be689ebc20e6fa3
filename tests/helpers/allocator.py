"""Bytes that torch's allocators report, as an oracle of memory, and what a counter finds."""

from __future__ import annotations

import gc
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
    return _bytes_of(before) + max(accumulate(allocations(run), initial=0))


def peak_bytes_on_cuda(run: Callable[[], object], before: Iterable[torch.Tensor]) -> int:
    """Return the most bytes that were asked for at a time, with the tensors that were there."""
    held, at_start = _bytes_of(tensor for tensor in before if tensor.is_cuda), _asked_for("current")
    torch.cuda.reset_peak_memory_stats()
    run()
    return held + _asked_for("peak") - at_start


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _asked_for(figure: str) -> int:
    torch.cuda.synchronize()
    gc.collect()
    found: int = torch.cuda.memory_stats()[f"requested_bytes.all.{figure}"]
    return found


def counted_peak_bytes(run: Callable[[], object], model: nn.Module | None) -> int:
    """Return the peak that a counter finds, once it is exact and the sum of its parts."""
    with FlopCounterMode(model, display=False, memory=True) as counter:
        run()
    memory = counter.profile.memory
    assert memory is not None
    assert not memory.is_lower_bound
    assert sum(use.bytes for use in memory.at_peak) == memory.peak_bytes
    return memory.peak_bytes
