"""The table in notebooks."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from dispatch_flops.renderers import notebook
from dispatch_flops.units import flops_text
from tests.helpers.trees import SMALL, deep, encoder, hostile, lower_bound, training_step, wide


def _table(text: str) -> list[list[str]]:
    """Its rows; that it parses as XML says that every element is closed and every name escaped."""
    root = ElementTree.fromstring(text)
    return [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]


@pytest.mark.parametrize("name", SMALL)
def test_is_well_formed_and_runs_nothing(name: str) -> None:
    text = notebook.render(SMALL[name]())
    rows = _table(text)
    assert len({len(row) for row in rows}) == 1
    tags = set(re.findall(r"<(\w+)", text))
    assert tags <= {"div", "p", "b", "br", "table", "thead", "tbody", "tr", "th", "td"}


def test_identical_layers_are_one_row() -> None:
    rows = _table(notebook.render(encoder(12)))
    (layers,) = [row for row in rows if row[1] == "12 x Layer"]
    assert layers[0].strip() == "0-11"
    macs = 12 * (2 * 3 * 5 * 7 + 2 * 3 * 7 * 5)
    assert layers[3] == f"{macs / 1000:.2f}".rstrip("0") + " K"


def test_totals_and_lower_bound_are_said() -> None:
    assert flops_text(training_step().total().flops) in notebook.render(training_step())
    text = notebook.render(lower_bound())
    assert "Lower bound" in text
    assert "lib.mystery.default (4 calls)" in text
    assert "Lower bound" not in notebook.render(encoder())


def test_names_are_data() -> None:
    assert "<script" not in notebook.render(hostile())
    notebook.render(hostile()).encode()


def test_large_models_are_cut() -> None:
    rows = _table(notebook.render(wide(1_000), most_rows=10))
    assert len(rows) == 1 + 10 + 1
    assert rows[-1][0] == "… 991 more"
    assert len(_table(notebook.render(deep(5_000), depth=3))) == 1 + 4
