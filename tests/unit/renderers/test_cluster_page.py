"""The page of a cluster as text: its data, and names as data."""

from __future__ import annotations

import dataclasses

import pytest

from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.renderers import View, cluster_page, html
from dispatch_flops.renderers.html import cluster_modules
from tests.helpers.clusters import four_ranks, of_rank, represented
from tests.helpers.html_pages import page_data
from tests.helpers.trees import encoder, training_step


def test_ranks_have_their_figures_stage_and_mesh_positions() -> None:
    data = page_data(cluster_page.render(four_ranks()))
    assert data["subtitle"] == "4 of 4 ranks, mesh pp 2 x dp 2"
    assert [row["ranks"] for row in data["ranks"]] == [[0], [1], [2], [3]]
    assert [row["stage"] for row in data["ranks"]] == [0, 0, 1, 1]
    assert data["ranks"][2]["at"] == {"pp": "1", "dp": "0"}
    assert [row["values"]["flops"]["all"] for row in data["ranks"]] == [12, 20, 28, 44]
    assert data["spreads"]["flops"]["all"] == {
        "minimum": 12, "maximum": 44, "total": 104, "imbalance": 44 * 4 / 104, "straggler": 3,
        "mark": "",
    }  # fmt: skip
    assert data["spreads"]["bytes"]["all"]["straggler"] is None  # all have 12 bytes


def test_mesh_dimensions_have_a_row_for_each_position() -> None:
    pp, dp = page_data(cluster_page.render(four_ranks()))["mesh"]
    assert (pp["dim"], pp["is_stage"], dp["dim"], dp["is_stage"]) == ("pp", True, "dp", False)
    extremes = [
        (row["text"], of["minimum"], of["maximum"], of["straggler"])
        for row in (*pp["rows"], *dp["rows"])
        for of in (row["spreads"]["flops"]["all"],)
    ]
    assert extremes == [("0", 12, 20, 1), ("1", 28, 44, 3), ("0", 12, 28, 2), ("1", 20, 44, 3)]


def test_represented_ranks_share_a_row_and_missing_ranks_are_a_warning() -> None:
    data = page_data(cluster_page.render(represented()))
    assert [row["ranks"] for row in data["ranks"]] == [[0], [2, 3]]
    assert data["ranks"][1]["at"] == {"pp": "1", "dp": "0-1"}
    assert data["warnings"] == ["Missing: rank 1; totals are of the other ranks"]
    assert data["notes"] == ["a note"]
    assert data["spreads"]["flops"]["all"]["total"] == 12 + 2 * 28
    _, dp = data["mesh"]
    totals = [row["spreads"]["flops"]["all"]["total"] for row in dp["rows"]]
    assert totals == [12 + 28, 28]  # rank 3 is at position 1
    whole = dataclasses.replace(represented(), represented={1: 0, 3: 2})
    _, dp = page_data(cluster_page.render(whole))["mesh"]
    (row,) = dp["rows"]
    assert row["text"] == "0-1"
    assert row["spreads"]["flops"]["all"]["straggler"] == 2
    _, dp = page_data(cluster_page.render(dataclasses.replace(whole, represented={1: 0})))["mesh"]
    assert [row["spreads"]["flops"]["all"]["maximum"] for row in dp["rows"]] == [28, 12]


def test_modules_are_a_tree_for_each_stage() -> None:
    modules = page_data(cluster_page.render(four_ranks()))["modules"]
    rows = list(zip(modules["stage"], modules["name"], modules["parent"], strict=True))
    assert rows == [
        (0, "stage 0", -1), (0, "layers", 0), (0, "0", 1),
        (1, "stage 1", -1), (1, "layers", 3), (1, "0", 4),
    ]  # fmt: skip
    flops = modules["spreads"]["flops"]["all"]
    assert flops[2] == [12, 20, 20 * 2 / 32, 1]  # minimum, maximum, maximum / mean, straggler
    assert modules["spreads"]["communication"]["all"][2] == 64  # equal on both ranks
    assert modules["spreads"]["time"]["all"] is None
    shallow = page_data(cluster_page.render(four_ranks(), View(depth=0)))["modules"]
    assert shallow["fqn"] == ["", ""] and shallow["left_out"] == 4


def test_modules_of_levels_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder with 2 modules, and 3 layers of 6 modules each."""
    cluster = ClusterProfile.merge([encoder(3)])
    whole = page_data(cluster_page.render(cluster))["modules"]
    assert (len(whole["fqn"]), whole["left_out"]) == (21, 0)
    monkeypatch.setattr(cluster_modules, "MOST_ROWS", 20)
    cut = page_data(cluster_page.render(cluster))["modules"]
    assert len(cut["fqn"]) + cut["left_out"] == 21
    assert max(fqn.count(".") for fqn in cut["fqn"]) < max(f.count(".") for f in whole["fqn"])


def test_reader_chooses_the_phase_unless_the_view_does() -> None:
    cluster = ClusterProfile.merge([training_step()])
    assert page_data(cluster_page.render(cluster))["views"] == [
        "all", "forward", "backward", "recompute", "optimizer",
    ]  # fmt: skip
    data = page_data(cluster_page.render(cluster, View(phase="backward")))
    assert data["views"] == ["backward"]
    backward = training_step().total("backward").flops
    assert data["spreads"]["flops"]["backward"]["total"] == backward


@pytest.mark.parametrize("name", ["<b>", "</script>", "\x1b[31m"])
def test_hostile_names_are_data(name: str) -> None:
    page = cluster_page.render(ClusterProfile.merge([of_rank(0, name=name, note=name)]))
    assert f"layers.{name}" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert page_data(page)["modules"]["fqn"][-1] == f"layers.{name}"


def test_page_has_the_style_and_policy_of_the_report() -> None:
    page, report = cluster_page.render(four_ranks()), html.render(of_rank(0))
    style = report[report.index("<style>") : report.index("</style>")]
    assert style in page
    assert "default-src 'none'; script-src 'sha256-" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_page_of_many_ranks_is_below_one_and_a_half_megabytes() -> None:
    base = of_rank(0)
    profiles = {
        rank: dataclasses.replace(
            encoder(12), run=dataclasses.replace(base.run, rank=rank, world_size=64, mesh=None)
        )
        for rank in range(64)
    }
    cluster = ClusterProfile(profiles=profiles, world_size=64)
    assert len(cluster_page.render(cluster).encode()) < 150_000
