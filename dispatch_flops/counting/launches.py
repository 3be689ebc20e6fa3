"""Work that a program launches itself, without operators.

Those are Triton kernels, CUDA graphs and AOTInductor's packages.
"""

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
    package_runs: how many packages of AOTInductor ran.
    """

    def __init__(self, is_counting: Callable[[], bool]) -> None:
        self._is_counting = is_counting
        self._names: dict[str, None] = {}
        self.replays = self.package_runs = 0

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of Triton's kernels, in order of their first launch."""
        return tuple(self._names)

    def start(self, undo: UndoStack) -> None:
        """Follow launches until ``undo`` runs; those of libraries that are imported by now."""
        self._follow(_torch.graph_replays, self._note_replay, undo)
        if (package_runs := _torch.package_runs()) is not None:
            self._follow(package_runs, self._note_package, undo)
        knobs = getattr(sys.modules.get("triton"), "knobs", None)
        chain = getattr(getattr(knobs, "runtime", None), "launch_enter_hook", None)
        if chain is not None and hasattr(chain, "add"):
            undo.add(lambda: chain.remove(self._note_kernel))
            chain.add(self._note_kernel)

    @staticmethod
    def _follow(
        method: _torch.FollowedMethod, follower: Callable[[Any], None], undo: UndoStack
    ) -> None:
        undo.add(lambda: method.unfollow(follower))
        method.follow(follower)

    def _note_replay(self, graph: Any) -> None:
        self.replays += self._is_counting()

    def _note_package(self, model: Any) -> None:
        self.package_runs += self._is_counting()

    def _note_kernel(self, metadata: Any) -> None:
        """Note a launch; called by Triton's launcher, which takes no exception."""
        if self._is_counting():
            data = getattr(metadata, "data", None)  # ``get()`` would have user code compute more
            self._names[str(data["name"]) if data and "name" in data else "unnamed"] = None
