"""The table in notebooks."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import pytest

from dispatch_flops.analysis.machines import MACHINES
from dispatch_flops.renderers import View, notebook
from dispatch_flops.units import flops_text
from tests.helpers.trees import (
    SMALL,
    deep,
    encoder,
    hostile,
    lower_bound,
    training_step,
    unknown,
    varying,
    wide,
)


def _table(text: str) -> list[list[str]]:
    """Return the rows; XML that parses has closed elements and escaped names."""
    root = ElementTree.fromstring(text)
    return [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]


@pytest.mark.parametrize("name", SMALL)
def test_notebook_is_well_formed_without_scripts(name: str) -> None:
    text = notebook.render(SMALL[name]())
    rows = _table(text)
    assert len({len(row) for row in rows}) == 1
    tags = set(re.findall(r"<(\w+)", text))
    assert tags <= {"div", "p", "b", "br", "table", "thead", "tbody", "tr", "th", "td"}


def test_notebook_shows_identical_layers_as_one_row() -> None:
    rows = _table(notebook.render(encoder(12)))
    (layers,) = [row for row in rows if row[1] == "12 x Layer"]
    assert layers[0].strip() == "0-11"
    macs = 12 * (2 * 3 * 5 * 7 + 2 * 3 * 7 * 5)
    assert layers[3] == f"{macs / 1000:.2f}".rstrip("0") + " K"


def test_notebook_shows_totals_and_lower_bounds() -> None:
    assert flops_text(training_step().total().flops) in notebook.render(training_step())
    text = notebook.render(lower_bound())
    assert "Lower bound" in text
    assert "lib.mystery.default (4 calls)" in text
    assert "; shares are of what was counted</p>" in text
    assert f"FLOPs: forward &gt;= {2 * 7 * 3 * 5 + 22}" in text
    assert "Lower bound" not in notebook.render(encoder())


def test_notebook_marks_latencies_that_are_inexact() -> None:
    rows = _table(notebook.render(varying("layer.2"), View(depth=2, fold=False)))
    latencies = {row[0].strip(): row[-1] for row in rows}
    assert (latencies["1"], latencies["2"]) == ("2 ms", "~3 ms")


def test_notebook_has_a_row_of_work_outside_the_model_that_has_no_cost() -> None:
    outside = dataclasses.replace(training_step().outside, ops=(unknown("lib.a"),), children=())
    rows = _table(notebook.render(dataclasses.replace(encoder(2), outside=outside)))
    assert rows[-1][1:5] == ["outside", "0", ">= 0", ">= 0"]


def test_notebook_escapes_hostile_names() -> None:
    assert "<script" not in notebook.render(hostile())
    notebook.render(hostile()).encode()


def test_notebook_stops_after_100_rows_and_at_the_depth() -> None:
    rows = _table(notebook.render(wide(1_000)))
    assert len(rows) == 1 + 100 + 1
    assert rows[-1][0] == "… 901 more"
    assert len(_table(notebook.render(deep(5_000), View(depth=3)))) == 1 + 4


def test_notebook_of_an_unfolded_view_has_a_row_per_layer() -> None:
    rows = _table(notebook.render(encoder(12), View(depth=2)))
    assert sum(row[1] == "Layer" for row in rows) == 12


def test_notebook_takes_the_peak_from_the_view() -> None:
    machine = MACHINES["NVIDIA A100-SXM4-80GB"]
    assert "MFU" not in notebook.render(training_step())
    assert "MFU" in notebook.render(training_step(), View(machine=machine))


def test_notebook_with_a_machine_says_why_the_utilisation_is_not_known() -> None:
    machine = MACHINES["NVIDIA A100-SXM4-80GB"]
    assert "MFU n/a of NVIDIA A100-SXM4-80GB: the time was not measured" in notebook.render(
        wide(3), View(machine=machine)
    )
    assert "MFU" not in notebook.render(wide(3))
