"""The compact tables."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import OUTSIDE, ModuleNode, Profile
from dispatch_flops.renderers import View, table
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
OPERATORS, UNCOUNTED = View(table="operators"), View(table="uncounted")


@pytest.mark.parametrize("name", SMALL)
def test_table_of_small_profiles_matches_golden_files(name: str, golden: Golden) -> None:
    profile = SMALL[name]().check()
    golden(f"table_{name}.txt", table.render(profile) + "\n")
    tables = [
        table.render(profile, View(depth=1, style="markdown")),
        table.render(profile, View(table="operators", style="markdown")),
        table.render(profile, View(table="uncounted", style="markdown")),
    ]
    golden(f"table_{name}.md", "\n\n".join(tables) + "\n")


def _modules(text: str) -> list[str]:
    return [line.rstrip() for line in text.partition("\n\n")[0].splitlines()[2:]]


def test_modules_stop_at_the_depth() -> None:
    profile = lenet5()
    assert len(_modules(table.render(profile, View(depth=0)))) == 1
    assert len(_modules(table.render(profile, View(depth=1)))) == 3
    assert len(_modules(table.render(profile, View(depth=2)))) == 3 + 8 + 3
    assert table.render(profile, View(depth=None)) == table.render(profile, View(depth=99))
    assert table.render(profile, View(depth=0)).splitlines()[2].split() == [
        *("LeNet5", "61.71", "K", "426.52", "M", "866.08", "M", "100%"),
    ]
    assert " LeNet5.classifier " in table.render(profile, View(depth=1))
    assert "\n  LeNet5.classifier.0 " in table.render(profile)


def test_modules_have_a_column_per_phase_if_several_ran() -> None:
    header = table.render(training_step()).splitlines()[0]
    for phase in ("forward", "backward", "recompute", "optimizer"):
        assert f"{phase} FLOPs" in header
    assert "forward FLOPs" not in table.render(lenet5()).splitlines()[0]


def test_modules_with_operators_outside_have_a_row_for_them_and_a_total() -> None:
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


def test_modules_without_a_model_show_what_ran_outside() -> None:
    profile = Profile(
        root=ModuleNode(fqn="", class_name="nothing"), outside=training_step().outside
    )
    assert [row.split()[0] for row in _modules(table.render(profile))] == ["Global", OUTSIDE]


def test_modules_mark_lower_bounds_up_to_the_model() -> None:
    net, known, partly = _modules(text := table.render(lower_bound()))
    assert net.count(">=") == partly.count(">=") == 2
    assert known.count(">=") == 0
    assert "\n\nNumbers marked >= are lower bounds, and shares are of what was counted." in text
    assert "what was counted" not in table.render(lenet5())


def test_operators_that_are_free_or_unknown_differ() -> None:
    free = next(r for r in _modules(table.render(training_step(), OPERATORS)) if "aten.t." in r)
    assert free.split()[1:] == ["free", "forward", "float32", "2", "0", "0", "0%", "0", "B", "n/a"]
    mystery = next(r for r in _modules(table.render(lower_bound(), OPERATORS)) if "mystery" in r)
    assert mystery.split()[1:] == ["unknown", "forward", "4", *["n/a"] * 5]


def test_operators_show_times_if_measured() -> None:
    assert "Time" not in table.render(training_step(), OPERATORS)
    ops = training_step().root.children[1].ops
    timed = ModuleNode(
        fqn="",
        class_name="Net",
        ops=tuple(
            type(o)(op=o.op, phase="forward", calls=1, cost=o.cost, latency_s=s)
            for o, s in zip(ops[:2], (6e-6, 2e-6), strict=True)
        ),
    )
    header, _, *rows = table.render(Profile(root=timed), OPERATORS).splitlines()
    assert header.split()[-3:] == ["Time", "%", "Time"]
    assert {tuple(row.split()[-3:]) for row in rows} == {("6", "us", "75%"), ("2", "us", "25%")}


def test_markdown_escapes_hostile_names() -> None:
    text = table.render(SMALL["hostile"](), View(style="markdown"))
    assert len(text.splitlines()) == 2 + 1 + len(HOSTILE_NAMES)
    for line in text.splitlines():
        assert line.replace("\\|", "").count("|") == 6
    assert text.count("`") == 2 * (1 + len(HOSTILE_NAMES))


def test_table_of_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="table='phases'"):
        table.render(lenet5(), View(table="phases"))  # type: ignore[arg-type]


@given(profiles)
def test_table_of_any_profile_lists_each_module_and_operator_once(profile: Profile) -> None:
    rows = _modules(table.render(profile, OPERATORS))
    assert len(rows) == len({(o.op, o.dtype) for o in profile.op_totals()})
    assert len(_modules(table.render(profile, UNCOUNTED))) == len(profile.uncounted_ops())
    modules = len(list(profile.root.walk()))
    assert modules <= len(_modules(table.render(profile))) <= modules + 2


@pytest.mark.slow
def test_modules_of_large_trees_stop_at_the_depth() -> None:
    assert len(_modules(table.render(deep(5_000), View(depth=2)))) == 3
    assert len(_modules(table.render(encoder(1_000), View(depth=2)))) == 3 + 1_000
