"""Trackers and modes that also take time, for passes in which counting and timing go together."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.counting.dispatch_mode import CountingMode, Plan
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.thread_state import NO_TASK, ModulePhase
from dispatch_flops.timing.devices import Devices, Stamp, seconds_between
from dispatch_flops.timing.overhead import OwnTime

_graph_task = _torch.graph_task_id
_is_tracing = torch.compiler.is_dynamo_compiling
_UNREAD = 2**16  # pairs of events that are kept before they are read


class TimedTracker(Tracker):
    """A tracker whose hooks' time is the profiler's own.

    step_s: seconds in optimizer steps; None where there was none. in_backward_s: of these, those
        in steps that a backward pass ran, as a hook on a gradient may.
    with_closure: a step ran forward and backward itself, so that ``step_s`` is not its own alone.
    """

    def __init__(self, names: ModuleNames, own: OwnTime) -> None:
        super().__init__(names)
        self.own = own
        self.step_s: float | None = None
        self.in_backward_s = 0.0
        self.with_closure = False
        self._steps = _Steps()

    def enter_module(self, module: nn.Module, args: Any) -> None:
        if _is_tracing():
            return
        begun = self.own.clock()
        super().enter_module(module, args)
        self.own.hook(self.own.clock() - begun)

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_tracing():
            return
        begun = self.own.clock()
        super().leave_module(module, args, output)
        self.own.hook(self.own.clock() - begun)

    def enter_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        super().enter_optimizer(optimizer, args, kwargs)
        self.with_closure = self.with_closure or self.in_closure_step()
        if self.steps_open() == 1:
            self._steps.begun = self.own.now(), self.own.in_operators

    def leave_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.steps_open() == 1:  # what an optimizer has another one do is part of its own step
            begun, in_operators = self._steps.begun
            taken = max(self.own.now() - begun, self.own.in_operators - in_operators)
            self.step_s = (self.step_s or 0.0) + taken
            self.in_backward_s += taken if _graph_task() != NO_TASK else 0.0
        super().leave_optimizer(optimizer, args, kwargs)


class _Steps(threading.local):
    """When the optimizer step that a thread is at began: ``now`` and ``in_operators`` then."""

    begun = 0.0, 0.0


class _Call(threading.local):
    """The operator that a thread is at.

    inside: it was dispatched and is not done. seconds: how long the operators below it took.
    begun: when it was dispatched. reach_s: from then to its run; None unless its plan was simply
    looked up.
    """

    inside = False
    seconds = 0.0
    begun = 0.0
    reach_s: float | None = None
    is_looked_up = True
    last: Any = None

    def take(self) -> Any:
        """What was measured of the operator that just ran; None if it was answered without."""
        last, self.last = self.last, None
        return last


@dataclass(slots=True)
class _Span:
    """What one thread did of one backward pass: from its first operator to the end of its last, on
    the clock and in its own ``OwnTime.seconds``.
    """

    begun: float
    own_begun: float
    ended: float = 0.0
    own_ended: float = 0.0
    in_operators: float = 0.0


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what these intervals cover together."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total


class _TimedMode(CountingMode):
    """A mode in which every operator that runs leaves in ``_call`` what was measured."""

    def __init__(self, tracker: Tracker, **options: Any) -> None:
        super().__init__(tracker, **options)
        self.times_operators = True
        self._call = _Call()

    def _decide(self, func: Any) -> Plan:
        plan = super()._decide(func)
        if self._takes_time(plan):
            plan.call = self._timed(plan.call)
        return plan

    def _takes_time(self, plan: Plan) -> bool:
        return True

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError


class HostTimedMode(_TimedMode):
    """Takes the time of every operator; all else that dispatching takes is the profiler's own."""

    def __init__(self, tracker: Tracker, own: OwnTime, **options: Any) -> None:
        super().__init__(tracker, **options)
        self.own = own
        self._spans: dict[tuple[int, int], _Span] = {}

    def backward_s(self) -> float | None:
        """Seconds from the first to the last operator of the backward passes; None if none ran.

        Passes nested in another (reentrant checkpoints) are part of it. Several threads may work
        on one; of what each took for the profiler, all is taken off.
        """
        by_thread: defaultdict[int, list[_Span]] = defaultdict(list)
        for (_, thread), span in list(self._spans.items()):
            by_thread[thread].append(span)
        if not by_thread:
            return None
        spans = [span for each in by_thread.values() for span in each]
        passed = _covered((span.begun, span.ended) for span in spans)
        own = sum(_covered((s.own_begun, s.own_ended) for s in each) for each in by_thread.values())
        in_operators = max(sum(span.in_operators for span in each) for each in by_thread.values())
        return max(passed - own, in_operators)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self._call
        if call.inside:  # below a composite operator: the outermost dispatch keeps the time
            return super().__torch_dispatch__(func, types, args, kwargs)
        begun = call.begun = self.own.clock()
        own_begun = self.own.seconds
        call.inside = call.is_looked_up = True
        call.seconds = 0.0
        call.reach_s = None
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            call.inside = False
            self.own.in_operators += call.seconds
            self.own.operator(self.own.clock() - begun - call.seconds, call.reach_s)
            task = _graph_task()
            if task != NO_TASK:
                at = task, threading.get_ident()
                span = self._spans.get(at) or self._spans.setdefault(at, _Span(begun, own_begun))
                span.ended, span.own_ended = begun + call.seconds, own_begun
                span.in_operators += call.seconds

    def _decide(self, func: Any) -> Plan:
        self._call.is_looked_up = False
        return super()._decide(func)

    def _special(self, *call: Any) -> tuple[bool, Any]:
        self._call.is_looked_up = False
        return super()._special(*call)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        clock, this = self.own.clock, self._call

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = clock()
            if this.is_looked_up:
                this.reach_s = begun - this.begun
                this.is_looked_up = False
            try:
                return call(*args, **kwargs)
            finally:
                this.last = clock() - begun
                this.seconds += this.last

        return timed

    def _book_time(self, place: ModulePhase, entry: Any) -> None:
        if (seconds := self._call.take()) is not None:
            place.seconds[entry] += seconds


class EventTimedMode(_TimedMode):
    """Records an event before and after every operator; ``read`` books what lies between them."""

    def __init__(self, tracker: Tracker, devices: Devices, record: Stamp, **options: Any) -> None:
        super().__init__(tracker, **options)
        self._devices = devices
        self._record = record
        self._unread: list[tuple[ModulePhase, Any, Any, Any]] = []
        self._reading = threading.Lock()

    def read(self) -> None:
        """Wait for the device, once, and book the time of the operators so far.

        Later, while a CUDA graph is captured: waiting would end that.
        """
        if self._devices.is_capturing():
            return
        with self._reading:
            unread, self._unread = self._unread, []
            self._devices.synchronize()
            for place, entry, start, end in unread:
                place.seconds[entry] += seconds_between(start, end)

    def _takes_time(self, plan: Plan) -> bool:
        """False for views, bare allocations and their like, which give the device nothing to do."""
        return plan.fixed is None or plan.fixed.kind != "free"

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        record, this = self._record, self._call

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = record()
            out = call(*args, **kwargs)
            if start is not None:
                this.last = (start, record())
            return out

        return timed

    def _book_time(self, place: ModulePhase, entry: Any) -> None:
        if (pair := self._call.take()) is not None:
            self._unread.append((place, entry, *pair))
            if len(self._unread) >= _UNREAD:
                self.read()
