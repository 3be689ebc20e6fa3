"""The compact tables."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from dispatch_flops.profile import OUTSIDE, ModuleNode, Profile
from dispatch_flops.renderers import table
from tests.helpers.trees import (
    HOSTILE_NAMES,
    SMALL,
    deep,
    encoder,
    lenet5,
    lower_bound,
    profiles,
    training_step,
)

Golden = Callable[[str, str], None]


@pytest.mark.parametrize("name", SMALL)
def test_golden(name: str, golden: Golden) -> None:
    profile = SMALL[name]().check()
    golden(f"table_{name}.txt", table.render(profile) + "\n")
    tables = [
        table.render(profile, depth=2, style="markdown"),
        table.operator_table(profile, style="markdown"),
        table.uncounted_table(profile, style="markdown"),
    ]
    golden(f"table_{name}.md", "\n\n".join(tables) + "\n")


def _modules(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()[2:]]


def test_depth_counts_levels_as_torch_does() -> None:
    profile = lenet5()
    assert len(_modules(table.render(profile, depth=1))) == 1
    assert len(_modules(table.render(profile, depth=2))) == 3
    assert len(_modules(table.render(profile, depth=3))) == 3 + 8 + 3
    assert table.render(profile, depth=None) == table.render(profile, depth=99)
    assert table.render(profile, depth=1).splitlines()[2].split() == [
        *("LeNet5", "61.71", "K", "426.52", "M", "866.08", "M", "100%"),
    ]
    assert " LeNet5.classifier " in table.render(profile, depth=2)
    assert "\n  LeNet5.classifier.0 " in table.render(profile)


def test_phases_have_columns_where_there_are_several() -> None:
    header = table.render(training_step()).splitlines()[0]
    for phase in ("forward", "backward", "recompute", "optimizer"):
        assert f"{phase} FLOPs" in header
    assert "forward FLOPs" not in table.render(lenet5()).splitlines()[0]


def test_work_outside_the_model_has_a_row_and_a_total() -> None:
    rows = _modules(table.render(training_step()))
    assert [row.split()[0] for row in rows] == [
        "Global",
        "Sequential",
        "Sequential.0",
        "Sequential.1",
        "Sequential.2",
        OUTSIDE,
    ]
    total, model, *_, outside = (row.split()[-1].rstrip("%") for row in rows)
    assert total == "100"
    assert float(model) + float(outside) == pytest.approx(100, abs=0.02)
    assert "Global" not in table.render(lenet5())


def test_no_model_at_all() -> None:
    profile = Profile(
        root=ModuleNode(fqn="", class_name="nothing"), outside=training_step().outside
    )
    assert [row.split()[0] for row in _modules(table.render(profile))] == ["Global", OUTSIDE]


def test_lower_bounds_are_marked_up_to_the_top() -> None:
    net, known, partly = _modules(table.render(lower_bound()))
    assert net.count(">=") == partly.count(">=") == 2
    assert known.count(">=") == 0


def test_free_and_unknown_operators_are_told_apart() -> None:
    free = next(r for r in _modules(table.operator_table(training_step())) if "aten.t." in r)
    assert free.split()[1:] == ["free", "forward", "float32", "2", "0", "0", "0%", "0", "B", "n/a"]
    mystery = next(r for r in _modules(table.operator_table(lower_bound())) if "mystery" in r)
    assert mystery.split()[1:] == ["unknown", "forward", "4", *["n/a"] * 5]


def test_operator_times_are_shown_where_measured() -> None:
    assert "Time" not in table.operator_table(training_step())
    ops = training_step().root.children[1].ops
    timed = ModuleNode(
        fqn="",
        class_name="Net",
        ops=tuple(
            type(o)(op=o.op, phase="forward", calls=1, cost=o.cost, latency_s=s)
            for o, s in zip(ops[:2], (6e-6, 2e-6), strict=True)
        ),
    )
    header, _, *rows = table.operator_table(Profile(root=timed)).splitlines()
    assert header.split()[-3:] == ["Time", "%", "Time"]
    assert {tuple(row.split()[-3:]) for row in rows} == {("6", "us", "75%"), ("2", "us", "25%")}


def test_markdown_names_are_no_markup() -> None:
    text = table.render(SMALL["hostile"](), style="markdown")
    assert len(text.splitlines()) == 2 + 1 + len(HOSTILE_NAMES)
    for line in text.splitlines():
        assert line.replace("\\|", "").count("|") == 6
    assert text.count("`") == 2 * (1 + len(HOSTILE_NAMES))


@given(profiles)
def test_every_module_and_operator_is_there_once(profile: Profile) -> None:
    rows = _modules(table.operator_table(profile))
    assert len(rows) == len({(o.op, o.dtype) for o in profile.op_totals()})
    assert len(_modules(table.uncounted_table(profile))) == len(profile.uncounted_ops())
    modules = len(list(profile.root.walk()))
    assert modules <= len(_modules(table.render(profile))) <= modules + 2


def test_deep_tree_is_cut() -> None:
    assert len(_modules(table.render(deep(5_000), depth=3))) == 3
    assert len(_modules(table.render(encoder(1_000), depth=3))) == 3 + 1_000
