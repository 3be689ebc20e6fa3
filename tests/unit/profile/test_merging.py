"""Sums of operators, nodes and trees."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from dispatch_flops.profile import OpTotal, Profile, merge_ops, sum_nodes, sum_trees
from dispatch_flops.profile.cost import PHASES, OpCost
from tests.helpers.trees import (
    deep,
    linear,
    module,
    op,
    place,
    profiles,
    timed,
    training_step,
    unknown,
)


def test_merge_ops_without_calls_takes_no_time() -> None:
    kernel = OpTotal(op="lib.a", phase="backward", calls=2, cost=OpCost(flops=3), latency_s=5.0)
    share = OpTotal(op="lib.a", phase="recompute", calls=0, cost=OpCost(flops=7))
    untimed = OpTotal(op="lib.a", phase="forward", calls=1, cost=OpCost(flops=1))
    assert merge_ops(kernel, share).latency_s == merge_ops(share, kernel).latency_s == 5.0
    assert merge_ops(kernel, untimed).latency_s is merge_ops(share, share).latency_s is None


def test_merge_ops_of_unknown_cost_keeps_what_is_known() -> None:
    known, lost = op("lib.a", macs=3), unknown("lib.a", calls=2)
    merged = merge_ops(lost, known)
    assert (merged.cost, merged.calls, merged.uncounted, merged.kind) == (
        OpCost(macs=3, flops=6),
        3,
        2,
        "formula",
    )
    assert merge_ops(lost, lost).cost is None


def test_totals_are_merged_with_the_error_that_either_has() -> None:
    lost = dataclasses.replace(unknown("lib.a", calls=2), error="TypeError: as told")
    known = op("lib.a", macs=3)
    assert merge_ops(lost, known).error == merge_ops(known, lost).error == lost.error


def test_sum_nodes_keeps_totals_of_several_kinds_and_errors_apart() -> None:
    known = op("lib.a", macs=3)
    free = dataclasses.replace(known, kind="free")
    lost = dataclasses.replace(known, error="TypeError: as told")
    total = sum_nodes([module("A", ops=(known, free, lost)), module("A", ops=(lost, free))])
    assert [(o.kind, o.error, o.calls) for o in total.ops] == [
        ("formula", None, 1), ("free", None, 2), ("formula", lost.error, 2),
    ]  # fmt: skip


def test_sum_nodes_adds_every_figure() -> None:
    a = linear("0", 2, 3, batch=5, tokens=7, seconds=timed(forward=1.0, backward=2.0))
    b = dataclasses.replace(
        a, name="1", calls=2, tokens=None, seconds=timed(forward=4.0), latency_spread_s=0.5
    )
    total = sum_nodes([a, b])
    assert (total.name, total.calls, total.tokens) == ("0", 1 + 2, 7)
    assert (total.own_params, total.total_params) == (2 * 9, 2 * 9)
    assert (total.active_params, total.trainable_params) == (2 * 9, 2 * 9)
    assert total.seconds == timed(forward=5.0, backward=2.0)
    assert total.latency_spread_s == 0.5
    assert [(o.calls, o.cost) for o in total.ops] == [(2, OpCost(macs=60, flops=120))]


def test_sum_nodes_matches_operators_that_come_in_another_order() -> None:
    first, second = op("lib.a", macs=1), op("lib.b", macs=3)
    half = op("lib.a", macs=5, dtype="bfloat16")
    total = sum_nodes([module("A", ops=(first, second)), module("A", ops=(second, half, first))])
    assert [(o.op, o.dtype, o.cost.macs if o.cost else None) for o in total.ops] == [
        ("lib.a", "float32", 2),
        ("lib.b", "float32", 6),
        ("lib.a", "bfloat16", 5),
    ]


def test_sum_nodes_caps_shared_parameters() -> None:
    tied = [linear(str(i), 3, 5) for i in range(4)]
    total = sum_nodes(tied, most_params=20)
    assert (total.own_params, total.total_params) == (20, 20)


@given(profiles)
def test_sum_trees_of_equal_trees_multiplies_their_costs(profile: Profile) -> None:
    total = sum_trees([profile.root] * 3)
    Profile(root=total).check()
    for phase in PHASES:
        assert total.total(phase) == 3 * profile.root.total(phase)
    assert [node.fqn for node in total.walk()] == [node.fqn for node in profile.root.walk()]
    assert sum_trees([profile.root]).total() == profile.root.total()


def test_sum_trees_deeper_than_the_stack_is_computed() -> None:
    assert sum_trees([deep(2_000).root] * 2).total().flops == 2 * 2_000


def test_sum_trees_of_different_sizes_raises() -> None:
    root = training_step().root
    with pytest.raises(ValueError, match="zip"):
        sum_trees([root, place(module("Net", linear("0", 3, 5)))])
