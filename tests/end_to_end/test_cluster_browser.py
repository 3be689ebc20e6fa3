"""The page of a cluster in a real browser, at the widths of a desktop and of a telephone."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium.webdriver")
from dispatch_flops.distributed import simulate
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profile.mesh_positions import mesh_dims
from dispatch_flops.renderers import cluster_page
from tests.end_to_end import test_html_browser
from tests.end_to_end.test_html_browser import (  # noqa: F401
    Report,
    at_width,
    driver,
    photograph,
)
from tests.helpers.clusters import four_ranks, of_rank, represented
from tests.helpers.trees import training_step
from tests.models.parallel_jobs import JOBS

pytestmark = test_html_browser.pytestmark


@pytest.fixture
def open_cluster(driver: Any, tmp_path: Path) -> Iterator[Callable[..., Report]]:  # noqa: F811
    """Open the page of a cluster; it must log no message and make no request by the end."""
    report = Report(driver)

    def open_(cluster: ClusterProfile) -> Report:
        path = tmp_path / "cluster.html"
        path.write_text(cluster_page.render(cluster), encoding="utf-8")
        driver.get(path.as_uri())
        report.until(lambda: driver.find_elements("css selector", "#modules tbody tr"))
        report.until(lambda: driver.find_elements("css selector", "#bars svg, #bars[hidden]"))
        return report

    yield open_
    assert report.messages() == []
    assert report.requests() == []


def test_straggler_and_imbalance_are_named(open_cluster: Callable[..., Report]) -> None:
    report = open_cluster(four_ranks())
    assert report.texts("#ranks-note") == [
        "FLOPs: 12 to 44. Maximum / mean is 1.69; rank 3 is the straggler."
    ]
    assert report.attributes("#bars .straggler", "data-rank") == ["3"]
    assert len(report.texts("#bars .mean")) == 1
    cards = dict(zip(report.texts("#headline dt"), report.texts("#headline .value"), strict=True))
    assert cards["FLOPs, all ranks"] == "104"
    assert cards["Time, most of a rank"] == "1 s"


def test_bars_are_of_the_chosen_figure_and_coloured_by_stage(
    open_cluster: Callable[..., Report],
) -> None:
    report = open_cluster(four_ranks())
    heights = (
        "return [...document.querySelectorAll('#bars .rank-bar rect')]"
        ".map((e) => Number(e.getAttribute('height')))"
    )
    flops = report.run(heights)
    assert [height / flops[3] for height in flops] == pytest.approx([12 / 44, 20 / 44, 28 / 44, 1])
    fills = [name.split()[1] for name in report.attributes("#bars .rank-bar", "class")]
    assert fills == ["fill-0", "fill-0", "fill-1", "fill-1"]
    report.choose("figure", "communication")
    sent = report.run(heights)
    assert [height / sent[3] for height in sent] == pytest.approx([0.2, 0.2, 0.2, 1])
    assert report.column("ranks", report.heading("ranks", "Communication")) == [
        "64 B", "64 B", "64 B", "320 B",
    ]  # fmt: skip
    report.choose("figure", "bytes")
    assert report.texts("#ranks-note") == ["Bytes: 12 B on every rank."]
    assert not report.texts("#bars .straggler")


def test_mesh_groups_and_modules_are_tables_with_their_straggler(
    open_cluster: Callable[..., Report],
) -> None:
    report = open_cluster(four_ranks())
    assert report.texts("#mesh h3") == ["Along pp, the stages of the pipeline", "Along dp"]
    assert report.column("mesh-0", report.heading("mesh-0", "FLOPs")) == ["12 to 20", "28 to 44"]
    assert report.column("mesh-1", report.heading("mesh-1", "Straggler")) == ["rank 2", "rank 3"]
    assert report.column("groups", 1) == ["dp"]
    heading = report.heading("groups", "Payload of a rank")
    assert report.column("groups", heading) == ["64 B to 320 B"]
    assert report.column("groups", report.heading("groups", "Straggler")) == ["rank 3"]
    assert report.texts("#modules tbody .label") == [
        "stage 0", "layers", "0", "stage 1", "layers", "0",
    ]  # fmt: skip
    assert report.column("modules", report.heading("modules", "Straggler")) == [
        *["rank 1"] * 3, *["rank 3"] * 3,
    ]  # fmt: skip
    report.search("modules", "stage 1 linear")
    assert report.texts("#modules tbody .label") == ["stage 1", "layers", "0"]


def test_columns_of_what_is_uneven_are_there_only_where_something_is(
    open_cluster: Callable[..., Report],
) -> None:
    even = ClusterProfile.merge([of_rank(2)])
    report = open_cluster(even)
    assert not any("Straggler" in text for text in report.texts("thead th"))
    assert "Stage" in report.texts("#ranks thead th")


def test_phase_is_chosen_by_the_reader(open_cluster: Callable[..., Report]) -> None:
    profile = training_step()
    report = open_cluster(ClusterProfile.merge([profile]))
    report.choose("view", "optimizer")
    flops = profile.total("optimizer").flops
    assert report.column("ranks", report.heading("ranks", "FLOPs")) == [
        test_html_browser.units.count_text(flops)
    ]
    assert not report.driver.find_element("id", "mesh-section").is_displayed()


def test_missing_ranks_and_notes_are_shown(open_cluster: Callable[..., Report]) -> None:
    report = open_cluster(represented())
    assert report.texts("#warnings p") == ["Missing: rank 1; totals are of the other ranks"]
    assert report.texts("#notes li") == ["a note"]
    assert report.attributes("#bars .rank-bar", "data-rank") == ["0", "2", "3"]
    open_cluster(four_ranks())
    assert not report.driver.find_element("id", "warnings").is_displayed()


def test_sets_of_equal_ranks_have_the_bars_of_a_large_cluster(
    open_cluster: Callable[..., Report],
) -> None:
    """Two representatives of 500 ranks each."""
    mesh = {"pp": 2, "dp": 500}
    profiles = {
        rank: dataclasses.replace(
            of_rank(rank // 250),
            run=dataclasses.replace(
                of_rank(0).run, rank=rank, world_size=1000, mesh=mesh_dims(rank, mesh)
            ),
        )
        for rank in (0, 500)
    }
    others = {rank: rank - rank % 500 for rank in range(1000) if rank % 500}
    report = open_cluster(ClusterProfile(profiles=profiles, represented=others, world_size=1000))
    assert report.attributes("#bars .rank-bar", "data-rank") == ["0", "500"]
    assert report.column("ranks", 1) == ["0-499", "500-999"]
    assert report.column("ranks", report.heading("ranks", "dp")) == ["0-499", "0-499"]


def test_rows_are_collapsed_and_figures_chosen_from_the_keyboard(
    open_cluster: Callable[..., Report],
) -> None:
    report = open_cluster(four_ranks())
    report.press("#modules tbody tr:nth-child(1) button.toggle")
    assert report.texts("#modules tbody .label") == ["stage 0", "stage 1", "layers", "0"]
    chosen = report.driver.find_element("css selector", "input[name=figure][value=flops]")
    chosen.send_keys("\ue014")  # arrow right
    assert report.run("return document.activeElement.value") == "bytes"
    assert report.texts("#ranks-note")[0].startswith("Bytes: ")
    for selector in ("#ranks .scroll", "#mesh-0 .scroll", "#groups .scroll", "#modules .scroll"):
        assert report.attributes(selector, "tabindex") == ["0"]
    assert report.run(
        "return [...document.querySelectorAll('tbody tr')]"
        ".every((row) => row.querySelector('th[scope=row]'))"
    )
    assert report.attributes("#bars", "aria-label")[0].startswith("Bytes of each rank.")


def test_page_of_eight_simulated_ranks_names_stages_and_groups(
    open_cluster: Callable[..., Report],
    photograph: Callable[..., None],  # noqa: F811
) -> None:
    """A transformer over 2 stages, FSDP2 and tensor parallel; the last stage has the logits."""
    job = JOBS["pp_fsdp_tp"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of tensors without data
        cluster = simulate(job.run, job.mesh, ranks=range(8))
    report = open_cluster(cluster)
    assert len(report.texts("#bars .rank-bar")) == 8
    assert report.texts("#mesh h3")[1:] == ["Along dp", "Along tp"]
    assert {"pp", "dp", "tp"} == set(report.column("groups", 1))
    macs = [cluster.value(rank, "macs") for rank in range(8)]
    assert (
        report.run("return [...document.querySelectorAll('#bars .straggler')].length") == 1
        and cluster.stage(cluster.straggler("macs") or 0) == 1
    )
    assert macs[0] == macs[3] != macs[4] == macs[7]
    photograph("report_cluster.png")


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("make", [four_ranks, represented])
def test_page_of_a_cluster_does_not_scroll_sideways(
    make: Callable[[], ClusterProfile],
    width: int,
    open_cluster: Callable[..., Report],
    driver: Any,  # noqa: F811
) -> None:
    with at_width(driver, width):
        report = open_cluster(make())
        assert report.run("return document.documentElement.scrollWidth") == width
        assert report.run("return document.querySelector('#bars svg').clientWidth") < width
