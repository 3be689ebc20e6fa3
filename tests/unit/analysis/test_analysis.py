"""Questions to hand-built profiles; the answers are products of their sizes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from dispatch_flops import analysis
from dispatch_flops.analysis.figures import Figures, top_modules
from dispatch_flops.analysis.latency import inexact_latencies
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import ModuleNode, OpTotal, Profile, StepTiming, add_costs, flops_of
from dispatch_flops.profile.cost import PHASES, ZERO, OpCost
from tests.helpers.trees import (
    SMALL,
    deep,
    encoder,
    lenet5,
    lower_bound,
    op,
    profiles,
    training_step,
    unmeasured,
    wide,
)

MACS = 4 * 64 * 256  # of each Linear of training_step, forward


def test_inclusive_figures() -> None:
    figures = analysis.inclusive(training_step().root, "forward")
    assert list(figures) == ["", "0", "1", "2"]
    assert figures["0"].cost.macs == MACS
    assert figures[""].cost.macs == 2 * MACS
    assert figures[""].params == 2 * 64 * 256 + 64 + 256
    backward = analysis.inclusive(training_step().root, "backward")
    assert backward[""].cost.macs == 3 * MACS
    assert backward["0"].latency_s is None


def test_unmeasured_containers_sum_their_children() -> None:
    root = unmeasured().root
    figures = analysis.inclusive(root)
    assert figures["layers.0"].latency_s == 4e-3  # measured: not the sum of 1 ms below
    assert figures["layers.1"].latency_s is None
    assert figures["layers"].latency_s == 4e-3
    assert figures["head"].latency_s == 0.0  # measured, and not None
    assert figures[""].latency_s == 4e-3
    assert analysis.latency_of(root) == 4e-3
    assert analysis.latency_of(root.children[0].children[1]) is None
    assert analysis.latency_of(root, "backward") is None


def test_backward_latency_is_asked_for_by_phase() -> None:
    node = ModuleNode(fqn="", class_name="A", latency_s=1.0, backward_latency_s=2.0)
    assert analysis.latency_of(node) == 1.0
    assert analysis.latency_of(node, "backward") == 2.0
    assert analysis.latency_of(node, "optimizer") is None


def test_latency_alone_is_what_the_children_leave() -> None:
    alone = analysis.exclusive(encoder(3).root)
    assert alone["layer.1"].latency_s == pytest.approx(2e-3 - 2e-3)
    assert alone["layer.2"].latency_s == pytest.approx(3e-3 - 2e-3)
    assert alone["layer.0"].latency_s == 0.0  # its children took longer: noise, not negative time
    assert alone["layer"].latency_s is None


def test_lower_bound_is_of_the_phase_and_above() -> None:
    forward = analysis.inclusive(lower_bound().root, "forward")
    assert {fqn: f.lower_bound for fqn, f in forward.items()} == {
        "": True,
        "known": False,
        "partly": True,
    }
    assert not analysis.inclusive(lower_bound().root, "backward")[""].lower_bound


def test_by_depth_adds_up_classes() -> None:
    depths = analysis.by_depth(encoder(12).root, "forward")
    assert [list(level) for level in depths] == [
        ["Encoder"],
        ["Embedding", "ModuleList"],
        ["Layer"],
        ["Linear", "Sequential"],
        ["Linear"],
    ]
    layer = depths[2]["Layer"]
    assert layer.modules == 12
    assert layer.cost.macs == 12 * (2 * 3 * 5 * 7 + 2 * 3 * 7 * 5)
    assert layer.latency_s == pytest.approx(sum(range(1, 13)) * 1e-3)
    assert depths[3]["Linear"].cost.macs == 12 * 2 * 3 * 5 * 7
    assert depths[3]["Sequential"].latency_s is None


def test_by_type_adds_up_to_the_total() -> None:
    types = analysis.by_type(encoder(12))
    assert next(iter(types)) == "Linear"
    assert types["Linear"].modules == 12 * 4
    assert types["Linear"].cost.macs == 12 * 4 * 3 * 5 * 7
    assert types["Layer"].cost == ZERO
    assert types["Embedding"].params == 11 * 5


def test_top_keeps_order_of_equals_and_puts_unknown_last() -> None:
    groups = {
        "a": Figures(params=1),
        "b": Figures(params=2, latency_s=0.0),
        "c": Figures(params=2),
    }
    assert [name for name, _ in analysis.top(groups, "params", 3)] == ["b", "c", "a"]
    assert [name for name, _ in analysis.top(groups, "latency", 1)] == ["b"]
    assert analysis.top(groups, "flops", 0) == []
    assert analysis.top(groups, "flops", -1) == []


@pytest.mark.parametrize(
    ("key", "winner", "value"),
    [
        ("params", "feature_extractor.6", 16 * 120 * 25 + 120),
        ("macs", "feature_extractor.3", 1024 * 16 * 6 * 25 * 100),
        ("flops", "feature_extractor.3", 1024 * 16 * 100 * (2 * 6 * 25 + 1)),
    ],
)
def test_top_modules(key: analysis.Key, winner: str, value: int) -> None:
    ranked = analysis.top_modules(lenet5(), key, 3)
    assert len(ranked) == 3
    assert ranked[0][0].fqn == winner
    assert ranked[0][1].value(key) == value


def test_top_modules_leaves_out_those_that_have_none() -> None:
    assert len(analysis.top_modules(lenet5(), "params", 100)) == 5
    assert analysis.top_modules(lenet5(), "bytes", 100) == []
    assert analysis.top_modules(lenet5(), "latency", 1)[0][0].fqn == "feature_extractor.0"
    assert analysis.top_modules(lenet5(), "macs", 5, "backward") == []


def test_operator_rows() -> None:
    rows = {row.op: row for row in analysis.operator_rows(training_step())}
    total = sum(flops_of(o) for o in training_step().op_totals())
    assert next(iter(rows)) == "aten.mm.default"
    relu = rows["aten.relu.default"]
    assert relu.phases == ("forward", "recompute")
    assert relu.calls == 2
    assert relu.share == 2 * 4 * 256 / total
    addmm = rows["aten.addmm.default"]
    moved = 4 * (4 * 64 + 64 * 256 + 256 + 4 * 256)
    assert addmm.bytes_per_call == moved / 2
    assert addmm.arithmetic_intensity == 2 * 2 * MACS / moved
    assert rows["aten.t.default"].arithmetic_intensity is None
    assert rows["aten.t.default"].share == 0
    assert rows["aten._foreach_add_.List"].dtype == "bfloat16"
    assert sum(row.share or 0 for row in rows.values()) == pytest.approx(1)


def test_operator_rows_of_one_phase() -> None:
    rows = analysis.operator_rows(training_step(), "recompute")
    assert [(row.op, row.calls, row.share) for row in rows] == [("aten.relu.default", 1, 1.0)]


def test_operators_of_two_dtypes_are_two_rows() -> None:
    root = ModuleNode(
        fqn="",
        class_name="Mixed",
        ops=(
            op("aten.mm.default", macs=3, dtype="float32"),
            op("aten.mm.default", macs=5, dtype="bfloat16"),
            op("aten.mm.default", "backward", macs=7, dtype="bfloat16"),
            op("aten.sym_size.int", dtype=None),
        ),
    )
    rows = analysis.operator_rows(Profile(root=root))
    found = [(row.dtype, row.cost.macs if row.cost else None) for row in rows]
    assert found == [("bfloat16", 12), ("float32", 3), (None, 0)]
    by_dtype = analysis.cost_by_dtype(Profile(root=root), "forward")
    assert by_dtype == {
        "bfloat16": OpCost(macs=5, flops=10),
        "float32": OpCost(macs=3, flops=6),
        None: ZERO,
    }


def test_unknown_operators_have_no_figures() -> None:
    rows = {row.op: row for row in analysis.operator_rows(lower_bound())}
    mystery = rows["lib.mystery.default"]
    assert (mystery.cost, mystery.share, mystery.bytes_per_call) == (None, None, None)
    partly = rows["lib.scan.default"]
    assert partly.bytes_per_call == 13 + 17  # one of its three calls has a known cost
    assert partly.share == 22 / (22 + 2 * 3 * 5 * 7)


def test_share_of_nothing_is_not_available() -> None:
    root = ModuleNode(fqn="", class_name="Views", ops=(op("aten.view.default", kind="free"),))
    assert analysis.operator_rows(Profile(root=root))[0].share is None


def test_phases() -> None:
    assert analysis.phases_of(training_step()) == PHASES
    assert analysis.phases_of(lenet5()) == ("forward",)
    assert analysis.phases_of(SMALL["empty"]()) == ()


def test_diff_of_equal_profiles() -> None:
    difference = analysis.diff(encoder(), encoder())
    assert difference.changed_modules() == difference.changed_operators() == []
    assert not difference.total.changed


def test_diff_ignores_latency_as_a_reason() -> None:
    slower = dataclasses.replace(lenet5().root, latency_s=1.0)
    difference = analysis.diff(lenet5(), Profile(root=slower))
    assert difference.changed_modules() == []
    assert difference.total.after is not None
    assert difference.total.after.latency_s == 1.0


def test_diff_finds_modules_and_operators() -> None:
    difference = analysis.diff(encoder(3), encoder(2))
    changed = {change.name: change for change in difference.changed_modules()}
    gone = {"layer.2" + rest for rest in ("", ".query", ".key", ".mlp", ".mlp.0", ".mlp.1")}
    assert set(changed) == {"", "layer"} | gone
    assert changed["layer.2"].after is None
    before, after = changed[""].before, changed[""].after
    assert before is not None and after is not None
    assert before.cost.macs - after.cost.macs == 4 * 3 * 5 * 7
    assert [c.name for c in difference.changed_operators()] == ["aten.addmm.default"]
    assert difference.operators[0].calls_before - difference.operators[0].calls_after == 4
    assert {
        c.name for c in analysis.diff(encoder(2), encoder(3)).modules if c.before is None
    } == gone


@given(profiles)
def test_exclusive_figures_add_up(profile: Profile) -> None:
    for phase in (None, *PHASES):
        alone = analysis.exclusive(profile.root, phase)
        whole = analysis.inclusive(profile.root, phase)[""]
        assert add_costs(f.cost for f in alone.values()) == whole.cost == profile.root.total(phase)
        assert sum(f.params for f in alone.values()) == whole.params
        assert any(f.lower_bound for f in alone.values()) == whole.lower_bound
        by_type = analysis.by_type(profile, phase)
        assert add_costs(f.cost for f in by_type.values()) == whole.cost
        rows = analysis.operator_rows(profile, phase)
        assert add_costs(row.cost for row in rows) == profile.total(phase)
        by_dtype = analysis.cost_by_dtype(profile, phase)
        assert add_costs(by_dtype.values()) == profile.total(phase)


@given(profiles)
def test_depths_hold_every_module_once(profile: Profile) -> None:
    depths = analysis.by_depth(profile.root)
    modules = [figures.modules for level in depths for figures in level.values()]
    assert sum(modules) == len(list(profile.root.walk()))


def test_deep_and_wide_trees() -> None:
    chain = deep(5_000)
    assert len(analysis.by_depth(chain.root)) == 5_000
    assert analysis.latency_of(chain.root) is None
    assert analysis.diff(chain, chain).changed_modules() == []
    flat = wide(10_000)
    best = analysis.top_modules(flat, "macs", 2)
    assert [figures.cost.macs for _, figures in best] == [10_000, 9_999]


def test_a_key_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="'time' is no figure of a module: choose .*'latency'"):
        top_modules(lenet5(), "time")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("latency_s", "spread_s", "is_exact"),
    [(14.0, None, True), (13.0, None, False), (14.0, 1.4, True), (14.0, 1.5, False)],
)
def test_a_latency_is_exact_from_what_calls_and_timed_operators_take(
    latency_s: float, spread_s: float | None, is_exact: bool
) -> None:
    """2 calls at 5 each, of itself and of its child, and 4 timed operators at 1 each."""
    cost = OpCost(flops=1)
    ops = (
        OpTotal(op="lib.a", phase="forward", calls=4, cost=cost, latency_s=2.0),
        OpTotal(op="lib.view", phase="forward", calls=9, cost=cost),  # not timed
        OpTotal(op="lib.b", phase="backward", calls=9, cost=cost, latency_s=2.0),
    )
    child = ModuleNode(fqn="a.b", name="b", class_name="B", calls=1, latency_s=9.0)
    node = ModuleNode(
        fqn="a", name="a", class_name="A", calls=1, ops=ops, children=(child,),
        latency_s=latency_s, latency_spread_s=spread_s,
    )  # fmt: skip
    root = ModuleNode(fqn="", class_name="Net", children=(node,))
    timing = StepTiming(resolution_s=5.0, operator_resolution_s=1.0)
    assert inexact_latencies(root, timing) == (frozenset() if is_exact else {"a"})
