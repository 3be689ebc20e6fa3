"""Calibrate the overhead that timestamps cannot see, once per process.

It is measured on operators and modules that do next to nothing, with and without the profiler by
turns: whatever disturbs the machine disturbs both.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dispatch_flops.counting.dispatch_mode import CountingMode
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.timing.devices import CPU, Devices, seconds_between
from dispatch_flops.timing.idle_modules import IdleModules, make_call, run_in_fresh_thread
from dispatch_flops.timing.latencies import seconds_of
from dispatch_flops.timing.module_timer import HookOverhead, ModuleTimer
from dispatch_flops.timing.overhead import CallOverhead, Overhead
from dispatch_flops.timing.passes import EVENT_RESOLUTION_S, HostPass

TURNS = 25


# -- events on an accelerator -----------------------------------------------------------------


@functools.cache
def event_gap_s(devices: Devices) -> float:
    """Return the seconds between the events around an operator that does next to nothing."""
    return run_in_fresh_thread(lambda: _measure_event_gap(devices))


def _measure_event_gap(devices: Devices) -> float:
    record_event = devices.events()
    assert record_event is not None
    number = torch.zeros(1, device=devices.accelerators[0])
    gaps = []
    with torch.no_grad():
        for _ in range(TURNS):
            devices.synchronize()
            start = record_event()
            number.add_(1)
            end = record_event()
            devices.synchronize()
            gaps.append(seconds_between(start, end))
    return statistics.median(gaps)


# -- hooks without a dispatch mode ------------------------------------------------------------


@functools.cache
def hook_overhead() -> HookOverhead:
    """Return what a module call with the hooks of a ``ModulePass`` takes besides its stamps."""
    return run_in_fresh_thread(_measure_hooks)


def _measure_hooks() -> HookOverhead:
    idle = IdleModules(100, lambda x: x)
    timer = ModuleTimer(CPU)
    tracker = Tracker(ModuleNames(idle.modules), [timer])
    tracker.join_thread(is_entered=True)
    bare, hooked = make_call(), make_call([tracker.enter_module], [tracker.leave_module])
    per_call: list[float] = []
    inside: list[float] = []
    for _ in range(TURNS):
        idle.set_call(bare)
        each = seconds_of(idle.run, time.perf_counter) / len(idle.modules)
        idle.set_call(hooked)
        whole = seconds_of(idle.run, time.perf_counter)
        calls = next(timer.intervals())[-len(idle.modules) :]
        seen = sum(call.start - call.hook_start + call.hook_end - call.end for call in calls)
        per_call.append((whole - seen) / len(calls) - each)
        inside.append(statistics.median(call.end - call.start for call in calls) - each)
    most = max(statistics.median(per_call), 0.0)
    return HookOverhead(per_call=most, inside=min(max(statistics.median(inside), 0.0), most))


def resolution_s(devices: Devices) -> float:
    """Return the latency below which a module call may be off by more than 10 %.

    It is ten times the overhead that is not seen, or the resolution of events.
    """
    return 10 * (EVENT_RESOLUTION_S if devices.events() else hook_overhead().per_call)


# -- hooks and a dispatch mode ----------------------------------------------------------------


@functools.cache
def call_overhead() -> CallOverhead:
    """Return what an operator and a module call take of a ``HostPass`` besides its stamps."""
    return run_in_fresh_thread(_measure_calls)


def _measure_calls() -> CallOverhead:
    one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    # Two operators: the weight is transposed first.
    idle = IdleModules(100, lambda x: nn.functional.linear(x, one))
    reaches: list[float] = []

    class Probe(Overhead):
        operators = 0

        def operator(self, seen_s: float, reach_s: float | None) -> None:
            self.operators += 1
            reaches.extend(() if reach_s is None else (reach_s,))
            super().operator(seen_s, reach_s)

    def bare() -> None:
        for module in idle.modules:
            module.forward(one)

    with torch.no_grad():
        probe = Probe()
        per_operator_s = _unseen(bare, probe, idle) * TURNS / max(probe.operators, 1)
        reach_s = statistics.median(reaches) if reaches else 0.0
        overhead = Overhead(CallOverhead(per_operator_s=per_operator_s, reach_s=reach_s))
        per_module_s = _unseen(idle.run, overhead, idle) / len(idle.modules)
    return CallOverhead(per_operator_s, per_module_s, reach_s)


def _unseen(run: Callable[[], Any], overhead: Overhead, idle: IdleModules) -> float:
    """Return how many seconds longer ``run`` takes in a pass, on the clock without overhead."""
    host = HostPass(overhead)
    tracker = Tracker(ModuleNames(idle.modules), host.observers)
    mode = CountingMode(tracker, Conventions(), {}, lambda: None, host.operator_timer)
    tracker.join_thread(is_entered=True)
    bare = make_call()
    hooked = make_call([tracker.enter_module], [tracker.leave_module])
    more = []
    for _ in range(TURNS):
        idle.set_call(bare)
        plain = seconds_of(run, time.perf_counter)
        idle.set_call(hooked)
        with mode:
            more.append(seconds_of(run, overhead.now) - plain)
    return max(statistics.median(more), 0.0)
