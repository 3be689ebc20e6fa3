"""Counting and timing in one pass, for training loops, where a step cannot be run a second time.

On the CPU (``HostPass``) the profiler's own time is measured and taken off: ``OwnTime.now`` is a
clock that stands still while the profiler works; whoever reads time from it sees the program's
alone. What the profiler cannot see of itself (the way from C++ to Python and back, torch's
slower module call while hooks are there) is measured once per process on operators and modules
that do next to nothing, and taken off per call. A large operator leaves caches empty of all that:
the way is then as many times slower as the part of it that is seen, from the mode's first line to
the operator's run.

On an accelerator (``EventPass``) an event lies on each side of every operator. They measure how
long the device was at it, however late the profiler made the next one come; modules and phases
take as long as their operators.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dispatch_flops.analysis import sum_known
from dispatch_flops.clock import EVENT_RESOLUTION_S, TURNS, LatencyPass
from dispatch_flops.conventions import Conventions
from dispatch_flops.cost import Phase
from dispatch_flops.devices import Devices, Now, Stamp, seconds_between
from dispatch_flops.idle import IdleModules, alone, calling
from dispatch_flops.mode import CountingMode, Plan
from dispatch_flops.names import ModuleNames
from dispatch_flops.places import Place
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

    step_s: seconds in optimizer steps; None where there was none.
    with_closure: a step ran forward and backward itself, so that ``step_s`` is not its own alone.
    """

    def __init__(self, names: ModuleNames, own: OwnTime) -> None:
        super().__init__(names)
        self.own = own
        self.step_s: float | None = None
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


class _TimedMode(CountingMode):
    """A mode in which every operator that runs leaves in ``_call`` what was measured."""

    def __init__(self, tracker: Tracker, **options: Any) -> None:
        super().__init__(tracker, **options)
        self.times_operators = True
        self._call = _Call()

    def _decide(self, func: Any) -> Plan:
        plan = super()._decide(func)
        plan.call = self._timed(plan.call)
        return plan

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError


class HostTimedMode(_TimedMode):
    """Takes the time of every operator; all else that dispatching takes is the profiler's own."""

    def __init__(self, tracker: Tracker, own: OwnTime, **options: Any) -> None:
        super().__init__(tracker, **options)
        self.own = own
        self._spans: dict[int, tuple[float, float, float]] = {}

    def backward_s(self) -> float | None:
        """Seconds from the first to the last operator of the backward passes; None if none ran.

        Passes nested in another (reentrant checkpoints) are part of it.
        """
        if not self._spans:
            return None
        total, until = 0.0, float("-inf")
        for begin, last, in_operators in sorted(self._spans.values()):
            end = max(last, begin + in_operators)
            total += max(end - max(begin, until), 0.0)
            until = max(until, end)
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self._call
        if call.inside:  # below a composite operator: the outermost dispatch keeps the time
            return super().__torch_dispatch__(func, types, args, kwargs)
        begun = call.begun = self.own.clock()
        began_own = begun - self.own.seconds
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
            if task != -1:
                first, _, before = self._spans.get(task, (began_own, 0.0, 0.0))
                self._spans[task] = (first, began_own + call.seconds, before + call.seconds)

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
        """Wait for the device, once, and book the time of the operators so far."""
        with self._reading:
            unread, self._unread = self._unread, []
            self._devices.synchronize()
            for place, entry, start, end in unread:
                place.seconds[entry] += seconds_between(start, end)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        record, this = self._record, self._call

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = record()
            out = call(*args, **kwargs)
            this.last = (start, record())
            return out

        return timed

    def _book_time(self, place: Place, entry: Any) -> None:
        if (pair := self._call.take()) is not None:
            self._unread.append((place, entry, *pair))
            if len(self._unread) >= _UNREAD:
                self.read()


class HostPass:
    """Tracker, mode and clock of a pass that counts and times, the profiler's time taken off."""

    method = "counted and timed in one pass, the profiler's own time measured and taken off"

    def __init__(self, names: ModuleNames, own: OwnTime, mode_options: Mapping[str, Any]) -> None:
        self.tracker = TimedTracker(names, own)
        self.mode = HostTimedMode(self.tracker, own, **mode_options)
        self.clock = LatencyPass(
            names, now=own.now, is_followed=lambda: self.tracker.thread() is not None
        )

    def read(self) -> None:
        """Nothing is left to be read."""

    def module_seconds(self) -> Mapping[str, float] | None:
        """``{fqn: seconds}`` in forward."""
        return self.clock.seconds()

    def timing(self, profile: Profile) -> StepTiming:
        """Of backward and step. A step that was given a closure takes as long as its operators."""
        in_operators = operator_seconds(profile, "optimizer")
        return StepTiming(
            backward_s=self.mode.backward_s(),
            step_s=in_operators if self.tracker.with_closure else self.tracker.step_s,
            method=self.method,
            resolution_s=10 * self.mode.own.per_module,
            operator_resolution_s=10 * self.mode.own.per_op,
        )


class EventPass:
    """Tracker and mode of a pass that counts, with events on the device around every operator."""

    method = (
        "counted and timed in one pass, by events on the device around every operator; "
        "what the host does between operators is left out"
    )
    clock = None

    def __init__(
        self, names: ModuleNames, devices: Devices, record: Stamp, mode_options: Mapping[str, Any]
    ) -> None:
        self.tracker = Tracker(names)
        self.mode = EventTimedMode(self.tracker, devices, record, **mode_options)

    def read(self) -> None:
        """Book the times that the device has not told yet."""
        self.mode.read()

    def module_seconds(self) -> Mapping[str, float] | None:
        """None: modules take as long as their operators."""
        return None

    def timing(self, profile: Profile) -> StepTiming:
        """Of backward, with what it runs again, and step."""
        return StepTiming(
            backward_s=operator_seconds(profile, "backward", "recompute"),
            step_s=operator_seconds(profile, "optimizer"),
            method=self.method,
            resolution_s=10 * EVENT_RESOLUTION_S,
        )


def timed_pass(
    names: ModuleNames, devices: Devices, mode_options: Mapping[str, Any]
) -> HostPass | EventPass:
    """The pass that is right on these devices."""
    record = devices.events()
    if record is not None:
        return EventPass(names, devices, record, mode_options)
    clock = devices.clock() if devices.accelerators else None
    return HostPass(names, OwnTime.calibrated(clock), mode_options)


def operator_seconds(profile: Profile, *phases: Phase) -> float | None:
    """Seconds of all operators in these phases, in the model and outside it; None if none ran."""
    return sum_known(op.latency_s for op in profile.op_totals() if op.phase in phases)


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
        [both.clock.before, both.tracker.enter_module],
        [both.clock.after, both.tracker.leave_module],
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
