"""Operator rows, costs by dtype and phases of hand-built profiles."""

from __future__ import annotations

import pytest

from dispatch_flops import analysis
from dispatch_flops.profile import ModuleNode, Profile, flops_of
from dispatch_flops.profile.cost import STEP_PHASES, ZERO, OpCost
from tests.helpers.trees import SMALL, lenet5, lower_bound, module, op, training_step

MACS = 4 * 64 * 256  # of each Linear of training_step, forward


def test_operator_rows_merge_modules_and_phases() -> None:
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


def test_operator_rows_of_one_phase_have_its_operators_alone() -> None:
    rows = analysis.operator_rows(training_step(), "recompute")
    assert [(row.op, row.calls, row.share) for row in rows] == [("aten.relu.default", 1, 1.0)]


def test_operator_rows_of_two_dtypes_are_apart() -> None:
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


def test_operators_of_equal_cost_are_in_the_order_of_their_dtypes() -> None:
    dtypes = ("float32", None, "bfloat16")
    root = module("Net", ops=tuple(op("aten.add.Tensor", extra_flops=3, dtype=d) for d in dtypes))
    in_order = [None, "bfloat16", "float32"]
    assert [row.dtype for row in analysis.operator_rows(Profile(root=root))] == in_order
    assert list(analysis.cost_by_dtype(Profile(root=root))) == in_order


def test_operator_rows_of_unknown_cost_have_no_figures() -> None:
    rows = {row.op: row for row in analysis.operator_rows(lower_bound())}
    mystery = rows["lib.mystery.default"]
    assert (mystery.cost, mystery.share, mystery.bytes_per_call) == (None, None, None)
    partly = rows["lib.scan.default"]
    assert partly.bytes_per_call == 13 + 17  # one of its three calls has a known cost
    assert partly.share == 22 / (22 + 2 * 3 * 5 * 7)


def test_operator_rows_without_flops_have_no_share() -> None:
    root = ModuleNode(fqn="", class_name="Views", ops=(op("aten.view.default", kind="free"),))
    assert analysis.operator_rows(Profile(root=root))[0].share is None


def test_phases_of_a_profile_are_those_with_operators() -> None:
    assert analysis.phases_of(training_step()) == STEP_PHASES
    assert analysis.phases_of(lenet5()) == ("forward",)
    assert analysis.phases_of(SMALL["empty"]()) == ()
