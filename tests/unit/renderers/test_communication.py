"""Communication in each format: of a profile built by hand, and of one that sends nothing."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable

import pytest

from dispatch_flops import Profile
from dispatch_flops.cli.formats import FORMATS
from dispatch_flops.renderers import View, communication, overview, table
from dispatch_flops.renderers import csv as csv_renderer
from dispatch_flops.renderers.html.payload import payload
from dispatch_flops.units import count_text
from tests.helpers.communicating import communicating
from tests.helpers.trees import training_step

PROFILE = communicating().check()


def cells(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(name)]
    return line.split()


def test_render_has_a_row_per_total_and_sums_by_kind_and_group() -> None:
    rank, rows, sums = communication.render(PROFILE).split("\n\n")
    assert rank == "Rank 5 of 6, pp 1"
    assert len(rows.splitlines()) == 2 + 5
    assert cells(rows, "1 ") == [
        "1", "forward", "all_to_all", "dp", "(3", "ranks)", "float32", "1", "24", "B", "11", "B",
    ]  # fmt: skip
    assert cells(rows, "Sequential")[:3] == ["Sequential", "forward", "barrier"]
    assert cells(sums, "all_to_all")[-5:] == ["1", "24", "B", "11", "B"]
    whole = 12 + 33 + 24 + 13
    assert cells(sums, "all ")[1:] == ["6", str(whole), "B", str(8 + 22 + 11 + 13), "B"]


def test_render_of_one_phase_has_its_rows_alone() -> None:
    _, rows = communication.render(PROFILE, View(phase="backward")).split("\n\n")
    assert "reduce_scatter" in rows
    assert "all_gather" not in rows


def test_render_in_markdown_is_a_markdown_table() -> None:
    assert "| `<outside>`  | setup" in communication.render(PROFILE, View(style="markdown"))


def test_render_of_a_profile_without_communication_says_so() -> None:
    assert communication.render(training_step()) == "No communication was recorded."


def test_overview_has_a_line_of_sums_and_a_column_of_payloads() -> None:
    text = overview.render(PROFILE, View(width=None))
    assert "Comm     reduce_scatter over dp (3 ranks) 33 B, all_to_all over dp" in text
    assert "Payload" in text
    assert cells(text, "Sequential  ")[-4:-2] == ["69", "B"]  # of all modules: 12 + 33 + 24
    assert "Payload" not in overview.render(training_step(), View(width=None))


def test_tables_of_modules_and_operators_have_a_column_of_payloads() -> None:
    modules = table.render(PROFILE)
    assert cells(modules, "Global")[-2:] == ["82", "B"]
    assert cells(modules, "Sequential.0")[-2:] == ["45", "B"]
    assert "Payload" in table.render(PROFILE, View(table="operators"))
    assert table.render(PROFILE, View(table="communication")) == communication.render(PROFILE)
    assert "Payload" not in table.render(training_step())


def test_csv_of_communication_is_exact() -> None:
    text = csv_renderer.render(PROFILE, View(table="communication"))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 5
    assert rows[2] == {
        "fqn": "1", "phase": "forward", "kind": "all_to_all", "op": "c10d.all_to_all.default",
        "dtype": "float32", "group": "mesh_dp", "group_size": "3", "group_ranks": "1 5 9",
        "mesh_dim": "dp", "calls": "1", "payload_bytes": "24", "bus_bytes": "11",
        "sent_bytes": "0 4 7", "received_bytes": "0 1 2",
    }  # fmt: skip


def test_csv_of_modules_has_the_communication_of_all_below() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_renderer.render(PROFILE))))
    assert [row["comm_payload_bytes"] for row in rows] == ["69", "45", "24", "0", "13"]
    assert [row["comm_calls"] for row in rows] == ["5", "3", "1", "0", "1"]
    assert "comm_calls" not in csv_renderer.render(training_step())


def test_page_has_a_row_per_total() -> None:
    rows = payload(PROFILE, None, "title")["communication"]
    assert rows[2] == {
        "module": "1", "phase": "forward", "kind": "all_to_all", "group": "dp (3 ranks)",
        "dtype": "float32", "calls": 1, "payload": 24, "bus": 11,
    }  # fmt: skip
    assert payload(training_step(), None, "title")["communication"] == []


def test_parameters_of_this_rank_are_shown_where_they_are_a_part() -> None:
    total = PROFILE.total_params
    profile = PROFILE.map_nodes(
        lambda node: dataclasses.replace(node, local_params=node.total_params // 2)
    )
    assert f"parameters ({count_text(total // 2)} on this rank)" in overview.render(profile)
    rows = list(csv.DictReader(io.StringIO(csv_renderer.render(profile))))
    assert rows[0]["local_params"] == str(total // 2)
    assert "on this rank" not in overview.render(PROFILE)


@pytest.mark.parametrize("name", ["comm", "csv-comm", "table", "markdown"])
def test_formats_of_the_command_line_show_communication(name: str) -> None:
    render: Callable[[Profile, View], str] = FORMATS[name].render
    assert "reduce_scatter" in render(PROFILE, View())
