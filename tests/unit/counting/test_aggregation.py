"""Sums of recorded calls: totals without a tree, and the operator totals of a tree."""

from __future__ import annotations

from collections import defaultdict

import pytest

from dispatch_flops.counting.aggregation import CallAggregator, RecordedCalls
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.profile.cost import OpCost, Phase, Share

Seconds = dict[CallCost, float]

MM = CallCost("aten.mm.default", "formula", "float32", OpCost(macs=3, flops=6))
SHARED = CallCost(
    "aten.encoder.default",
    "formula",
    "float32",
    OpCost(macs=5, flops=10),
    shares=(
        Share(cost=OpCost(macs=7, flops=14), child="linear"),
        Share(cost=OpCost(macs=11, flops=22), phase="recompute"),
        Share(cost=OpCost(macs=13, flops=26), child="unheard"),
    ),
)
UNKNOWN = CallCost("mylib.mystery.default", "unknown", error="ValueError: no")


def calls(
    fqn: str,
    phase: Phase,
    counts: dict[CallCost, int],
    seconds: dict[CallCost, float] | None = None,
) -> ModulePhase:
    return ModulePhase(fqn, phase, defaultdict(int, counts), defaultdict(float, seconds or {}))


def recorded(*module_phases: ModulePhase, aggregated: bool) -> RecordedCalls:
    """Return these calls, recorded a second ago or aggregated before."""
    aggregator = CallAggregator()
    if aggregated:
        aggregator.aggregate(module_phases)
        assert not any(found.counts for found in module_phases)
    return aggregator.including(module_phases)


@pytest.mark.parametrize("aggregated", [False, True])
def test_operators_that_ran_are_known_by_name(aggregated: bool) -> None:
    found = recorded(calls("a", "forward", {MM: 2}), aggregated=aggregated)
    assert found.ran("aten.mm.default")
    assert not found.ran("aten.bmm.default")


@pytest.mark.parametrize("aggregated", [False, True])
def test_totals_of_each_phase_include_shares(aggregated: bool) -> None:
    found = recorded(
        calls("a", "forward", {MM: 2, SHARED: 3}),
        calls("b", "forward", {MM: 1}),
        calls("b", "backward", {MM: 17, UNKNOWN: 19}),
        aggregated=aggregated,
    )
    assert found.totals() == {
        "forward": OpCost(macs=3 * 3 + 3 * (5 + 7 + 13), flops=6 * 3 + 6 * (5 + 7 + 13)),
        "recompute": OpCost(macs=3 * 11, flops=6 * 11),
        "backward": OpCost(macs=17 * 3, flops=17 * 6),
    }
    assert found.total().macs == 3 * 3 + 3 * (5 + 7 + 11 + 13) + 17 * 3
    assert found.uncounted_ops() == {"mylib.mystery.default": 19}
    assert found.formula_errors() == {"mylib.mystery.default": "ValueError: no"}


@pytest.mark.parametrize("aggregated", [False, True])
def test_op_totals_give_a_share_to_a_child_that_is_known(aggregated: bool) -> None:
    found = recorded(calls("a", "forward", {SHARED: 3}), aggregated=aggregated)
    totals = found.op_totals({"a": None, "a.linear": None})  # type: ignore[dict-item]
    assert {(fqn, op.phase, op.calls): op.cost for fqn, ops in totals.items() for op in ops} == {
        ("a", "forward", 3): OpCost(macs=3 * (5 + 13), flops=6 * (5 + 13)),
        ("a", "recompute", 0): OpCost(macs=3 * 11, flops=6 * 11),
        ("a.linear", "forward", 0): OpCost(macs=3 * 7, flops=6 * 7),
    }


@pytest.mark.parametrize("aggregated", [False, True])
def test_op_totals_of_costs_with_one_name_are_one(aggregated: bool) -> None:
    larger = CallCost(MM.op, MM.kind, MM.dtype, OpCost(macs=23))
    other = CallCost(MM.op, MM.kind, "float64", OpCost(macs=29))
    found = recorded(
        calls("a", "forward", {MM: 2, larger: 5, other: 1, UNKNOWN: 4}, {MM: 0.5, larger: 0.25}),
        calls("a", "forward", {UNKNOWN: 3}),  # another thread
        aggregated=aggregated,
    )
    single, double, unknown = found.op_totals({})["a"]
    assert (single.calls, single.cost) == (7, OpCost(macs=2 * 3 + 5 * 23, flops=2 * 6))
    assert single.latency_s == 0.75
    assert (double.dtype, double.calls, double.cost) == ("float64", 1, OpCost(macs=29))
    assert double.latency_s is None
    assert (unknown.calls, unknown.uncounted, unknown.cost) == (7, 7, None)


def test_modules_with_the_same_calls_share_their_totals() -> None:
    alike = ("a", "b")
    found = recorded(
        *(calls(fqn, "forward", {MM: 2, UNKNOWN: 1}) for fqn in alike),
        *(calls(fqn, "backward", {MM: 5}) for fqn in (*alike, "c")),
        calls("d", "forward", {MM: 2, UNKNOWN: 1}, {MM: 0.5}),
        calls("e", "forward", {MM: 2, UNKNOWN: 1}, {MM: 0.25}),
        aggregated=False,
    ).op_totals({})
    assert found["a"] is found["b"]
    assert [(op.phase, op.op, op.calls) for op in found["a"]] == [
        ("backward", MM.op, 5), ("forward", MM.op, 2), ("forward", UNKNOWN.op, 1)
    ]  # fmt: skip
    assert found["c"] == (found["a"][0],)
    assert [op.latency_s for op in (*found["d"], *found["e"])] == [0.5, None, 0.25, None]


@pytest.mark.parametrize("aggregated", [False, True])
def test_time_that_comes_after_its_calls_is_theirs(aggregated: bool) -> None:
    """Events tell the time of a call when its number is aggregated already."""
    aggregator = CallAggregator()
    aggregator.aggregate([calls("a", "forward", {MM: 2, UNKNOWN: 1})])
    late = calls("a", "forward", {}, {MM: 0.5, UNKNOWN: 0.25})
    if aggregated:
        aggregator.aggregate([late])
    known, unknown = aggregator.including([late]).op_totals({})["a"]
    assert (known.calls, known.cost, known.latency_s) == (2, OpCost(macs=6, flops=12), 0.5)
    assert (unknown.calls, unknown.cost, unknown.latency_s) == (1, None, 0.25)


@pytest.mark.parametrize("aggregated", [False, True])
def test_time_of_zero_is_measured(aggregated: bool) -> None:
    found = recorded(calls("a", "forward", {MM: 1}, {MM: 0.0}), aggregated=aggregated)
    assert [op.latency_s for op in found.op_totals({})["a"]] == [0.0]


@pytest.mark.parametrize("aggregated", [False, True])
def test_shares_of_two_threads_add_up_in_their_child(aggregated: bool) -> None:
    """A share is part of a call of the module above: the child has its cost, and no call."""
    parts = [calls("a", "forward", {SHARED: number}) for number in (2, 3)]
    totals = recorded(*parts, aggregated=aggregated).op_totals({"a.linear": None})  # type: ignore[dict-item]
    assert [(op.calls, op.cost) for op in totals["a.linear"]] == [
        (0, OpCost(macs=5 * 7, flops=5 * 14))
    ]


@pytest.mark.parametrize("aggregated", [False, True])
def test_uncounted_operators_are_in_order_of_their_names(aggregated: bool) -> None:
    later = CallCost("mylib.a.default", "unknown")
    found = recorded(calls("a", "forward", {UNKNOWN: 2, later: 3}), aggregated=aggregated)
    assert list(found.uncounted_ops().items()) == [(later.op, 3), (UNKNOWN.op, 2)]


@pytest.mark.parametrize("aggregated", [False, True])
def test_modules_compute_by_operators_that_are_not_free(aggregated: bool) -> None:
    view = CallCost("aten.view.default", "free", None, OpCost())
    found = recorded(
        calls("a", "forward", {MM: 1}),
        calls("b", "forward", {view: 1}),
        calls("c", "backward", {MM: 1}),
        ModulePhase("d", "backward", defaultdict(int, {MM: 1}), entered=1),  # by a hook
        aggregated=aggregated,
    )
    assert found.computing_modules() == {"a", "d"}


def test_recorded_calls_do_not_change_with_later_calls() -> None:
    found = calls("a", "forward", {MM: 2}, {MM: 0.5})
    aggregator = CallAggregator()
    aggregator.aggregate([calls("a", "forward", {MM: 1}, {MM: 0.25})])
    taken = aggregator.including([found])
    found.counts[MM] += 5
    found.add_seconds(MM, 1.0)
    aggregator.aggregate([found])
    assert taken.total().macs == 3 * 3
    assert [op.latency_s for op in taken.op_totals({})["a"]] == [0.75]
    assert aggregator.including([]).total().macs == 3 * 8


@pytest.mark.parametrize("aggregated", [False, True])
def test_module_calls_leave_out_recomputation_and_setup(aggregated: bool) -> None:
    parts = [
        ModulePhase("a", "forward", defaultdict(int, {MM: 1}), entered=2),
        ModulePhase("a", "backward", entered=3),  # first run by a hook in a backward pass
        ModulePhase("a", "recompute", entered=5),
        ModulePhase("b", "setup", entered=7),
        ModulePhase("c", "forward", entered=11),  # ran no operator of its own
        ModulePhase("d", "forward", defaultdict(int, {MM: 1})),
    ]
    assert recorded(*parts, aggregated=aggregated).module_calls() == {"a": 2 + 3, "c": 11}


def test_module_calls_are_those_of_the_moment_of_recording() -> None:
    part = ModulePhase("a", "forward", entered=2)
    found = CallAggregator().including([part])
    part.entered += 1
    assert found.module_calls() == {"a": 2}
