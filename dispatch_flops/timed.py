"""Counting and timing in one pass: the profiler's own time is measured and taken off.

For training loops, where a step cannot be run a second time. ``OwnTime.now`` is a clock that
stands still while the profiler works; whoever reads time from it sees the program's alone.
What the profiler cannot see of itself (the way from C++ to Python and back, torch's slower
module call while hooks are there) is measured once per process on operators and modules
that do next to nothing, and taken off per call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from dispatch_flops.clock import LatencyPass, synchronize
from dispatch_flops.mode import CountingMode, _Plan
from dispatch_flops.names import ModuleNames
from dispatch_flops.registry import Conventions
from dispatch_flops.tracker import Tracker, _is_tracing

_now = time.perf_counter
_graph_task = torch._C._current_graph_task_id


class OwnTime:
    """Seconds that the profiler itself has taken.

    per_op, per_module: what one operator, one module call takes that is not measured each time.
    """

    _calibrated: tuple[float, float] | None = None

    def __init__(self, per_op: float = 0.0, per_module: float = 0.0) -> None:
        self.seconds = 0.0
        self.per_op = per_op
        self.per_module = per_module

    def now(self) -> float:
        """Seconds on a clock that stands still while the profiler works."""
        return _now() - self.seconds

    @classmethod
    def calibrated(cls) -> OwnTime:
        """With the unseen shares as measured on this machine, once per process."""
        if cls._calibrated is None:
            cls._calibrated = _calibrate()
        return cls(*cls._calibrated)


class TimedTracker(Tracker):
    """A tracker whose hooks' time is the profiler's own.

    step_s: seconds in optimizer steps; None where there was none.
    """

    own: OwnTime
    device = "cpu"
    step_s: float | None = None
    _step_begun = 0.0

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if _is_tracing():
            return
        begun = _now()
        super()._enter_module(module, args)
        self.own.seconds += _now() - begun + self.own.per_module / 2

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_tracing():
            return
        begun = _now()
        super()._leave_module(module, args, output)
        self.own.seconds += _now() - begun + self.own.per_module / 2

    def _enter_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        super()._enter_optimizer(optimizer, args, kwargs)
        synchronize(self.device)
        self._step_begun = self.own.now()

    def _leave_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        synchronize(self.device)
        self.step_s = (self.step_s or 0.0) + self.own.now() - self._step_begun
        super()._leave_optimizer(optimizer, args, kwargs)


class TimedMode(CountingMode):
    """Takes the time of every operator; all else that dispatching takes is the profiler's own."""

    own: OwnTime
    _inside = False
    _calls_s = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._spans: dict[int, tuple[float, float]] = {}

    def backward_s(self) -> float | None:
        """Seconds from the first to the last operator of the backward passes; None if none ran.

        Passes nested in another (reentrant checkpoints) are part of it.
        """
        if not self._spans:
            return None
        total, until = 0.0, float("-inf")
        for begin, end in sorted(self._spans.values()):
            total += max(end - max(begin, until), 0.0)
            until = max(until, end)
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:  # below a composite operator: the outermost dispatch keeps the time
            return super().__torch_dispatch__(func, types, args, kwargs)
        begun = _now()
        began_own = begun - self.own.seconds
        self._inside = True
        self._calls_s = 0.0
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._inside = False
            self.own.seconds += _now() - begun - self._calls_s + self.own.per_op
            task = _graph_task()
            if task != -1:
                first, _ = self._spans.get(task, (began_own, 0.0))
                self._spans[task] = (first, began_own + self._calls_s)

    def _decide(self, func: Any) -> _Plan:
        plan = super()._decide(func)
        plan.call = self._timed(plan.call)
        return plan

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = _now()
            try:
                return call(*args, **kwargs)
            finally:
                self.last_call_s = _now() - begun
                self._calls_s += self.last_call_s

        return timed


def timed_parts(
    names: ModuleNames, device: str, own: OwnTime, **mode_options: Any
) -> tuple[TimedTracker, TimedMode, LatencyPass]:
    """Tracker, mode and clock of one pass that counts and times."""
    tracker = TimedTracker(names)
    mode = TimedMode(tracker, **mode_options)
    tracker.own = mode.own = own
    tracker.device = device
    return tracker, mode, LatencyPass(names, device=device, now=own.now)


def _calibrate() -> tuple[float, float]:
    """Seconds per operator and per module call that the profiler takes unseen."""
    modules = nn.Sequential(*(nn.Identity() for _ in range(100)))
    one = torch.ones(1)

    def operators() -> None:
        for _ in range(100):
            torch.neg(one)

    with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):
        per_op = _unseen(operators, OwnTime()) / 100
        per_module = _unseen(lambda: modules(one), OwnTime(per_op), modules) / 101
    return per_op, per_module


def _unseen(run: Callable[[], Any], own: OwnTime, *roots: nn.Module) -> float:
    """Seconds that ``run`` takes more under the profiler, by the profiler's own clock."""
    tracker, mode, clock = timed_parts(
        ModuleNames(roots), "cpu", own, conventions=Conventions(), own_rules={}, on_full=int
    )
    with ExitStack() as undo:
        undo.enter_context(clock)
        tracker.start()
        undo.callback(tracker.stop)
        profiled = _median_s(run, own.now, mode)
    return max(profiled - _median_s(run, _now, nullcontext()), 0.0)


def _median_s(
    run: Callable[[], Any], now: Callable[[], float], inside: AbstractContextManager[Any]
) -> float:
    taken = []
    with inside:
        for _ in range(9):
            begun = now()
            run()
            taken.append(now() - begun)
    return statistics.median(taken)
