"""Protocols of observers of a run; ``timing`` implements them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dispatch_flops.counting.thread_state import ModulePhase, OpenCall, ThreadState
from dispatch_flops.operators.costing import CallCost


class ModuleObserver(Protocol):
    """Is told of each module call and optimizer step that the tracker follows."""

    def entering(self) -> Any:
        """Called first in a pre-hook; returns a stamp for ``enter``."""

    def enter(self, thread: ThreadState, stamp: Any) -> None:
        """Called last in a pre-hook: the call that starts is ``thread.stack[-1]``."""

    def leaving(self) -> Any:
        """Called first in a post-hook; returns a stamp for ``leave``."""

    def leave(self, thread: ThreadState, call: OpenCall, stamp: Any) -> None:
        """Called last in a post-hook: ``call`` has ended, and every call within it."""


def together(observers: Sequence[ModuleObserver]) -> ModuleObserver | None:
    """Return an observer that tells each of these, in order; None if there are none."""
    if len(observers) > 1:
        return _Observers(observers)
    return observers[0] if observers else None


class _Observers:
    """Several observers as one; a stamp is the list of theirs."""

    def __init__(self, observers: Sequence[ModuleObserver]) -> None:
        self._observers = tuple(observers)

    def entering(self) -> list[Any]:
        return [observer.entering() for observer in self._observers]

    def enter(self, thread: ThreadState, stamps: list[Any]) -> None:
        for observer, stamp in zip(self._observers, stamps, strict=True):
            observer.enter(thread, stamp)

    def leaving(self) -> list[Any]:
        return [observer.leaving() for observer in self._observers]

    def leave(self, thread: ThreadState, call: OpenCall, stamps: list[Any]) -> None:
        for observer, stamp in zip(self._observers, stamps, strict=True):
            observer.leave(thread, call, stamp)


class OperatorTimer(Protocol):
    """Measures the operators that a dispatch mode runs; the mode holds one, or None."""

    def begin(self) -> bool:
        """Start a dispatch; return False if ``end`` is not to be called for it."""

    def end(self) -> None:
        """End the dispatch that ``begin`` started."""

    def timed(self, call: Callable[..., Any], *, is_free: bool) -> Callable[..., Any]:
        """Return ``call``, measured. ``is_free``: it gives the device nothing to do."""

    def disregard_reach(self) -> None:
        """Tell that this dispatch does more than look up a known operator."""

    def record(self, module_phase: ModulePhase, cost: CallCost) -> None:
        """Record the measured time of the operator that just ran."""
