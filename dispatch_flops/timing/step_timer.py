"""Measure optimizer steps, and the overhead of the hooks that follow modules and steps."""

from __future__ import annotations

import threading

from dispatch_flops.counting.thread_state import NO_TASK, OpenCall, ThreadState
from dispatch_flops.timing.overhead import Overhead


class HookMeter:
    """Observer that adds the time of the tracker's hooks to the overhead.

    It is the first of the observers: those after it read a clock without this hook's overhead.
    """

    def __init__(self, overhead: Overhead) -> None:
        self._overhead = overhead

    def entering(self) -> float:
        """Return when the pre-hook started."""
        return self._overhead.hook()

    def enter(self, thread: ThreadState, stamp: float) -> None:
        """Add the pre-hook's time."""
        self._overhead.hook_since(stamp)

    def leaving(self) -> float:
        """Return when the post-hook started."""
        return self._overhead.hook()

    def leave(self, thread: ThreadState, call: OpenCall, stamp: float) -> None:
        """Add the post-hook's time."""
        self._overhead.hook_since(stamp)


class _Begun(threading.local):
    """When the outermost step of a thread started: ``now()`` and ``in_operators`` at that time."""

    now = 0.0
    in_operators = 0.0


class StepTimer:
    """Observer that times optimizer steps.

    seconds: in steps; None where there was none. in_operators_s: of these, in operators.
    in_backward_s: of these, in steps that a backward pass ran, as a hook on a gradient may.
    had_closure: a step ran forward and backward itself, so that ``seconds`` are not the step's
    alone.
    """

    def __init__(self, overhead: Overhead) -> None:
        self.seconds: float | None = None
        self.in_operators_s = self.in_backward_s = 0.0
        self.had_closure = False
        self._overhead = overhead
        self._begun = _Begun()

    def entering(self) -> None:
        """No stamp is needed."""

    def enter(self, thread: ThreadState, stamp: None) -> None:
        """Start the time of a step, unless it is within another optimizer's step."""
        call = thread.stack[-1]
        self.had_closure = self.had_closure or call.has_closure
        if call.step and not _is_in_step(thread.stack[:-1]):
            self._begun.now = self._overhead.now()
            self._begun.in_operators = self._overhead.in_operators

    def leaving(self) -> None:
        """No stamp is needed."""

    def leave(self, thread: ThreadState, call: OpenCall, stamp: None) -> None:
        """End the time of a step; it takes no less than its operators."""
        if call.step and not _is_in_step(thread.stack):
            overhead, begun = self._overhead, self._begun
            in_operators = overhead.in_operators - begun.in_operators
            taken = max(overhead.now() - begun.now, in_operators)
            self.seconds = (self.seconds or 0.0) + taken
            self.in_operators_s += in_operators
            self.in_backward_s += taken if call.task != NO_TASK else 0.0


def _is_in_step(calls: list[OpenCall]) -> bool:
    return any(call.step for call in calls)
