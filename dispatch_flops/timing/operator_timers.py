"""Measure the operators that a dispatch mode runs, by the host's clock or by events on a device."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dispatch_flops import _torch
from dispatch_flops.counting.thread_state import NO_TASK, ModulePhase
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.timing.devices import Devices, Stamp, seconds_between
from dispatch_flops.timing.overhead import Overhead

_graph_task = _torch.graph_task_id
_UNREAD = 2**16  # pairs of events kept before they are read


class _Dispatch(threading.local):
    """The outermost operator that a thread dispatches.

    seconds: time of the operators run for it. begun, overhead_begun: when it was dispatched, on the
    clock and in ``Overhead.seconds``. reach_s: from then until it ran; None unless its plan was
    only looked up. last: what was measured of the operator that ran last.
    """

    is_running = False
    is_looked_up = True
    seconds = 0.0
    begun = 0.0
    overhead_begun = 0.0
    reach_s: float | None = None
    last: Any = None

    def take(self) -> Any:
        """Return ``last``, once; None if an operator was answered without being run."""
        last, self.last = self.last, None
        return last


@dataclass(slots=True)
class _Span:
    """One thread's part of a backward pass: from its first operator to the end of its last.

    Each is given on the clock and in the thread's ``Overhead.seconds``.
    """

    begun: float
    overhead_begun: float
    ended: float = 0.0
    overhead_ended: float = 0.0
    in_operators: float = 0.0


class HostOperatorTimer:
    """Times every operator by the host's clock; everything else in a dispatch is overhead."""

    def __init__(self, overhead: Overhead) -> None:
        self._overhead = overhead
        self._dispatch = _Dispatch()
        self._spans: dict[tuple[int, int], _Span] = {}

    def begin(self) -> bool:
        """Start the outermost dispatch of this thread; return False within one.

        An operator that is dispatched for a composite operator is part of its dispatch.
        """
        dispatch = self._dispatch
        if dispatch.is_running:
            return False
        dispatch.is_running = dispatch.is_looked_up = True
        dispatch.seconds = 0.0
        dispatch.reach_s = None
        dispatch.overhead_begun = self._overhead.seconds
        dispatch.begun = self._overhead.clock()
        return True

    def end(self) -> None:
        """End the outermost dispatch: what was not spent in operators is overhead."""
        dispatch, overhead = self._dispatch, self._overhead
        dispatch.is_running = False
        overhead.in_operators += dispatch.seconds
        passed = overhead.clock() - dispatch.begun
        overhead.operator(passed - dispatch.seconds, dispatch.reach_s)
        task = _graph_task()
        if task != NO_TASK:
            key = task, threading.get_ident()
            span = self._spans.get(key)
            if span is None:
                span = self._spans[key] = _Span(dispatch.begun, dispatch.overhead_begun)
            span.ended = dispatch.begun + dispatch.seconds
            span.overhead_ended = dispatch.overhead_begun
            span.in_operators += dispatch.seconds

    def timed(self, call: Callable[..., Any], *, is_free: bool) -> Callable[..., Any]:
        """Return ``call`` with its time taken."""
        clock, dispatch = self._overhead.clock, self._dispatch

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = clock()
            if dispatch.is_looked_up:
                dispatch.reach_s = begun - dispatch.begun
                dispatch.is_looked_up = False
            try:
                return call(*args, **kwargs)
            finally:
                dispatch.last = clock() - begun
                dispatch.seconds += dispatch.last

        return timed

    def disregard_reach(self) -> None:
        """Leave ``reach_s`` unknown: this dispatch does more than look up a known operator."""
        self._dispatch.is_looked_up = False

    def record(self, module_phase: ModulePhase, cost: CallCost) -> None:
        """Record the seconds of the operator that just ran."""
        if (seconds := self._dispatch.take()) is not None:
            module_phase.add_seconds(cost, seconds)

    def backward_s(self) -> float | None:
        """Return seconds from the first to the last operator of backward passes; None if none ran.

        Nested passes (reentrant checkpoints) are part of the outer pass. Several threads may work
        on one pass; the overhead of each is subtracted.
        """
        by_thread: defaultdict[int, list[_Span]] = defaultdict(list)
        for (_, thread), span in list(self._spans.items()):
            by_thread[thread].append(span)
        if not by_thread:
            return None
        spans = [span for each in by_thread.values() for span in each]
        passed = _covered((span.begun, span.ended) for span in spans)
        overhead = sum(
            _covered((span.overhead_begun, span.overhead_ended) for span in each)
            for each in by_thread.values()
        )
        in_operators = max(sum(span.in_operators for span in each) for each in by_thread.values())
        return max(passed - overhead, in_operators)


class EventOperatorTimer:
    """Records an event before and after every operator; ``read`` records the time between them."""

    def __init__(self, devices: Devices, record_event: Stamp) -> None:
        self._devices = devices
        self._record_event = record_event
        self._dispatch = _Dispatch()
        self._unread: list[tuple[ModulePhase, CallCost, Any, Any]] = []
        self._reading = threading.Lock()

    def begin(self) -> bool:
        """Return False: events tell the time of operators alone."""
        return False

    def end(self) -> None:
        """Never called, as ``begin`` returns False."""

    def timed(self, call: Callable[..., Any], *, is_free: bool) -> Callable[..., Any]:
        """Return ``call`` between two events, unless it gives the device nothing to do."""
        if is_free:
            return call
        record_event, dispatch = self._record_event, self._dispatch

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = record_event()
            out = call(*args, **kwargs)
            if start is not None:
                dispatch.last = (start, record_event())
            return out

        return timed

    def disregard_reach(self) -> None:
        """Do nothing: the host's time is not taken."""

    def record(self, module_phase: ModulePhase, cost: CallCost) -> None:
        """Keep the events of the operator that just ran."""
        if (pair := self._dispatch.take()) is not None:
            self._unread.append((module_phase, cost, *pair))
            if len(self._unread) >= _UNREAD:
                self.read()

    def read(self) -> None:
        """Wait for the device, once, and record the seconds of the operators so far.

        While a CUDA graph is captured nothing is read, because waiting would end the capture.
        """
        if self._devices.is_capturing():
            return
        with self._reading:
            unread, self._unread = self._unread, []
            self._devices.synchronize()
            for module_phase, cost, start, end in unread:
                module_phase.add_seconds(cost, seconds_between(start, end))


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total
