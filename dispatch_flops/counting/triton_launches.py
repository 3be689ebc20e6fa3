"""Triton kernels that a program launches itself, so that no operator shows their work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dispatch_flops.counting.undo import UndoStack


class TritonLaunches:
    """Follows the launches of Triton kernels while counting is on.

    is_counting: tells whether operators of this thread are being counted. They are not while one of
        them runs: what a custom operator launches is part of it.
    kernels: names of those that were launched outside of operators, in order of their first launch.
    """

    def __init__(self, is_counting: Callable[[], bool]) -> None:
        self._is_counting = is_counting
        self._names: dict[str, None] = {}

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(self._names)

    def start(self, undo: UndoStack) -> None:
        """Follow launches until ``undo`` runs; a program that has not imported Triton has none."""
        knobs = getattr(sys.modules.get("triton"), "knobs", None)
        chain = getattr(getattr(knobs, "runtime", None), "launch_enter_hook", None)
        if chain is not None and hasattr(chain, "add"):
            undo.add(lambda: chain.remove(self._note))
            chain.add(self._note)

    def _note(self, metadata: Any) -> None:
        """Note a launch; called by Triton's launcher, which takes no exception."""
        if self._is_counting():
            data = getattr(metadata, "data", None)  # ``get()`` would have user code compute more
            self._names[str(data["name"]) if data and "name" in data else "unnamed"] = None
