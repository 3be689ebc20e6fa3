"""What a counting pass measures of time: nothing, or operators, modules, steps and the whole.

Counting and timing share a pass in training loops, where a step cannot be run twice. On the CPU
(``HostPass``) the profiler's own overhead is measured and subtracted. On an accelerator
(``EventPass``) there is an event on each side of every operator that gives the device work. They
tell how long the device was busy, however late the host launched the next operator; modules and
phases take as long as their operators. An idle device waits between the first event and the
operator's launch. Short operators then seem longer, and the latencies of modules that consist of
them are marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dispatch_flops.counting.undo import UndoStack
from dispatch_flops.profile import PhaseSeconds, Profile, StepTiming, sum_known
from dispatch_flops.profile.cost import Phase
from dispatch_flops.timing.devices import CPU, Devices, Stamp
from dispatch_flops.timing.module_timer import ModuleTimer
from dispatch_flops.timing.operator_timers import EventOperatorTimer, HostOperatorTimer
from dispatch_flops.timing.overhead import Overhead
from dispatch_flops.timing.step_timer import HookMeter, StepTimer
from dispatch_flops.timing.untimed import UntimedPass

EVENT_RESOLUTION_S = 5e-7  # of CUDA
ITERATION_METHOD = "the time of the whole iteration is of all that ran meanwhile"


class HostPass(UntimedPass):
    """A pass that is timed by the host's clock, without the profiler's overhead."""

    method = (
        "counted and timed in one pass, the profiler's own time measured and taken off; "
        + ITERATION_METHOD
    )

    def __init__(self, overhead: Overhead) -> None:
        self._overhead = overhead
        self._operators = HostOperatorTimer(overhead)
        self._modules = ModuleTimer(CPU, now=overhead.now)
        self._steps = StepTimer(overhead)
        self.operator_timer = self._operators
        self.observers = (HookMeter(overhead), self._modules, self._steps)
        self._whole_s = 0.0
        self._begun: tuple[float, float] | None = None
        self._home: dict[str, Any] = {}  # what ``overhead`` is in the thread that is measured

    def start(self, undo: UndoStack) -> None:
        undo.add(self._stop)
        self._home = vars(self._overhead)
        self._begun = self._overhead.now(), self._overhead.in_operators

    def _stop(self) -> None:
        self._whole_s, self._begun = self._so_far_s(), None

    @contextmanager
    def excluded(self) -> Iterator[None]:
        begun = self._overhead.clock()
        try:
            yield
        finally:
            self._overhead.seconds += self._overhead.clock() - begun

    def _so_far_s(self) -> float:
        if self._begun is None:
            return self._whole_s
        begun, in_operators = self._begun
        passed = self._overhead.clock() - self._home["seconds"] - begun
        return float(self._whole_s + max(passed, self._home["in_operators"] - in_operators))

    def module_seconds(self) -> Mapping[str, float] | None:
        return self._modules.seconds()

    def timing(self, profile: Profile) -> StepTiming:
        """Return the times of the phases and of the whole."""
        backward_s = self._operators.backward_s()
        if backward_s is not None:
            at_least = operator_seconds(profile, "backward", "recompute") or 0.0
            backward_s = max(backward_s - self._steps.in_backward_s, at_least)
        calibrated = self._overhead.calibrated
        return StepTiming(
            seconds=PhaseSeconds(
                {
                    "backward": backward_s,
                    "optimizer": self._optimizer_s(operator_seconds(profile, "optimizer")),
                }
            ),
            iteration_s=self._so_far_s(),
            method=self.method,
            resolution_s=10 * calibrated.per_module_s,
            operator_resolution_s=10 * calibrated.per_operator_s,
        )

    def _optimizer_s(self, in_operators: float | None) -> float | None:
        """Return the seconds of steps and of the phase's other operators, as those that clip.

        A step that was given a closure takes as long as its operators.
        """
        steps = self._steps
        if in_operators is None or steps.seconds is None or steps.had_closure:
            return steps.seconds if in_operators is None else in_operators
        return steps.seconds + max(in_operators - steps.in_operators_s, 0.0)


class EventPass(UntimedPass):
    """A pass with events on the device around every operator.

    gap_s: by how much an operator may seem longer than it is; None if not known.
    """

    method = (
        "counted and timed in one pass, by events on the device around every operator; "
        "what the host does between operators is left out"
    )

    def __init__(self, devices: Devices, record_event: Stamp, gap_s: float | None) -> None:
        self._operators = EventOperatorTimer(devices, record_event)
        self.operator_timer = self._operators
        self._gap_s = gap_s

    def read(self) -> None:
        self._operators.read()

    def timing(self, profile: Profile) -> StepTiming:
        """Return times that are sums over operators; backward includes recomputation."""
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
    """Return the seconds of all operators in these phases, also outside the model.

    None where none was timed.
    """
    return sum_known(op.latency_s for op in profile.op_totals() if op.phase in phases)
