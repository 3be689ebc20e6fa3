"""Latencies with an injected clock: every expected second is a hand sum."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.timing.calibrated import ModulePass
from dispatch_flops.timing.latencies import (
    fit_to_whole,
    medians,
    spreads,
    time_call,
    within_parents,
)
from dispatch_flops.timing.module_timer import HookOverhead, Interval, net_seconds


class Ticks:
    """A clock that advances when told to, and by ``per_reading`` at each reading."""

    def __init__(self, per_reading: float = 0.0) -> None:
        self.now = 0.0
        self.per_reading = per_reading

    def __call__(self) -> float:
        self.now += self.per_reading
        return self.now


class Working(nn.Module):
    """Takes ``seconds`` of the clock, before and after its children run."""

    def __init__(self, clock: Ticks, seconds: float, *children: nn.Module) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = seconds
        self.inner = nn.ModuleList(children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += self.seconds
        for child in self.inner:
            x = child(x)
        return x


def test_a_parent_takes_its_own_time_and_its_childrens() -> None:
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


def test_what_hooks_take_is_nobodys_latency() -> None:
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


def test_a_shared_module_sums_its_calls() -> None:
    clock = Ticks()
    shared = Working(clock, 3.0)
    model = Working(clock, 0.0, nn.Sequential(shared, shared))
    with ModulePass(ModuleNames([model]), now=clock) as latency:
        model(torch.ones(1))
    # One parent holds it under two names: which of the two is called cannot be told.
    assert latency.seconds()["inner.0.0"] == 2 * 3.0
    assert latency.seconds()["inner.0"] == 2 * 3.0


def test_recursion_counts_the_outermost_call() -> None:
    calls = [
        Interval("a", 3, 2.0, 2.0, 3.0, 3.0),
        Interval("a", 2, 1.0, 1.0, 4.0, 4.0),
        Interval("a", 1, 0.0, 0.0, 5.0, 5.0),
        Interval("a", 4, 6.0, 6.0, 8.0, 8.0),
    ]
    assert net_seconds(calls) == {"a": 5.0 + 2.0}


def test_what_lies_in_what_is_told_by_number() -> None:
    """The profiler's unseen time, taken off in advance, has turned the clock back."""
    calls = [
        Interval("a.x", 2, 0.25, 0.5, 3.5, 3.5),  # begins before its parent, by the clock
        Interval("a", 1, 0.0, 0.75, 4.75, 5.0),
    ]
    assert net_seconds(calls) == {"a.x": 3.0, "a": 4.0 - 0.25}
    again = [Interval("a", 2, 0.25, 0.5, 3.5, 3.5), calls[1]]
    assert net_seconds(again) == {"a": 4.0 - 0.25}


def test_what_the_stamps_do_not_show_is_taken_off() -> None:
    calls = [
        Interval("a.x", 2, 1.0, 1.5, 4.5, 5.0),
        Interval("a.y", 3, 6.0, 6.5, 8.5, 9.0),
        Interval("a", 1, 0.0, 0.5, 11.5, 12.0),
    ]
    plain = net_seconds(calls)
    assert plain == {"a.x": 3.0, "a.y": 2.0, "a": 11.0 - 2 * 1.0}
    net = net_seconds(calls, HookOverhead(per_call=0.75, inside=0.25))
    assert net == {"a.x": 3.0 - 0.25, "a.y": 2.0 - 0.25, "a": 9.0 - 2 * 0.75 - 0.25}


def test_no_parent_is_below_its_children() -> None:
    calls = [Interval("a.x", 2, 1.0, 1.0, 4.0, 4.0), Interval("a", 1, 0.0, 0.0, 5.0, 5.0)]
    assert net_seconds(calls, HookOverhead(per_call=3.0)) == {"a.x": 3.0, "a": 3.0}


def test_a_module_that_raises_is_closed() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    clock = Ticks()
    model = Working(clock, 1.0, Failing())
    with ModulePass(ModuleNames([model]), now=clock) as latency, pytest.raises(ValueError):
        model(torch.ones(1))
    assert latency.seconds() == {"inner.0": 0.0, "": 1.0}


def test_time_call_gives_the_median_and_half_the_range() -> None:
    clock = Ticks()
    steps: Iterator[float] = iter([5.0, 1.0, 2.0])

    def run() -> None:
        clock.now += next(steps)

    assert time_call(run, repeats=3, now=clock) == (2.0, (5.0 - 1.0) / 2)


def test_one_run_has_no_spread() -> None:
    assert time_call(lambda: None, repeats=1, now=Ticks())[1] is None


def test_fitting_keeps_shares() -> None:
    assert fit_to_whole({"": 2.0, "a": 1.0}, "", 3.0) == {"": 3.0, "a": 1.5}
    assert fit_to_whole({"a": 1.0}, "", 3.0) == {"a": 1.0}


def test_medians_are_of_the_passes_in_which_a_module_ran() -> None:
    assert medians([{"": 5.0, "a": 1.0}, {"": 1.0}, {"": 3.0, "a": 2.0}]) == {"": 3.0, "a": 1.5}


def test_spreads_are_shares_by_which_passes_vary() -> None:
    passes = [{"": 8.0, "a": 1.0, "b": 0.0}, {"": 10.0, "a": 2.0, "b": 0.0}, {"": 15.0, "b": 0.0}]
    # Of 8, 10 and 15 the median is 10, off by 0.2, 0 and 0.5; of 1 and 2 it is 1.5, off by 1/3.
    assert spreads(passes) == pytest.approx({"": 0.2, "a": 1 / 3})
    assert spreads(passes[:1]) == {}


def test_no_children_have_more_than_their_parent() -> None:
    clock = Ticks()
    leaf = lambda: Working(clock, 1.0)  # noqa: E731
    model = Working(clock, 0.0, leaf(), Working(clock, 0.0, leaf(), leaf()))
    names = ModuleNames([model])
    seconds = {
        "": 12.0,
        "inner.0": 4.0,  # 4 and 12 are 16: 12/16 of each
        "inner.1": 12.0,
        "inner.1.inner.0": 9.0,  # 9 and 3 are 12, and their parent has 9
        "inner.1.inner.1": 3.0,
    }
    assert within_parents(seconds, names) == {
        "": 12.0,
        "inner.0": 3.0,
        "inner.1": 9.0,
        "inner.1.inner.0": 9.0 * 9 / 12,
        "inner.1.inner.1": 3.0 * 9 / 12,
    }
    fitting = {"": 16.0, "inner.0": 4.0, "inner.1": 12.0}
    assert within_parents(fitting, names) == fitting
