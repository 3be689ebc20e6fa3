"""What one pass under a counter consists of: it counts, and may time in the same pass, for training
loops, where a step cannot be run a second time.

On the CPU (``HostPass``) the profiler's own time is measured and taken off. On an accelerator
(``EventPass``) an event lies on each side of every operator that gives it work. They measure how
long the device was at it, however late the profiler made the next one come; modules and phases
take as long as their operators. A device that has nothing else to do waits between the first event
and the operator's launch: short operators then seem longer, and the latencies of modules that are
made of them are marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from dispatch_flops.counting.dispatch_mode import CountingMode
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.profile import PhaseSeconds, Profile, StepTiming, sum_known
from dispatch_flops.profile.cost import Phase
from dispatch_flops.timing.devices import Devices, Stamp
from dispatch_flops.timing.module_timer import EVENT_RESOLUTION_S, LatencyPass
from dispatch_flops.timing.overhead import OwnTime
from dispatch_flops.timing.timed_modes import EventTimedMode, HostTimedMode, TimedTracker


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
        self._home: dict[str, Any] = {}  # what ``own`` is in the thread that is measured

    @contextmanager
    def measuring(self) -> Iterator[None]:
        with self.clock:
            self._home = vars(self.own)
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
        passed = self.own.clock() - self._home["seconds"] - begun
        return float(self._whole_s + max(passed, self._home["in_operators"] - in_operators))

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
            seconds=PhaseSeconds(
                {
                    "backward": backward_s,
                    "optimizer": in_operators if self.steps.with_closure else self.steps.step_s,
                }
            ),
            iteration_s=self._so_far_s(),
            method=self.method,
            resolution_s=10 * self.own.per_module,
            operator_resolution_s=10 * self.own.per_op,
        )


class EventPass(CountingPass):
    """A pass that counts, with events on the device around every operator.

    gap_s: how much longer an operator may seem than it is; None if not known.
    """

    method = (
        "counted and timed in one pass, by events on the device around every operator; "
        "what the host does between operators is left out"
    )

    def __init__(
        self,
        names: ModuleNames,
        devices: Devices,
        record: Stamp,
        gap_s: float | None,
        mode_options: Mapping[str, Any],
    ) -> None:
        tracker = Tracker(names)
        self.events = EventTimedMode(tracker, devices, record, **mode_options)
        super().__init__(tracker, self.events)
        self._gap_s = gap_s

    def read(self) -> None:
        self.events.read()

    def timing(self, profile: Profile) -> StepTiming:
        """Each as long as its operators; backward with what it runs again."""
        return StepTiming(
            seconds=PhaseSeconds(
                {
                    "backward": operator_seconds(profile, "backward", "recompute"),
                    "optimizer": operator_seconds(profile, "optimizer"),
                }
            ),
            iteration_s=sum_known(op.latency_s for op in profile.op_totals()),
            method=self.method,
            resolution_s=10 * EVENT_RESOLUTION_S,
            operator_resolution_s=None if self._gap_s is None else 10 * self._gap_s,
        )


def operator_seconds(profile: Profile, *phases: Phase) -> float | None:
    """Seconds of all operators in these phases, in the model and outside it; None if none ran."""
    return sum_known(op.latency_s for op in profile.op_totals() if op.phase in phases)
