"""Comma-separated values."""

from __future__ import annotations

import csv as stdlib_csv
import io
from collections.abc import Callable

import pytest
from hypothesis import given

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import HeldBytes, ModuleMemory, Profile
from dispatch_flops.profile.cost import STEP_PHASES
from dispatch_flops.renderers import View, csv
from tests.helpers.trees import (
    HOSTILE_NAMES,
    SMALL,
    lenet5,
    module,
    place,
    profiles,
    timed,
    training_step,
)

OPERATORS = View(table="operators")
Golden = Callable[[str, str], None]


@pytest.mark.parametrize("name", ["training_step", "hostile", "lower_bound"])
def test_csv_of_small_profiles_matches_golden_files(name: str, golden: Golden) -> None:
    profile = SMALL[name]().check()
    golden(f"{name}_modules.csv", csv.render(profile))
    golden(f"{name}_operators.csv", csv.render(profile, OPERATORS))


def _rows(text: str) -> list[dict[str, str]]:
    return list(stdlib_csv.DictReader(io.StringIO(text, newline="")))


def test_modules_have_exact_numbers() -> None:
    rows = {row["fqn"]: row for row in _rows(csv.render(training_step()))}
    assert list(rows) == ["", "0", "1", "2", "<outside>"]
    assert int(rows["0"]["forward_macs"]) == 4 * 64 * 256
    assert int(rows[""]["total_macs"]) == 5 * 4 * 64 * 256
    assert int(rows[""]["total_params"]) == 2 * 64 * 256 + 64 + 256
    assert rows["0"]["latency_s"] == "3.815e-05"
    assert rows["0"]["backward_latency_s"] == ""  # not measured, not 0
    assert float(rows[""]["latency_s"]) == pytest.approx(38.15e-6 + 15.74e-6 + 15.02e-6)
    assert rows["2"]["depth"] == "1"


def test_latencies_of_a_container_are_the_sums_of_its_children() -> None:
    children = (
        module("Linear", name=str(i), seconds=timed(forward=2.0 * i, backward=3.0 * i))
        for i in (1, 2)
    )
    layers = module("ModuleList", *children, name="layers", calls=0)
    rows = {
        row["fqn"]: row for row in _rows(csv.render(Profile(root=place(module("Net", layers)))))
    }
    assert (rows["layers"]["latency_s"], rows["layers"]["backward_latency_s"]) == ("6.0", "9.0")


def test_memory_that_is_known_of_some_modules_alone_has_columns() -> None:
    held = HeldBytes(parameters=105)
    leaf = module("Linear", name="a", memory=ModuleMemory(own=held, total=held))
    rows = {row["fqn"]: row for row in _rows(csv.render(Profile(root=place(module("Net", leaf)))))}
    assert [rows[fqn]["total_parameters_bytes"] for fqn in ("", "a")] == ["", "105"]


def test_operators_have_exact_numbers() -> None:
    rows = _rows(csv.render(training_step(), OPERATORS))
    assert sum(int(row["macs"]) for row in rows) == 5 * 4 * 64 * 256
    assert {row["phase"] for row in rows} == set(STEP_PHASES)
    unknown = [
        row
        for row in _rows(csv.render(SMALL["lower_bound"](), OPERATORS))
        if row["uncounted"] == "4"
    ]
    assert unknown[0]["macs"] == ""
    header = csv.render(training_step(), OPERATORS).splitlines()[0]
    assert csv.render(SMALL["empty"](), OPERATORS) == f"{header}\n"


def test_hostile_names_are_unchanged() -> None:
    text = csv.render(SMALL["hostile"]())
    text.encode()  # no lone surrogate is left
    names = [name.replace("\ud800", "\\ud800") for name in HOSTILE_NAMES]
    assert [row["class_name"] for row in _rows(text)[1:-1]] == names


@given(profiles)
def test_csv_of_any_profile_adds_up_to_the_total(profile: Profile) -> None:
    modules = _rows(csv.render(profile))
    assert len(modules) == len(list(profile.nodes()))
    assert sum(int(row["own_flops"]) for row in modules) == profile.total().flops
    operators = _rows(csv.render(profile, OPERATORS))
    assert sum(int(row["flops"] or 0) for row in operators) == profile.total().flops


def test_csv_of_another_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="table='uncounted'"):
        csv.render(lenet5(), View(table="uncounted"))
