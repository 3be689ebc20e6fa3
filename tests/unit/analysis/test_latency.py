"""Latency of modules and phases, and which latencies are exact."""

from __future__ import annotations

import dataclasses

import pytest

from dispatch_flops import analysis
from dispatch_flops.analysis.latency import inexact_latencies, inexact_phases
from dispatch_flops.profile import ModuleNode, OpTotal, StepTiming
from dispatch_flops.profile.cost import OpCost
from tests.helpers.trees import empty, lenet5, timed, training_step


def test_measured_seconds_are_as_inexact_as_their_phases() -> None:
    profile = training_step()
    is_inexact = analysis.latency.measured_seconds_are_inexact
    assert not is_inexact(profile)
    coarse = dataclasses.replace(profile.timing, operator_resolution_s=1e-3)
    assert is_inexact(dataclasses.replace(profile, timing=coarse))
    same_step = dataclasses.replace(coarse, iteration_s=1e-3)
    assert is_inexact(dataclasses.replace(profile, timing=same_step))
    clean_step = dataclasses.replace(coarse, iteration_s=1e-3, iteration_step=3)
    assert not is_inexact(dataclasses.replace(profile, timing=clean_step))


def test_latency_of_a_phase_is_the_measured_one() -> None:
    node = ModuleNode(fqn="", class_name="A", seconds=timed(forward=1.0, backward=2.0))
    assert analysis.latency_of(node) == 1.0
    assert analysis.latency_of(node, "backward") == 2.0
    assert analysis.latency_of(node, "optimizer") is None


@pytest.mark.parametrize(
    ("latency_s", "spread_s", "is_exact"),
    [(14.0, None, True), (13.0, None, False), (15.0, 1.5, True), (15.0, 1.6, False)],
)
def test_inexact_latencies_are_below_what_calls_and_timed_operators_take(
    latency_s: float, spread_s: float | None, is_exact: bool
) -> None:
    """2 calls at 5 each, of itself and of its child, and 4 timed operators at 1 each.

    The root is never called: its latency is the same one.
    """
    cost = OpCost(flops=1)
    ops = (
        OpTotal(op="lib.a", phase="forward", calls=4, cost=cost, latency_s=2.0),
        OpTotal(op="lib.view", phase="forward", calls=9, cost=cost),  # not timed
        OpTotal(op="lib.b", phase="backward", calls=9, cost=cost, latency_s=2.0),
    )
    child = ModuleNode(fqn="a.b", name="b", class_name="B", calls=1, seconds=timed(forward=9.0))
    node = ModuleNode(
        fqn="a", name="a", class_name="A", calls=1, ops=ops, children=(child,),
        seconds=timed(forward=latency_s), latency_spread_s=spread_s,
    )  # fmt: skip
    root = ModuleNode(fqn="", class_name="Net", children=(node,))
    timing = StepTiming(resolution_s=5.0, operator_resolution_s=1.0)
    assert inexact_latencies(root, timing) == (frozenset() if is_exact else {"", "a"})


def test_inexact_latencies_include_a_container_whose_children_together_are_inexact() -> None:
    """It shows the sum of 4 s and 6 s: 3 calls at 4 s are more, 3 calls at 3 s are not."""

    def marked(resolution_s: float, spread_s: float) -> frozenset[str]:
        first = ModuleNode(
            fqn="b.0", name="0", class_name="A", calls=1, seconds=timed(forward=4.0),
            latency_spread_s=spread_s,
        )  # fmt: skip
        second = ModuleNode(
            fqn="b.1", name="1", class_name="A", calls=2, seconds=timed(forward=6.0)
        )
        both = ModuleNode(fqn="b", name="b", class_name="List", children=(first, second))
        root = ModuleNode(
            fqn="", class_name="Net", calls=1, seconds=timed(forward=90.0), children=(both,)
        )
        return inexact_latencies(root, StepTiming(resolution_s=resolution_s))

    assert marked(4.0, 0.0) == {"b", "b.1"}
    assert marked(3.0, 0.0) == frozenset()
    assert marked(3.0, 1.5) == {"b", "b.0"}
    assert marked(3.0, 0.5) == {"b.0"}


def test_inexact_latencies_omit_a_model_that_was_timed_by_itself() -> None:
    root = ModuleNode(fqn="", class_name="Net", calls=1, seconds=timed(forward=1e-6))
    assert inexact_latencies(root, StepTiming(resolution_s=5e-6)) == {""}
    assert (
        inexact_latencies(root, StepTiming(resolution_s=5e-6, seconds=timed(forward=1e-6)))
        == frozenset()
    )


def test_inexact_phases_are_below_what_their_operators_take() -> None:
    """Recomputation runs within the backward pass; the optimizer runs one operator."""
    profile = training_step()
    calls = sum(op.calls for op in profile.op_totals() if op.phase in ("backward", "recompute"))
    for resolution, marked in (
        (240.09e-6 / calls * 0.99, set()),
        (240.09e-6 / calls * 1.01, {"backward"}),
        (314.47e-6 * 1.01, {"backward", "optimizer"}),
    ):
        timing = dataclasses.replace(
            profile.timing, spread_s=None, operator_resolution_s=resolution
        )
        found = inexact_phases(dataclasses.replace(profile, timing=timing))
        assert found == marked


def test_measured_seconds_sum_the_phases_that_ran() -> None:
    profile = training_step()
    seconds, words = analysis.measured_seconds(profile)
    assert seconds == pytest.approx((97.51 + 240.09 + 314.47) * 1e-6)
    assert words == "forward + backward + optimizer"


def test_measured_seconds_of_a_phase_without_its_time_are_unknown() -> None:
    profile = training_step()
    part = dataclasses.replace(profile, timing=StepTiming(seconds=timed(forward=1.0, backward=2.0)))
    assert analysis.measured_seconds(part) == (None, "not measured")
    whole = dataclasses.replace(profile, timing=StepTiming(iteration_s=2.0))
    assert analysis.measured_seconds(whole) == (2.0, "whole iteration")
    assert analysis.measured_seconds(empty()) == (None, "not measured")


def test_phase_seconds_of_an_untimed_forward_are_those_of_the_model() -> None:
    assert analysis.phase_seconds(lenet5()) == {
        "forward": 216.68e-3,
        "backward": None,
        "recompute": None,
        "optimizer": None,
    }
