"""Timed calls, and latencies combined from several passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.timing.latencies import (
    fit_to_whole,
    medians,
    spreads,
    time_calls,
    within_parents,
)
from tests.helpers.clocks import Ticks, Working


def test_time_calls_returns_the_median_and_half_the_range() -> None:
    clock = Ticks()
    steps: Iterator[float] = iter([5.0, 1.0, 2.0])

    def run() -> None:
        clock.now += next(steps)

    assert time_calls(run, 3, clock) == (2.0, (5.0 - 1.0) / 2)


def test_time_calls_of_one_call_has_no_spread() -> None:
    assert time_calls(lambda: None, 1, Ticks())[1] is None


def test_fit_to_whole_scales_all_modules_by_one_factor() -> None:
    assert fit_to_whole({"": 2.0, "a": 1.0}, 3.0) == {"": 3.0, "a": 1.5}
    assert fit_to_whole({"a": 1.0}, 3.0) == {"a": 1.0}


def test_medians_ignore_passes_in_which_a_module_did_not_run() -> None:
    assert medians([{"": 5.0, "a": 1.0}, {"": 1.0}, {"": 3.0, "a": 2.0}]) == {"": 3.0, "a": 1.5}


def test_spreads_are_median_deviations_as_shares_of_the_median() -> None:
    passes = [{"": 8.0, "a": 1.0, "b": 0.0}, {"": 10.0, "a": 2.0, "b": 0.0}, {"": 15.0, "b": 0.0}]
    # Of 8, 10 and 15 the median is 10, off by 0.2, 0 and 0.5; of 1 and 2 it is 1.5, off by 1/3.
    assert spreads(passes) == pytest.approx({"": 0.2, "a": 1 / 3})
    assert spreads(passes[:1]) == {}


def test_within_parents_scales_children_that_exceed_their_parent() -> None:
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
