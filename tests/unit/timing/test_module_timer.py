"""Latencies of modules on an injected clock: every expected value is a sum by hand."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.timing.calibrated import ModulePass
from dispatch_flops.timing.module_timer import HookOverhead, Interval, net_seconds
from tests.helpers.clocks import Ticks, Working


def test_module_timer_gives_a_parent_the_time_of_its_children() -> None:
    clock = Ticks()
    model = Working(clock, 1.0, Working(clock, 2.0), Working(clock, 4.0, Working(clock, 8.0)))
    with ModulePass(ModuleNames([model]), now=clock) as latency:
        model(torch.ones(1))
    assert latency.seconds() == {
        "inner.0": 2.0,
        "inner.1.inner.0": 8.0,
        "inner.1": 4.0 + 8.0,
        "": 1.0 + 2.0 + 4.0 + 8.0,
    }


def test_module_timer_subtracts_the_time_of_hooks() -> None:
    clock = Ticks(per_reading=0.25)  # each of the four readings of a call takes a quarter
    model = Working(clock, 1.0, Working(clock, 2.0), Working(clock, 4.0))
    with ModulePass(ModuleNames([model]), now=clock) as latency:
        model(torch.ones(1))
    seconds = latency.seconds()
    # A call's own interval holds one reading (that of its end); its hooks hold one each side,
    # and the way from one call's last reading to the next one's first holds one more.
    assert seconds["inner.0"] == 2.0 + 0.25
    assert seconds["inner.1"] == 4.0 + 0.25
    assert seconds[""] == 1.0 + 2.25 + 4.25 + 3 * 0.25


def test_module_timer_sums_the_calls_of_a_shared_module() -> None:
    clock = Ticks()
    shared = Working(clock, 3.0)
    model = Working(clock, 0.0, nn.Sequential(shared, shared))
    with ModulePass(ModuleNames([model]), now=clock) as latency:
        model(torch.ones(1))
    # One parent holds it under two names: which of the two is called cannot be told.
    assert latency.seconds()["inner.0.0"] == 2 * 3.0
    assert latency.seconds()["inner.0"] == 2 * 3.0


def test_net_seconds_of_recursion_count_the_outermost_call() -> None:
    calls = [
        Interval("a", 3, 2.0, 2.0, 3.0, 3.0),
        Interval("a", 2, 1.0, 1.0, 4.0, 4.0),
        Interval("a", 1, 0.0, 0.0, 5.0, 5.0),
        Interval("a", 4, 6.0, 6.0, 8.0, 8.0),
    ]
    assert net_seconds(calls) == {"a": 5.0 + 2.0}


def test_net_seconds_nest_calls_by_number() -> None:
    """Subtracting the unseen overhead in advance may set the clock back."""
    calls = [
        Interval("a.x", 2, 0.25, 0.5, 3.5, 3.5),  # starts before its parent, by the clock
        Interval("a", 1, 0.0, 0.75, 4.75, 5.0),
    ]
    assert net_seconds(calls) == {"a.x": 3.0, "a": 4.0 - 0.25}
    again = [Interval("a", 2, 0.25, 0.5, 3.5, 3.5), calls[1]]
    assert net_seconds(again) == {"a": 4.0 - 0.25}


def test_net_seconds_subtract_the_hook_overhead() -> None:
    calls = [
        Interval("a.x", 2, 1.0, 1.5, 4.5, 5.0),
        Interval("a.y", 3, 6.0, 6.5, 8.5, 9.0),
        Interval("a", 1, 0.0, 0.5, 11.5, 12.0),
    ]
    plain = net_seconds(calls)
    assert plain == {"a.x": 3.0, "a.y": 2.0, "a": 11.0 - 2 * 1.0}
    net = net_seconds(calls, HookOverhead(per_call=0.75, inside=0.25))
    assert net == {"a.x": 3.0 - 0.25, "a.y": 2.0 - 0.25, "a": 9.0 - 2 * 0.75 - 0.25}


def test_net_seconds_of_a_parent_are_at_least_those_of_its_children() -> None:
    calls = [Interval("a.x", 2, 1.0, 1.0, 4.0, 4.0), Interval("a", 1, 0.0, 0.0, 5.0, 5.0)]
    assert net_seconds(calls, HookOverhead(per_call=3.0)) == {"a.x": 3.0, "a": 3.0}


def test_module_timer_ends_a_call_that_raised() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    clock = Ticks()
    model = Working(clock, 1.0, Failing())
    with ModulePass(ModuleNames([model]), now=clock) as latency, pytest.raises(ValueError):
        model(torch.ones(1))
    assert latency.seconds() == {"inner.0": 0.0, "": 1.0}


@pytest.mark.parametrize("reentrant", [False, True])
def test_module_timer_excludes_recomputation(reentrant: bool) -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return torch.tanh(x)

    model = nn.ModuleDict({"slow": Slow()})
    x = torch.ones(2, requires_grad=True)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        checkpoint(model["slow"], x, use_reentrant=reentrant).sum().backward()
    seconds = counter.profile.node("slow").latency_s
    assert seconds is not None and 0.05 <= seconds < 0.1
