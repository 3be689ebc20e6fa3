"""Published MFU against our counts at the throughput of the publisher."""

from __future__ import annotations

import pytest

from benchmarks.published_mfu import (
    DEFINITION,
    TOLERANCE,
    Row,
    beyond_rounding,
    figures,
    read_rows,
    why_it_differs,
)
from benchmarks.published_models import config_of

ROWS = list(read_rows())
# The models that are counted in about a second, one length of sequence each.
SMALL = [row for row in ROWS if (row.model, row.sequence) in {("mpt-125m", 2048), ("mpt-1b", 512)}]


def test_parameters_of_every_row_are_those_the_publisher_states() -> None:
    stated = [row for row in ROWS if row.params is not None]
    assert len(stated) > 200
    for row in stated:
        assert config_of(row.model, row.sequence).params == row.params, row


@pytest.mark.slow
@pytest.mark.parametrize("row", SMALL, ids=lambda row: f"{row.model} {row.gpus} {row.machine}")
def test_mfu_of_a_published_row_is_that_of_the_publishers_definition(row: Row) -> None:
    ours = figures(row)
    assert row.mfu == pytest.approx(ours[DEFINITION[row.publisher]], abs=0.02)
    assert row.mfu == pytest.approx(ours["all"], abs=TOLERANCE)


def test_unit_of_a_published_figure_is_that_of_its_last_digit() -> None:
    assert {row.mfu: row.mfu_unit for row in ROWS if row.mfu in (33.0, 46.2, 41.25)} == {
        33.0: 1.0, 46.2: pytest.approx(0.1), 41.25: pytest.approx(0.01),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.publisher == "torchtitan 2024-12"], ids=lambda row: row.gpus
)
def test_mfu_in_whole_per_cent_is_explained_by_rounding(row: Row) -> None:
    assert row.mfu_unit == 1.0
    assert beyond_rounding(row) == 0.0
    assert why_it_differs(row, figures(row)) == ""
