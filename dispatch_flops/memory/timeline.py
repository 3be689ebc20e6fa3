"""Memory of a device over the operators of a run, folded into a bounded number of points."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.profile.memory import Role

LIMIT = 1024  # even, so that points fold in pairs
_born = attrgetter("born")


class Point:
    """The moment of the most memory among the operators of one interval.

    operators: how many had run. born: number of the latest allocation then. over: bytes over what
    was there before. change: bytes by role since the point before.
    """

    __slots__ = ("born", "change", "made_in", "operator", "operators", "over", "workspace")

    def __init__(
        self, operators: int, born: int, over: int, made_in: ModulePhase, operator: Any
    ) -> None:
        self.operators = operators
        self.born = born
        self.over = over
        self.made_in = made_in
        self.operator = operator
        self.workspace = 0
        self.change: Counter[Role] = Counter()


class Timeline:
    """Points of a device in order, one for each of at most ``LIMIT`` equal intervals of operators.

    Where more operators run, intervals are merged in pairs. The higher of two points stays, so that
    each point is the peak of its interval.

    released: blocks released since the last operator: number of the allocation, bytes, role.
        Threads append to it at any time.
    """

    def __init__(self) -> None:
        self.released: list[tuple[int, int, Role]] = []
        self._points: list[Point] = []
        self._pending: Counter[Role] = Counter()  # changes since the last point
        self._operators = 0
        self._interval = 1
        self._end = 0  # the last operator of the interval of the last point
        self._lock = threading.Lock()

    def note(
        self, over: int, workspace: int, born: int, made_in: ModulePhase, operator: Any
    ) -> None:
        """Note the memory while an operator ran, which ``workspace`` is a part of."""
        with self._lock:
            self._apply_released()
            self._operators += 1
            is_new = self._operators > self._end
            if is_new and len(self._points) == LIMIT:
                self._fold()
                is_new = self._operators > self._end
            if not is_new and over <= self._points[-1].over:
                return
            point = Point(self._operators, born, over, made_in, operator)
            point.workspace = workspace
            point.change, self._pending = self._pending, Counter()
            if is_new:
                self._end += self._interval
            else:
                point.change.update(self._points.pop().change)
            self._points.append(point)

    def _apply_released(self) -> None:
        """Add each released block from the first point that it was allocated at to the last."""
        while self.released:
            born, size, role = self.released.pop()
            first = bisect_left(self._points, born, key=_born)
            if first < len(self._points):
                self._points[first].change[role] += size
                self._pending[role] -= size

    def _fold(self) -> None:
        """Merge the intervals in pairs."""
        kept: list[Point] = []
        dropped: Counter[Role] = Counter()
        for first, second in zip(self._points[::2], self._points[1::2], strict=True):
            first.change.update(dropped)
            if second.over > first.over:
                second.change.update(first.change)
                dropped = Counter()
                kept.append(second)
            else:
                dropped = second.change
                kept.append(first)
        self._pending.update(dropped)
        self._points = kept
        self._interval *= 2

    def frozen(
        self, alive: Iterable[tuple[int, int, Role]]
    ) -> Iterator[tuple[Point, dict[Role, int]]]:
        """Yield the points in order, each with its bytes by role.

        alive: the blocks that are not released: number of the allocation, bytes, role.
        """
        with self._lock:
            self._apply_released()
            points = list(self._points)
            changes = [point.change.copy() for point in points]
        for born, size, role in alive:
            first = bisect_left(points, born, key=_born)
            if first < len(points):
                changes[first][role] += size
        now: Counter[Role] = Counter()
        for point, change in zip(points, changes, strict=True):
            now.update(change)
            sizes = {role: size for role, size in now.items() if size}
            if point.workspace:
                sizes["workspace"] = point.workspace
            yield point, sizes
