"""Undo steps completely, also when a signal's handler raises while they run."""

from __future__ import annotations

import sys
from collections.abc import Callable


class UndoStack:
    """Steps to undo, each registered before it is done; a ``with`` block undoes them at its end.

    What undoes a step must do nothing where the step was not done, and may run twice: an interrupt,
    a KeyboardInterrupt or whatever else a signal's handler raises, can arrive at any moment, also
    between a step and a note that it was done.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def __enter__(self) -> UndoStack:
        return self

    def __exit__(self, *error: object) -> None:
        self.run()

    def __del__(self) -> None:
        # Where an interrupt came before the first line of ``__exit__`` or ``run``.
        if self._steps and not sys.is_finalizing():
            self.run()

    def add(self, undo: Callable[[], object]) -> None:
        """Register what undoes the step that comes next."""
        self._steps.append(undo)

    def run(self) -> None:
        """Undo all steps, the last first; raise the first error, but an interrupt before others."""
        errors: list[BaseException] = []
        try:
            self._run(errors)
        except BaseException as interrupt:  # between two steps
            errors.insert(0, interrupt)
            self._run(errors)
        interrupts = [error for error in errors if not isinstance(error, Exception)]
        for error in (*interrupts, *errors):
            raise error

    def _run(self, errors: list[BaseException]) -> None:
        """Undo all steps; one that raises twice, other than by KeyboardInterrupt, is given up."""
        raised = None
        while self._steps:
            step = self._steps[-1]
            try:
                step()
            except BaseException as error:
                errors.append(error)
                if isinstance(error, KeyboardInterrupt) or step is not raised:
                    raised = step  # it may be half undone
                    continue
            self._steps.pop()
