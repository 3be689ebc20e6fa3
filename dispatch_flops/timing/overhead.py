"""A clock that stands still while the profiler works: whoever reads time from it sees the program's
alone.

What the profiler cannot see of itself (the way from C++ to Python and back, torch's slower module
call while hooks are there) is taken off per call, as ``calibration`` has measured it. A large
operator leaves caches empty of all that: the way is then as many times slower as the part of it
that is seen, from the mode's first line to the operator's run.
"""

from __future__ import annotations

import threading
import time

from dispatch_flops.timing.devices import Now

_now = time.perf_counter
_SLOWEST = 10.0  # a way more times slower than this was interrupted


class OwnTime(threading.local):
    """Seconds that the profiler itself has taken, of each thread.

    per_op, per_module: what one operator, one module call takes that is not measured each time.
    reach_s: seconds from the mode's first line to the operator's run when ``per_op`` was measured.
    in_operators: seconds that operators ran: no part of a program takes less than those in it.
    clock: of the time that passes.
    """

    def __init__(
        self,
        per_op: float = 0.0,
        per_module: float = 0.0,
        reach_s: float = 0.0,
        clock: Now | None = None,
    ) -> None:
        self.seconds = self.in_operators = 0.0
        self.per_op = per_op
        self.per_module = per_module
        self.reach_s = reach_s
        self.clock = clock or _now
        self._slowness = 1.0  # of the last operator's way

    def now(self) -> float:
        """Seconds on a clock that stands still while the profiler works."""
        return self.clock() - self.seconds

    def operator(self, seen_s: float, reach_s: float | None) -> None:
        """An operator has taken this much of the profiler, and more that is not seen."""
        if reach_s is not None and self.reach_s:
            self._slowness = min(max(reach_s / self.reach_s, 1.0), _SLOWEST)
        self.seconds += seen_s + self.per_op * self._slowness

    def hook(self, seen_s: float) -> None:
        """One of the two hooks of a module call has taken this much, and more that is not seen."""
        self.seconds += seen_s + self.per_module / 2 * self._slowness
