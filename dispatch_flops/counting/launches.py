"""Work that a program launches itself, without operators: Triton kernels and CUDA graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dispatch_flops import _torch
from dispatch_flops.counting.undo import UndoStack


class Launches:
    """Follows launches outside of operators while counting is on.

    is_counting: tells whether operators of this thread are being counted. They are not while one of
        them runs: what a custom operator launches is part of it.
    replays: how many CUDA graphs were replayed. Their operators are counted when they are captured.
    """

    def __init__(self, is_counting: Callable[[], bool]) -> None:
        self._is_counting = is_counting
        self._names: dict[str, None] = {}
        self.replays = 0

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of Triton's kernels, in order of their first launch."""
        return tuple(self._names)

    def start(self, undo: UndoStack) -> None:
        """Follow launches until ``undo`` runs; a program that has not imported Triton has none."""
        undo.add(lambda: _torch.graph_replays.unfollow(self._note_replay))
        _torch.graph_replays.follow(self._note_replay)
        knobs = getattr(sys.modules.get("triton"), "knobs", None)
        chain = getattr(getattr(knobs, "runtime", None), "launch_enter_hook", None)
        if chain is not None and hasattr(chain, "add"):
            undo.add(lambda: chain.remove(self._note_kernel))
            chain.add(self._note_kernel)

    def _note_replay(self, graph: Any) -> None:
        self.replays += self._is_counting()

    def _note_kernel(self, metadata: Any) -> None:
        """Note a launch; called by Triton's launcher, which takes no exception."""
        if self._is_counting():
            data = getattr(metadata, "data", None)  # ``get()`` would have user code compute more
            self._names[str(data["name"]) if data and "name" in data else "unnamed"] = None
