"""Tables of a cluster."""

from __future__ import annotations

import dataclasses

import pytest

from dispatch_flops.profile import MemoryProfile, OpTotal
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.renderers import View, cluster_page, cluster_table
from dispatch_flops.renderers.cluster_marks import Marks
from tests.helpers.clusters import four_ranks, of_rank, represented
from tests.helpers.html_pages import page_data


def cells(text: str, start: str) -> list[str]:
    """Return the cells of the first line that starts so."""
    line = next(line for line in text.splitlines() if line.startswith(start))
    return [cell for cell in line.split("  ") if cell]


def test_figures_over_ranks_are_shown_with_their_straggler() -> None:
    text = cluster_table.render(four_ranks())
    assert text.startswith("4 of 4 ranks, mesh pp 2 x dp 2\n")
    # 52 MACs on 4 ranks: 22 / 13
    row = [cell.strip() for cell in cells(text, "MACs")]
    assert row == ["MACs", "6 MACs", "22 MACs", "1.69", "rank 3", "52 MACs"]
    row = [cell.strip() for cell in cells(text, "Communication")]
    assert row == ["Communication", "64 B", "320 B", "2.5", "rank 3", "512 B"]
    assert cells(text, "Time")[-1].strip() == "-"  # ranks run at once


def test_uneven_ranks_have_rows_of_their_own_and_equal_ones_share_a_row() -> None:
    section = cluster_table.render(four_ranks()).split("Ranks\n")[1].split("Along")[0]
    assert [line.split()[0] for line in section.splitlines()[3:] if line] == ["0", "1", "2", "3"]
    section = cluster_table.render(represented()).split("Ranks\n")[1].split("Along")[0]
    assert [line.split()[0] for line in section.splitlines()[3:] if line] == ["0", "2-3"]


def test_missing_ranks_and_notes_come_first() -> None:
    text = cluster_table.render(represented())
    assert text.splitlines()[:3] == [
        "3 of 4 ranks, 2 simulated, mesh pp 2 x dp 2",
        "- Missing: rank 1; totals are of the other ranks",
        "- a note",
    ]


def test_ranks_whose_peak_of_memory_is_not_exact_are_named() -> None:
    lower = MemoryProfile(devices=(), unseen=("aten.a",))
    about = MemoryProfile(devices=(), unseen=("aten.a",), decomposed=("aten.lstm.input",))
    memories = (lower, MemoryProfile(devices=()), about, about)
    merged = ClusterProfile.merge(
        dataclasses.replace(of_rank(rank), memory=memory) for rank, memory in enumerate(memories)
    )
    said = ["Peak memory is a lower bound on rank 0", "Peak memory is approximate on ranks 2-3"]
    assert cluster_table.render(merged).splitlines()[1:3] == [f"- {text}" for text in said]
    assert page_data(cluster_page.render(merged))["warnings"] == said
    marks = Marks(merged, None)
    assert [marks.of([rank], "memory") for rank in range(4)] == [">= ", "", "~ ", "~ "]
    assert marks.of(range(4), "memory") == "~ "


def test_figures_of_unknown_cost_are_marked_where_they_are_lower_bounds() -> None:
    """Rank 2, of the second stage, runs an operator without a cost in forward."""
    unknown = OpTotal(op="lib.a", phase="forward", calls=1, cost=None, uncounted=1)
    ranks = [of_rank(rank) for rank in range(4)]
    root = dataclasses.replace(ranks[2].root, ops=(unknown,))
    ranks[2] = dataclasses.replace(ranks[2], root=root)
    merged = ClusterProfile.merge(ranks)
    text = cluster_table.render(merged)
    row = [cell.strip() for cell in cells(text, "MACs")]
    assert row == ["MACs", ">= 6 MACs", ">= 22 MACs", "1.69", "rank 3", ">= 52 MACs"]
    rows = {line.split()[0]: line for line in text.split("Ranks\n")[1].splitlines()[3:7]}
    assert [rank for rank, line in rows.items() if ">= " in line] == ["2"]
    modules = text.split("Modules, of one rank")[1].splitlines()
    assert [line.split()[:2] for line in modules if ">= " in line] == [["1", "(model)"]]
    assert ">= " not in cluster_table.render(merged, View(phase="backward")).split("Over ranks")[1]

    page = page_data(cluster_page.render(merged))
    assert page["spreads"]["flops"]["all"]["mark"] == "≥ "
    assert [row["marks"]["flops"]["all"] for row in page["ranks"]] == ["", "", "≥ ", ""]
    [dp] = [part["rows"] for part in page["mesh"] if part["dim"] == "dp"]
    assert [row["spreads"]["flops"]["all"]["mark"] for row in dp] == ["≥ ", ""]
    of = page["modules"]
    assert [(of["stage"][i], of["fqn"][i]) for i in of["lower_bound"]["all"]] == [(1, "")]


def test_note_of_a_single_rank_names_it() -> None:
    merged = ClusterProfile.merge([of_rank(0), of_rank(1, note="late")])
    assert "- rank 1: late\n" in cluster_table.render(merged)


def test_modules_of_stages_are_apart() -> None:
    text = cluster_table.render(four_ranks(), View(style="markdown"))
    rows = [line.replace(" ", "") for line in text.splitlines() if "`layers.0`" in line]
    assert rows == [
        "|0|`layers.0`|1|12FLOPsto20FLOPs|64B|",
        "|1|`layers.0`|3|28FLOPsto44FLOPs|64Bto320B|",
    ]
    assert "`layers`" not in cluster_table.render(four_ranks(), View(style="markdown", depth=0))


def test_phase_restricts_the_figures() -> None:
    text = cluster_table.render(four_ranks(), View(phase="backward"))
    assert "Over ranks, backward" in text
    assert [cell.strip() for cell in cells(text, "MACs")][1] == "0 MACs"
    assert [cell.strip() for cell in cells(text, "Communication")][-1] == "512 B"


@pytest.mark.parametrize("name", ["<b>", "</script>", "\x1b[31m"])
def test_hostile_names_are_text(name: str) -> None:
    merged = ClusterProfile.merge([of_rank(0, name=name)])
    assert "\x1b" not in cluster_table.render(merged)
    piped = ClusterProfile.merge([of_rank(0, name="a|b`c")])
    assert "`layers.a\\|b'c`" in cluster_table.render(piped, View(style="markdown"))


def test_communication_is_shown_by_group_with_its_straggler() -> None:
    """Reduce-scatters of 64, 64, 64 and 320 bytes, half of which are on the bus."""
    row = [cell.strip() for cell in cells(cluster_table.render(four_ranks()), "dp (2 ranks)")]
    assert row == [
        "dp (2 ranks)", "reduce_scatter", "64 B to 320 B", "2.5", "rank 3", "512 B", "256 B",
    ]  # fmt: skip
    forward = cluster_table.render(four_ranks(), View(phase="forward"))
    assert "Communication by group" not in forward
