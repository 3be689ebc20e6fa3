"""Costs of segments of steps."""

from __future__ import annotations

from collections import Counter

import pytest

from dispatch_flops.profilers.step_costs import END, Segment, State


def segment_of(*counted: int, others: int) -> Segment:
    """Return a segment with runs that were counted, of so many FLOPs, and others."""
    segment = Segment(State("after a call"), END)
    for flops in counted:
        segment.add_counted(Counter({("forward", "flops"): flops}))
    segment.runs += others
    return segment


def test_variance_is_that_of_runs_about_a_mean_which_varies_itself() -> None:
    """The first three runs tell that the cost varies; the next are the sample."""
    segment = segment_of(7, 7, 9, 3, 8, 13, others=6)
    variance = (5**2 + 0**2 + 5**2) / (3 - 1)  # the mean is 8
    assert segment.total_variance() == segment.variance(6) == variance * (6 + 6 * 6 / 3)
    assert segment.variance(1) == pytest.approx(variance * (1 + 1 / 3))
    assert segment.variance(0) == 0
    twice = segment_of(others=0)
    twice.add_runs_of(segment)
    twice.add_runs_of(segment)
    assert twice.variance(12) == 2 * (5**2 + 5**2) / (6 - 1) * (12 + 12 * 12 / 6)


def test_variance_is_not_known_where_no_sample_tells_it() -> None:
    assert segment_of(7, 7, others=3).total_variance() == 0  # the cost is known
    assert segment_of(7, 7, 9, 3, others=3).total_variance() is None  # a sample of one
    assert segment_of(7, 3, 3, others=3).total_variance() is None  # the first was special, perhaps
    assert segment_of(others=3).total_variance() is None
    assert segment_of(7, 7, 9, 3, 8, others=0).total_variance() == 0  # all are counted


def test_segment_that_has_varied_stays_an_estimate_when_samples_are_equal() -> None:
    segment = Segment(State("after a call"), END)
    for flops in (3, 5, 7, 7):
        segment.add_counted(Counter({("forward", "flops"): flops}))
    assert not segment.is_estimate
    segment.runs += 2  # that were not counted
    assert segment.is_estimate
    assert segment.total() == {("forward", "flops"): 3 + 5 + 7 + 7 + 2 * 7}
    assert segment.amounts(2) == {("forward", "flops"): 2 * 7}  # those after the first two
