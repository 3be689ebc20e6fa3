"""Latency: how long modules take.

``LatencyPass``, alone or beside the counting mode, has the lightest hooks there are. They only
take time stamps (on an accelerator: record events); sums are formed afterwards, one
synchronisation in all, and what the hooks themselves took is taken off every module that was
running meanwhile.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from dispatch_flops import _torch
from dispatch_flops.counting.module_names import ModuleName, ModuleNames
from dispatch_flops.counting.python_frames import first_over
from dispatch_flops.timing.devices import CPU, Devices, Now, seconds_between
from dispatch_flops.timing.idle_modules import IdleModules, calling, run_in_fresh_thread
from dispatch_flops.timing.latencies import time_call

EVENT_RESOLUTION_S = 5e-7
TURNS = 25  # of measuring what the profiler takes itself

_graph_task = _torch.graph_task_id
_is_tracing = torch.compiler.is_dynamo_compiling


@dataclass(frozen=True, slots=True)
class Interval:
    """One call of a module: seconds at which the hook before it began and ended, and after it.

    number: how many calls of its thread began before it. It tells what lies in what; stamps do
    not, of a clock from which the profiler's own time is taken off in advance.
    device_s: how long the accelerator was at it, where events tell.
    """

    fqn: str
    number: int
    hook_start: float
    start: float
    end: float
    hook_end: float
    device_s: float | None = None


class _Open(NamedTuple):
    """A call of a module that is not over: when the hook before it began, and when it did."""

    module: nn.Module
    named: ModuleName
    number: int
    begun: float
    start: Any


_Call = tuple[str, int, float, Any, Any, float]  # an Interval, or where events tell, its events


class _Thread(threading.local):
    """What one thread is at, outermost first, and what it has done."""

    def __init__(self) -> None:
        self.open: list[_Open] = []
        self.begun = 0
        self.calls: list[_Call] | None = None


class LatencyPass:
    """Records when modules start and end while it is entered; ``seconds()`` says how long.

    is_followed: whether the modules of the calling thread are; by default those of the thread
        that entered. What a backward pass runs again is no forward.
    """

    def __init__(
        self,
        names: ModuleNames,
        *,
        devices: Devices = CPU,
        now: Now | None = None,
        is_followed: Callable[[], bool] | None = None,
    ) -> None:
        self._names = names
        self._devices = devices
        self._event = devices.events()
        self._now = now or (time.perf_counter if self._event else devices.clock())
        self._stamp = self._event or self._now
        self._is_followed = is_followed or self._is_home
        self._home = 0
        self._local = _Thread()
        self._calls: list[list[_Call]] = []  # of each thread
        self._hooks = ExitStack()

    def __enter__(self) -> LatencyPass:
        self._home = threading.get_ident()
        self._drop_calls_over()
        for handle in (
            register_module_forward_pre_hook(self.before),
            register_module_forward_hook(self.after, always_call=True),
        ):
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def seconds(self) -> dict[str, float]:
        """``{fqn: seconds}`` in forward, over all calls."""
        if self._event is not None:
            self._devices.synchronize()
        unseen = _unseen() if self._now is time.perf_counter and self._event is None else None
        seconds: Counter[str] = Counter()
        for intervals in self.intervals():
            seconds.update(net_seconds(intervals, unseen))
        return dict(seconds)

    def intervals(self) -> Iterator[list[Interval]]:
        """The calls of each thread, in the order in which they ended."""
        for calls in list(self._calls):
            if self._event is None:
                yield [Interval(*call) for call in list(calls)]
            else:
                yield [
                    Interval(fqn, number, begun, begun, done, done, seconds_between(start, end))
                    for fqn, number, begun, start, end, done in list(calls)
                ]

    def _is_home(self) -> bool:
        return threading.get_ident() == self._home

    def _drop_calls_over(self, entering: nn.Module | None = None) -> None:
        """Calls that ended while nobody followed them, or in an exception that skips hooks."""
        calls = self._local.open
        over = first_over((call.module for call in calls), entering) if calls else None
        if over is not None:
            del calls[over:]

    def before(self, module: nn.Module, args: Any) -> None:
        if _is_tracing():  # torch.cond traces modules, and the hooks with them
            return
        begun = self._now()
        if _graph_task() != -1 or not self._is_followed():
            return
        local = self._local
        above = local.open
        named = self._names.known(module)
        if named is None:
            if above and isinstance(module, torch.fx.GraphModule):
                return  # a branch of torch.cond, not a module of the model
            named = self._names.find(module, [call.named for call in above])
        if above and named.parent is None:
            self._drop_calls_over(module)
        local.begun += 1
        above.append(_Open(module, named, local.begun, begun, self._stamp()))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        local = self._local
        if _is_tracing() or not any(call.module is module for call in local.open):
            return
        end = self._stamp()
        if local.calls is None:
            local.calls = []
            self._calls.append(local.calls)
        while (call := local.open.pop()).module is not module:
            pass
        if not call.named.wrapper:
            local.calls.append(
                (call.named.fqn, call.number, call.begun, call.start, end, self._now())
            )


@dataclass(frozen=True, slots=True)
class Unseen:
    """Seconds that a module call takes more with hooks than their stamps show.

    inside: of these, what falls between its own start and end stamps.
    """

    per_call: float = 0.0
    inside: float = 0.0


def net_seconds(calls: Iterable[Interval], unseen: Unseen | None = None) -> dict[str, float]:
    """Seconds per module: hooks taken off, recursion counted once, no parent below its children.

    Calls come in the order in which they ended: a call's inner calls lie just before it.
    """
    unseen = unseen or Unseen()
    seconds: dict[str, float] = {}
    done: list[tuple[int, float, float]] = []  # number, hooks and net of calls yet without parent
    nets: dict[str, list[tuple[int, float]]] = {}  # number and net seconds of a module's calls
    for call in calls:
        hooks = within = 0.0
        while done and done[-1][0] > call.number:
            _, inner_hooks, inner_net = done.pop()
            hooks += inner_hooks
            within += inner_net
        net = call.device_s
        if net is None:
            net = max(call.end - call.start - hooks - unseen.inside, within, 0.0)
        own_calls = nets.setdefault(call.fqn, [])
        while own_calls and own_calls[-1][0] > call.number:  # it called itself: counted once
            seconds[call.fqn] -= own_calls.pop()[1]
        seconds[call.fqn] = seconds.get(call.fqn, 0.0) + net
        own_calls.append((call.number, net))
        own_hooks = (call.start - call.hook_start) + (call.hook_end - call.end) + unseen.per_call
        done.append((call.number, hooks + own_hooks, net))
    return seconds


@functools.cache
def _unseen() -> Unseen:
    """Measured on modules that do nothing, once per process."""
    return run_in_fresh_thread(_measure_unseen)


def _measure_unseen() -> Unseen:
    idle = IdleModules(100, lambda x: x)
    latency = LatencyPass(ModuleNames(idle.modules), is_followed=lambda: True)
    bare, hooked = calling(), calling([latency.before], [latency.after])
    per_call: list[float] = []
    inside: list[float] = []
    for _ in range(TURNS):  # by turns: whatever disturbs the machine disturbs both
        idle.call_by(bare)
        plain, _spread = time_call(idle.run, repeats=1)
        each = plain / len(idle.modules)
        idle.call_by(hooked)
        whole, _spread = time_call(idle.run, repeats=1)
        calls = next(latency.intervals())[-len(idle.modules) :]
        seen = sum(call.start - call.hook_start + call.hook_end - call.end for call in calls)
        per_call.append((whole - seen) / len(calls) - each)
        inside.append(statistics.median(call.end - call.start for call in calls) - each)
    most = max(statistics.median(per_call), 0.0)
    return Unseen(per_call=most, inside=min(max(statistics.median(inside), 0.0), most))


def resolution_s(devices: Devices) -> float:
    """Calls shorter than this are not exact to 10 %: ten times what is not seen of a call.

    Of events that is their resolution, half a microsecond on CUDA.
    """
    return 10 * (EVENT_RESOLUTION_S if devices.events() else _unseen().per_call)
