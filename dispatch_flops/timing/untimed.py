"""A counting pass that measures nothing of time; those that do are in ``passes``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from dispatch_flops.counting.observers import ModuleObserver, OperatorTimer
from dispatch_flops.counting.undo import UndoStack
from dispatch_flops.profile import Profile, StepTiming


class UntimedPass:
    """A pass that takes no times.

    operator_timer: for the dispatch mode. observers: for the tracker of modules.
    """

    operator_timer: OperatorTimer | None = None
    observers: Sequence[ModuleObserver] = ()

    def start(self, undo: UndoStack) -> None:
        """Measure the whole until ``undo`` runs."""

    def excluded(self) -> AbstractContextManager[Any]:
        """Return a block whose time is not the program's."""
        return nullcontext()

    def read(self) -> None:
        """Record the times that the device has not told yet."""

    def module_seconds(self) -> Mapping[str, float] | None:
        """Return ``{fqn: seconds}`` in forward; None: modules take as long as their operators."""
        return None

    def timing(self, profile: Profile) -> StepTiming:
        """Return the times of the whole and of each phase."""
        return StepTiming()
