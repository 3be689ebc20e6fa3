"""Counting and timing in one pass, for training loops, where a step cannot be run a second time.

On the CPU (``HostPass``) the profiler's own time is measured and taken off: ``OwnTime.now`` is a
clock that stands still while the profiler works; whoever reads time from it sees the program's
alone. What the profiler cannot see of itself (the way from C++ to Python and back, torch's
slower module call while hooks are there) is measured once per process on operators and modules
that do next to nothing, and taken off per call. A large operator leaves caches empty of all that:
the way is then as many times slower as the part of it that is seen, from the mode's first line to
the operator's run.

On an accelerator (``EventPass``) an event lies on each side of every operator that gives it work.
They measure how long the device was at it, however late the profiler made the next one come;
modules and phases take as long as their operators. A device that has nothing else to do waits
between the first event and the operator's launch: short operators then seem longer, and the
latencies of modules that are made of them are marked.
"""

from __future__ import annotations

import functools
import math
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dispatch_flops.analysis import sum_known
from dispatch_flops.clock import EVENT_RESOLUTION_S, TURNS, LatencyPass
from dispatch_flops.conventions import Conventions
from dispatch_flops.cost import PHASES, Phase
from dispatch_flops.devices import Devices, Now, Stamp, seconds_between
from dispatch_flops.idle import IdleModules, alone, calling
from dispatch_flops.mode import CountingMode, Plan
from dispatch_flops.names import ModuleNames
from dispatch_flops.places import NO_TASK, Place
from dispatch_flops.tracker import Tracker
from dispatch_flops.tree import Profile, StepTiming

_now = time.perf_counter
_graph_task = torch._C._current_graph_task_id
_is_tracing = torch.compiler.is_dynamo_compiling
_UNREAD = 2**16  # pairs of events that are kept before they are read
_SLOWEST = 10.0  # a way more times slower than this was interrupted


class OwnTime(threading.local):
    """Seconds that the profiler itself has taken, of each thread.

    per_op, per_module: what one operator, one module call takes that is not measured each time.
    reach_s: seconds from the mode's first line to the operator's run when ``per_op`` was measured.
    in_operators: seconds that operators ran: no part of a program takes less than those in it.
    clock: of the time that passes.
    """

    _calibrated: tuple[float, float, float] | None = None

    def __init__(
        self,
        per_op: float = 0.0,
        per_module: float = 0.0,
        reach_s: float = 0.0,
        clock: Now | None = None,
    ) -> None:
        self.seconds = self.in_operators = 0.0
        self.per_op = per_op
        self.per_module = per_module
        self.reach_s = reach_s
        self.clock = clock or _now
        self._slowness = 1.0  # of the last operator's way

    def now(self) -> float:
        """Seconds on a clock that stands still while the profiler works."""
        return self.clock() - self.seconds

    def operator(self, seen_s: float, reach_s: float | None) -> None:
        """An operator has taken this much of the profiler, and more that is not seen."""
        if reach_s is not None and self.reach_s:
            self._slowness = min(max(reach_s / self.reach_s, 1.0), _SLOWEST)
        self.seconds += seen_s + self.per_op * self._slowness

    def hook(self, seen_s: float) -> None:
        """One of the two hooks of a module call has taken this much, and more that is not seen."""
        self.seconds += seen_s + self.per_module / 2 * self._slowness

    @classmethod
    def calibrated(cls, clock: Now | None = None) -> OwnTime:
        """With the unseen shares as measured on this machine, once per process."""
        if cls._calibrated is None:
            cls._calibrated = _calibrate()
        return cls(*cls._calibrated, clock=clock)


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
    begun: when it was dispatched. reach_s: from then to its run; None before, and where more than
    a look-up lay between.
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

    def _book_time(self, place: Place, entry: Any) -> None:
        if (seconds := self._call.take()) is not None:
            place.seconds[entry] += seconds


class EventTimedMode(_TimedMode):
    """Records an event before and after every operator; ``read`` books what lies between them."""

    def __init__(self, tracker: Tracker, devices: Devices, record: Stamp, **options: Any) -> None:
        super().__init__(tracker, **options)
        self._devices = devices
        self._record = record
        self._unread: list[tuple[Place, Any, Any, Any]] = []
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

    def _book_time(self, place: Place, entry: Any) -> None:
        if (pair := self._call.take()) is not None:
            self._unread.append((place, entry, *pair))
            if len(self._unread) >= _UNREAD:
                self.read()


class CountingPass:
    """Tracker and mode of a pass that counts and takes no times."""

    def __init__(self, tracker: Tracker, mode: CountingMode) -> None:
        self.tracker = tracker
        self.mode = mode

    def measuring(self) -> AbstractContextManager[Any]:
        """Inside, modules are timed, and the whole."""
        return nullcontext()

    def aside(self) -> AbstractContextManager[Any]:
        """What takes place inside is none of the program's time."""
        return nullcontext()

    def note_running(self, module: nn.Module) -> None:
        """A module's forward runs already."""
        self.tracker.enter_module(module, ())

    def read(self) -> None:
        """Book the times that the device has not told yet."""

    def module_seconds(self) -> Mapping[str, float] | None:
        """``{fqn: seconds}`` in forward; None: modules take as long as their operators."""
        return None

    def timing(self, profile: Profile) -> StepTiming:
        """Of the whole, of backward, and of the optimizer's step."""
        return StepTiming()


class HostPass(CountingPass):
    """A pass that counts and times, the profiler's own time taken off."""

    method = (
        "counted and timed in one pass, the profiler's own time measured and taken off; "
        "iter latency is of all that ran meanwhile"
    )

    def __init__(self, names: ModuleNames, own: OwnTime, mode_options: Mapping[str, Any]) -> None:
        self.steps = TimedTracker(names, own)
        self.host = HostTimedMode(self.steps, own, **mode_options)
        super().__init__(self.steps, self.host)
        self.own = own
        self.clock = LatencyPass(
            names, now=own.now, is_followed=lambda: self.tracker.thread() is not None
        )
        self._whole_s = 0.0
        self._begun: tuple[float, float] | None = None

    @contextmanager
    def measuring(self) -> Iterator[None]:
        with self.clock:
            self._begun = self.own.now(), self.own.in_operators
            try:
                yield
            finally:
                self._whole_s, self._begun = self._so_far_s(), None

    @contextmanager
    def aside(self) -> Iterator[None]:
        begun = self.own.clock()
        try:
            yield
        finally:
            self.own.seconds += self.own.clock() - begun

    def _so_far_s(self) -> float:
        if self._begun is None:
            return self._whole_s
        begun, in_operators = self._begun
        passed = max(self.own.now() - begun, self.own.in_operators - in_operators)
        return self._whole_s + passed

    def note_running(self, module: nn.Module) -> None:
        super().note_running(module)
        self.clock.before(module, ())

    def module_seconds(self) -> Mapping[str, float] | None:
        return self.clock.seconds()

    def timing(self, profile: Profile) -> StepTiming:
        """A step that was given a closure takes as long as its operators."""
        in_operators = operator_seconds(profile, "optimizer")
        backward_s = self.host.backward_s()
        if backward_s is not None:
            at_least = operator_seconds(profile, "backward", "recompute") or 0.0
            backward_s = max(backward_s - self.steps.in_backward_s, at_least)
        return StepTiming(
            backward_s=backward_s,
            step_s=in_operators if self.steps.with_closure else self.steps.step_s,
            iteration_s=self._so_far_s(),
            method=self.method,
            resolution_s=10 * self.own.per_module,
            operator_resolution_s=10 * self.own.per_op,
        )


class EventPass(CountingPass):
    """A pass that counts, with events on the device around every operator."""

    method = (
        "counted and timed in one pass, by events on the device around every operator; "
        "what the host does between operators is left out"
    )

    def __init__(
        self, names: ModuleNames, devices: Devices, record: Stamp, mode_options: Mapping[str, Any]
    ) -> None:
        tracker = Tracker(names)
        self.events = EventTimedMode(tracker, devices, record, **mode_options)
        super().__init__(tracker, self.events)
        self._gap_s = None if devices.is_capturing() else _gap_s(devices)

    def read(self) -> None:
        self.events.read()

    def timing(self, profile: Profile) -> StepTiming:
        """Each as long as its operators; backward with what it runs again."""
        return StepTiming(
            backward_s=operator_seconds(profile, "backward", "recompute"),
            step_s=operator_seconds(profile, "optimizer"),
            iteration_s=operator_seconds(profile, *PHASES),
            method=self.method,
            resolution_s=10 * EVENT_RESOLUTION_S,
            operator_resolution_s=None if self._gap_s is None else 10 * self._gap_s,
        )


def counting_pass(
    names: ModuleNames, mode_options: Mapping[str, Any], *, timed: bool
) -> CountingPass:
    """The pass that is right where these modules compute."""
    devices = names.devices()
    if not timed or not devices.computes:
        tracker = Tracker(names)
        return CountingPass(tracker, CountingMode(tracker, **mode_options))
    record = devices.events()
    if record is not None:
        return EventPass(names, devices, record, mode_options)
    clock = devices.clock() if devices.accelerators else None
    return HostPass(names, OwnTime.calibrated(clock), mode_options)


def operator_seconds(profile: Profile, *phases: Phase) -> float | None:
    """Seconds of all operators in these phases, in the model and outside it; None if none ran."""
    return sum_known(op.latency_s for op in profile.op_totals() if op.phase in phases)


@functools.cache
def _gap_s(devices: Devices) -> float:
    """Seconds between the events around an operator that does next to nothing, on a device that
    has nothing else to do.
    """
    return alone(lambda: _measure_gap(devices))


def _measure_gap(devices: Devices) -> float:
    record = devices.events()
    assert record is not None
    number = torch.zeros(1, device=devices.accelerators[0])
    gaps = []
    with torch.no_grad():
        for _ in range(TURNS):
            devices.synchronize()
            start = record()
            number.add_(1)
            end = record()
            devices.synchronize()
            gaps.append(seconds_between(start, end))
    return statistics.median(gaps)


def _calibrate() -> tuple[float, float, float]:
    """``per_op``, ``per_module`` and ``reach_s`` of ``OwnTime`` on this machine."""
    return alone(_measure_own_time)


def _measure_own_time() -> tuple[float, float, float]:
    one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    # Two operators: the weight is transposed first.
    idle = IdleModules(100, lambda x: nn.functional.linear(x, one))
    reaches: list[float] = []

    class Noting(OwnTime):
        operators = 0

        def operator(self, seen_s: float, reach_s: float | None) -> None:
            self.operators += 1
            reaches.extend(() if reach_s is None else (reach_s,))
            super().operator(seen_s, reach_s)

    def bare() -> None:
        for module in idle.modules:
            module.forward(one)

    with torch.no_grad():
        noting = Noting()
        per_op = _unseen(bare, noting, idle) * TURNS / max(noting.operators, 1)
        reach_s = statistics.median(reaches) if reaches else 0.0
        own = OwnTime(per_op=per_op, reach_s=reach_s)
        per_module = _unseen(idle.run, own, idle) / len(idle.modules)
    return per_op, per_module, reach_s


def _unseen(run: Callable[[], Any], own: OwnTime, idle: IdleModules) -> float:
    """Seconds that ``run`` takes more under the profiler, by the profiler's own clock.

    With and without by turns: whatever disturbs the machine disturbs both.
    """
    both = HostPass(
        ModuleNames(idle.modules),
        own,
        {"conventions": Conventions(), "own_rules": {}, "on_full": int},
    )
    both.tracker.join_thread(entered=True)
    bare = calling()
    hooked = calling(
        [both.tracker.enter_module, both.clock.before],
        [both.tracker.leave_module, both.clock.after],
    )
    more = []
    for _ in range(TURNS):
        idle.call_by(bare)
        plain = _seconds(run, _now)
        idle.call_by(hooked)
        with both.mode:
            more.append(_seconds(run, own.now) - plain)
    return max(statistics.median(more), 0.0)


def _seconds(run: Callable[[], Any], now: Now) -> float:
    begun = now()
    run()
    return now() - begun
