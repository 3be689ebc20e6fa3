"""Every way of running a model gives the same counts."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.helpers.paths import BENCHMARKS
from tests.models import CASES

sys.path.append(str(BENCHMARKS))

import matrix

pytestmark = pytest.mark.usefixtures("fresh_compiler")

NAMES = ("U-Net", "shared linear", "LoRA")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in NAMES], ids=lambda case: case.name
)
def test_row_run_in_every_way_counts_the_same(case: Any) -> None:
    found = matrix.row(case.build)
    assert set(found) == set(matrix.WAYS)
    truth = found["eager"]
    assert truth["forward", ""] == case.macs
    assert {way for way, counts in found.items() if counts != truth} == set()


def test_cell_that_differs_shows_its_count() -> None:
    truth = {("forward", ""): 6, ("backward", ""): 12}
    assert matrix._cell(dict(truth), truth) == "="
    assert matrix._cell({("forward", ""): 3, ("backward", ""): 6}, truth) == "9"
