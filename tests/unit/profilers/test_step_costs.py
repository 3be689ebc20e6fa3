"""Costs of segments of steps."""

from __future__ import annotations

from collections import Counter

from dispatch_flops.profilers.step_costs import END, Segment, State


def test_segment_that_has_varied_stays_an_estimate_when_samples_are_equal() -> None:
    segment = Segment(State("after a call"), END)
    for flops in (3, 5, 7, 7):
        segment.add_counted(Counter({("forward", "flops"): flops}))
    assert not segment.is_estimate
    segment.runs += 2  # that were not counted
    assert segment.is_estimate
    assert segment.total() == {("forward", "flops"): 3 + 5 + 7 + 7 + 2 * 7}
    assert segment.amounts(2) == {("forward", "flops"): 2 * 7}  # those after the first two
