"""What the ranks of a cluster send and receive, as tables."""

from __future__ import annotations

import dataclasses

from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.renderers import View, cluster_communication
from tests.helpers.clusters import four_ranks, of_rank, represented


def rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of the modules."""
    section = text.split("\n\n")[2]
    return [
        [cell.strip() for cell in line.split("  ") if cell] for line in section.splitlines()[2:]
    ]


def test_stages_have_rows_of_their_own_with_ranges_over_ranks() -> None:
    same = ["layers.0", "backward", "reduce_scatter", "dp (2 ranks)", "float32", "2", "1"]
    # on the bus of 2 ranks: half of the payload
    assert rows(cluster_communication.render(four_ranks())) == [
        ["0", *same, "64 B", "32 B"],
        ["1", *same, "64 B to 320 B", "32 B to 160 B"],
    ]


def test_represented_ranks_are_counted() -> None:
    text = cluster_communication.render(represented())
    assert [row[6] for row in rows(text)] == ["1", "2"]
    assert "- Missing: rank 1;" in text
    (line,) = [line for line in text.splitlines() if line.startswith("dp (2 ranks)")]
    assert "192 B" in line  # 3 ranks of 64 B


def test_phase_restricts_the_rows() -> None:
    view = View(phase="forward")
    assert cluster_communication.render(four_ranks(), view).endswith(
        "No communication was recorded."
    )


def test_cluster_without_a_pipeline_has_no_column_of_stages() -> None:
    run = dataclasses.replace(of_rank(0).run, mesh=None)
    alone = ClusterProfile.merge([dataclasses.replace(of_rank(0), run=run)])
    assert rows(cluster_communication.render(alone))[0][0] == "layers.0"
    markdown = cluster_communication.render(alone, View(style="markdown"))
    assert "| `layers.0`" in markdown and "## Communication by module" in markdown
