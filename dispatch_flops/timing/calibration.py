"""What the profiler takes of which it sees nothing, measured once per process on operators and
modules that do next to nothing.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.timing.devices import Devices, Now, seconds_between
from dispatch_flops.timing.idle_modules import IdleModules, calling, run_in_fresh_thread
from dispatch_flops.timing.module_timer import TURNS
from dispatch_flops.timing.overhead import OwnTime
from dispatch_flops.timing.passes import HostPass


@functools.cache
def gap_s(devices: Devices) -> float:
    """Seconds between the events around an operator that does next to nothing, on a device that
    has nothing else to do.
    """
    return run_in_fresh_thread(lambda: _measure_gap(devices))


def _measure_gap(devices: Devices) -> float:
    record = devices.events()
    assert record is not None
    number = torch.zeros(1, device=devices.accelerators[0])
    gaps = []
    with torch.no_grad():
        for _ in range(TURNS):
            devices.synchronize()
            start = record()
            number.add_(1)
            end = record()
            devices.synchronize()
            gaps.append(seconds_between(start, end))
    return statistics.median(gaps)


@functools.cache
def unseen_of_calls() -> tuple[float, float, float]:
    """``per_op``, ``per_module`` and ``reach_s`` of ``OwnTime`` on this machine."""
    return run_in_fresh_thread(_measure_own_time)


def _measure_own_time() -> tuple[float, float, float]:
    one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    # Two operators: the weight is transposed first.
    idle = IdleModules(100, lambda x: nn.functional.linear(x, one))
    reaches: list[float] = []

    class Noting(OwnTime):
        operators = 0

        def operator(self, seen_s: float, reach_s: float | None) -> None:
            self.operators += 1
            reaches.extend(() if reach_s is None else (reach_s,))
            super().operator(seen_s, reach_s)

    def bare() -> None:
        for module in idle.modules:
            module.forward(one)

    with torch.no_grad():
        probe = Noting()
        per_op = _unseen(bare, probe, idle) * TURNS / max(probe.operators, 1)
        reach_s = statistics.median(reaches) if reaches else 0.0
        own = OwnTime(per_op=per_op, reach_s=reach_s)
        per_module = _unseen(idle.run, own, idle) / len(idle.modules)
    return per_op, per_module, reach_s


def _unseen(run: Callable[[], Any], own: OwnTime, idle: IdleModules) -> float:
    """Seconds that ``run`` takes more under the profiler, by the profiler's own clock.

    With and without by turns: whatever disturbs the machine disturbs both.
    """
    both = HostPass(
        ModuleNames(idle.modules),
        own,
        {"conventions": Conventions(), "own_rules": {}, "on_full": int},
    )
    both.tracker.join_thread(entered=True)
    bare = calling()
    hooked = calling(
        [both.tracker.enter_module, both.clock.before],
        [both.tracker.leave_module, both.clock.after],
    )
    more = []
    for _ in range(TURNS):
        idle.call_by(bare)
        plain = _seconds(run, time.perf_counter)
        idle.call_by(hooked)
        with both.mode:
            more.append(_seconds(run, own.now) - plain)
    return max(statistics.median(more), 0.0)


def _seconds(run: Callable[[], Any], now: Now) -> float:
    begun = now()
    run()
    return now() - begun
