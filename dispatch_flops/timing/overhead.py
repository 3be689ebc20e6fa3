"""Clock that excludes the profiler's own overhead.

Timestamps cannot see all of it: the way from C++ to Python and back, and torch's slower module
call while hooks are installed. That part is subtracted per call, as ``calibration`` measured it. A
large operator empties the caches, which makes the overhead of the next one larger. The unseen part
is then scaled by the part that is seen: the way from the mode's first line to the operator.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from dispatch_flops.timing.devices import Now

_now = time.perf_counter
_SLOWEST = 10.0  # where the way took more times as long, something else ran meanwhile


class CallOverhead(NamedTuple):
    """Calibrated seconds of overhead that timestamps cannot see.

    per_operator_s, per_module_s: of one operator, of one module call.
    reach_s: from the mode's first line to the operator, when ``per_operator_s`` was measured.
    """

    per_operator_s: float = 0.0
    per_module_s: float = 0.0
    reach_s: float = 0.0


class Overhead(threading.local):
    """Seconds that the profiler itself has taken in each thread.

    seconds: the sum so far. in_operators: seconds that operators ran.
    clock: of the time that passes, the profiler's included.
    """

    def __init__(self, calibrated: CallOverhead | None = None, clock: Now | None = None) -> None:
        self.seconds = self.in_operators = 0.0
        self.calibrated = calibrated or CallOverhead()
        self.clock = clock or _now
        # How many times as long as calibrated the way to the last operator took: an estimate of
        # how cold the caches are, for the next hook has no such reading of its own.
        self._slowness = 1.0

    def now(self) -> float:
        """Return seconds on the clock that excludes the overhead."""
        return self.clock() - self.seconds

    def operator(self, seen_s: float, reach_s: float | None) -> None:
        """Add the overhead of an operator, of which ``seen_s`` was measured."""
        calibrated = self.calibrated
        if reach_s is not None and calibrated.reach_s:
            self._slowness = min(max(reach_s / calibrated.reach_s, 1.0), _SLOWEST)
        self.seconds += seen_s + calibrated.per_operator_s * self._slowness

    def hook(self) -> float:
        """Add the unseen overhead of one of the two hooks of a module call; return the time."""
        self.seconds += self.calibrated.per_module_s / 2 * self._slowness
        return self.clock()

    def hook_since(self, begun: float) -> None:
        """Add the overhead of a hook, which is now over, since ``hook`` returned ``begun``."""
        self.seconds += self.clock() - begun
