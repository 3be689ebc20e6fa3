"""Measure how long the calls of modules take.

``ModuleTimer`` observes the tracker of modules. It only takes time stamps (on an accelerator, it
records events); seconds are computed afterwards, with a single synchronization. What the hooks
themselves took is subtracted from every module that was running meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dispatch_flops.counting.thread_state import NO_TASK, OpenCall, ThreadState
from dispatch_flops.timing.devices import Devices, Now, seconds_between


@dataclass(frozen=True, slots=True)
class Interval:
    """One call of a module: the seconds at which each of its two hooks started and ended.

    number: how many calls of its thread started before it. It tells which call is within which;
    stamps may not, on a clock that excludes the profiler's overhead.
    device_s: how long the accelerator was busy with the call, where events tell.
    """

    fqn: str
    number: int
    hook_start: float
    start: float
    end: float
    hook_end: float
    device_s: float | None = None


class _Started(NamedTuple):
    """A call that has not ended; ``stamp``: a reading of the clock, or an event."""

    call: OpenCall
    number: int
    begun: float
    stamp: Any


_Call = tuple[str, int, float, Any, Any, float]  # an Interval's fields; where events tell, events


class _Thread(threading.local):
    """The calls that one thread has started, outermost first, and those that it has completed."""

    def __init__(self) -> None:
        self.started: list[_Started] = []
        self.number = 0
        self.completed: list[_Call] | None = None


class ModuleTimer:
    """Observer that times forward calls of modules; ``seconds()`` tells how long they took.

    devices: where the modules compute. now: a clock other than theirs.
    hook_overhead: seconds that hooks take in addition to what their stamps show.
    """

    def __init__(
        self,
        devices: Devices,
        *,
        now: Now | None = None,
        hook_overhead: Callable[[], HookOverhead] | None = None,
    ) -> None:
        self._devices = devices
        self._event = None if now is not None else devices.events()
        self._now = now or (time.perf_counter if self._event else devices.clock())
        self._stamp = self._event or self._now
        self._hook_overhead = hook_overhead
        self._local = _Thread()
        self._completed: list[list[_Call]] = []  # of each thread

    def entering(self) -> float:
        """Return when the pre-hook started."""
        return self._now()

    def enter(self, thread: ThreadState, stamp: float) -> None:
        """Start the time of a module's forward; one that a backward pass runs is not timed."""
        call = thread.stack[-1]
        if call.named is None or call.task != NO_TASK:
            return
        local = self._local
        local.number += 1
        local.started.append(_Started(call, local.number, stamp, self._stamp()))

    def leaving(self) -> Any:
        """Return when forward ended, or the event that tells it."""
        return self._stamp()

    def leave(self, thread: ThreadState, call: OpenCall, stamp: Any) -> None:
        """End the time of a module's forward."""
        local = self._local
        if not any(started.call is call for started in local.started):
            return
        if local.completed is None:
            local.completed = []
            self._completed.append(local.completed)
        while (started := local.started.pop()).call is not call:
            pass
        if call.named is not None and not call.named.is_wrapper:
            local.completed.append(
                (call.named.fqn, started.number, started.begun, started.stamp, stamp, self._now())
            )

    def seconds(self) -> dict[str, float]:
        """Return ``{fqn: seconds}`` in forward, over all calls."""
        if self._event is not None:
            self._devices.synchronize()
        overhead = self._hook_overhead() if self._hook_overhead is not None else None
        seconds: Counter[str] = Counter()
        for intervals in self.intervals():
            seconds.update(net_seconds(intervals, overhead))
        return dict(seconds)

    def intervals(self) -> Iterator[list[Interval]]:
        """Yield the calls of each thread, in the order in which they ended."""
        for calls in list(self._completed):
            if self._event is None:
                yield [Interval(*call) for call in list(calls)]
            else:
                yield [
                    Interval(fqn, number, begun, begun, done, done, seconds_between(start, end))
                    for fqn, number, begun, start, end, done in list(calls)
                ]


@dataclass(frozen=True, slots=True)
class HookOverhead:
    """Seconds that a module call with hooks takes in addition to what its stamps show.

    inside: the part of ``per_call`` that lies between the stamps of the call's start and end.
    """

    per_call: float = 0.0
    inside: float = 0.0


def net_seconds(
    calls: Iterable[Interval], overhead: HookOverhead | None = None
) -> dict[str, float]:
    """Return seconds per module without its hooks.

    A recursive call counts once, and no module takes less than the modules that it calls. Calls
    come in the order in which they ended: those within a call directly precede it.
    """
    overhead = overhead or HookOverhead()
    seconds: dict[str, float] = {}
    # Number, hooks and net seconds of calls whose caller has not ended.
    done: list[tuple[int, float, float]] = []
    nets: dict[str, list[tuple[int, float]]] = {}  # number and net seconds of a module's calls
    for call in calls:
        hooks = within = 0.0
        while done and done[-1][0] > call.number:
            _, inner_hooks, inner_net = done.pop()
            hooks += inner_hooks
            within += inner_net
        net = call.device_s
        if net is None:
            net = max(call.end - call.start - hooks - overhead.inside, within, 0.0)
        own_calls = nets.setdefault(call.fqn, [])
        while own_calls and own_calls[-1][0] > call.number:  # it called itself
            seconds[call.fqn] -= own_calls.pop()[1]
        seconds[call.fqn] = seconds.get(call.fqn, 0.0) + net
        own_calls.append((call.number, net))
        own_hooks = (call.start - call.hook_start) + (call.hook_end - call.end) + overhead.per_call
        done.append((call.number, hooks + own_hooks, net))
    return seconds
