"""Phases are taken from the profile: one that this release does not record passes everywhere."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from dispatch_flops import Profile, analysis, diff, renderers
from dispatch_flops.analysis import Machine
from dispatch_flops.cli.check import violations
from dispatch_flops.profile import (
    DeviceMemory,
    MemoryPeak,
    MemoryProfile,
    MemoryUse,
    ModuleNode,
    PeakMoment,
    StepTiming,
)
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.renderers import (
    View,
    chrome_trace,
    cluster_page,
    cluster_table,
    collapsed,
    communication,
    dataframe,
    deepspeed,
    html,
    memory_table,
    notebook,
    overview,
    plots,
    scalars,
    table,
)
from dispatch_flops.renderers import csv as csv_renderer
from tests.helpers.communicating import total
from tests.helpers.html_pages import page_data
from tests.helpers.trees import op, timed, training_step

EXTRA: Any = "extra"
MACS = 3 * 5 * 7
MACHINE = Machine(name="test", flops_per_s={"float32": 1e12, "bfloat16": 1e12}, bytes_per_s=1e9)


def with_extra() -> Profile:
    """A training step whose first module also works in a phase of its own for 2 s."""
    profile = training_step()
    ops = (op("lib.prepare.default", EXTRA, macs=MACS, n_bytes=(11, 13), latency_s=2.0),)

    def add(node: ModuleNode) -> ModuleNode:
        if node.fqn != "0":
            return node
        seconds = timed(**node.seconds, extra=2.0)
        return dataclasses.replace(node, ops=(*ops, *node.ops), seconds=seconds)

    timing = dataclasses.replace(profile.timing, seconds=timed(**profile.timing.seconds, extra=2.0))
    return dataclasses.replace(
        profile.map_nodes(add),
        timing=timing,
        communication=(total("send", phase=EXTRA), total("recv")),
    )


PROFILE = with_extra()
COARSE = dataclasses.replace(
    PROFILE, timing=dataclasses.replace(PROFILE.timing, operator_resolution_s=3.0)
)
UNKNOWN_EXTRA = PROFILE.map_nodes(
    lambda node: dataclasses.replace(
        node,
        ops=tuple(
            dataclasses.replace(op, cost=None, uncounted=op.calls) if op.phase == EXTRA else op
            for op in node.ops
        ),
    )
)


def test_totals_of_another_phase_are_its_own() -> None:
    assert PROFILE.check().total(EXTRA).macs == MACS
    assert PROFILE.total().macs == training_step().total().macs + MACS
    assert PROFILE.model_total() == training_step().model_total()
    assert PROFILE.by_module(EXTRA)[""].macs == MACS
    assert list(PROFILE.by_operator(EXTRA)) == ["lib.prepare.default"]
    assert PROFILE.node("0").latency(EXTRA) == 2.0


def test_saved_profile_with_another_phase_is_read_back() -> None:
    again = Profile.from_json(PROFILE.to_json())
    assert again == PROFILE
    assert again.total(EXTRA).macs == MACS


def test_diff_and_check_of_another_phase_find_its_cost() -> None:
    difference = diff(training_step(), PROFILE, EXTRA)
    assert difference.total.after is not None
    assert difference.total.after.cost.macs == MACS
    assert not list(violations(PROFILE, {"macs": MACS, "latency": 2.0}, EXTRA, False))
    (line,) = violations(PROFILE, {"macs": MACS - 1}, EXTRA, False)
    assert line.startswith("MACs: ")
    assert list(violations(training_step(), {"latency": 2.0}, EXTRA, False))


ANALYSES: dict[str, Callable[[], object]] = {
    "by_depth": lambda: analysis.by_depth(PROFILE.root, EXTRA),
    "by_type": lambda: analysis.by_type(PROFILE, EXTRA),
    "compute_s": lambda: analysis.compute_s(PROFILE.op_totals(), MACHINE),
    "cost_by_dtype": lambda: analysis.cost_by_dtype(PROFILE, EXTRA),
    "diff": lambda: analysis.diff(PROFILE, PROFILE, EXTRA),
    "exclusive": lambda: analysis.exclusive(PROFILE.root, EXTRA),
    "fold": lambda: analysis.fold(PROFILE.root),
    "headline": lambda: analysis.headline(PROFILE, MACHINE),
    "hfu": lambda: analysis.hfu(PROFILE, MACHINE, 1.0),
    "hfu_is_lower_bound": lambda: analysis.hfu_is_lower_bound(UNKNOWN_EXTRA, MACHINE),
    "inclusive": lambda: analysis.inclusive(PROFILE.root, EXTRA),
    "inexact_latencies": lambda: analysis.inexact_latencies(
        PROFILE.root, StepTiming(resolution_s=1.0)
    ),
    "inexact_phases": lambda: EXTRA in analysis.inexact_phases(COARSE),
    "latency_of": lambda: analysis.latency_of(PROFILE.root, EXTRA),
    "machine_of": lambda: analysis.machine_of(PROFILE, MACHINE),
    "measured_seconds": lambda: analysis.measured_seconds(PROFILE),
    "mfu": lambda: analysis.mfu(PROFILE, MACHINE, 1.0),
    "mfu_is_lower_bound": lambda: not analysis.mfu_is_lower_bound(UNKNOWN_EXTRA, MACHINE),
    "node_roofline": lambda: analysis.node_roofline(PROFILE.root, MACHINE, EXTRA),
    "operator_rows": lambda: analysis.operator_rows(PROFILE, EXTRA),
    "phase_seconds": lambda: analysis.phase_seconds(PROFILE),
    "phases_of": lambda: analysis.phases_of(PROFILE),
    "roofline": lambda: analysis.roofline(PROFILE.op_totals(), MACHINE),
    "roofline_data": lambda: analysis.roofline_data(PROFILE, MACHINE),
    "top_modules": lambda: analysis.top_modules(PROFILE, "macs", 3, EXTRA),
    "total_figures": lambda: analysis.total_figures(PROFILE, EXTRA),
    "utilisation": lambda: analysis.utilisation(PROFILE.op_totals(), [EXTRA], MACHINE, 1.0),
    "whole_latencies": lambda: analysis.whole_latencies(PROFILE.root),
    "why_no_utilisation": lambda: analysis.why_no_utilisation(
        PROFILE.op_totals(), [EXTRA], MACHINE, None
    ),
}
OF_NO_PROFILE = {"exponent", "exponents", "sum_known", "top", "walk_with_depth"}


@pytest.mark.parametrize("name", ANALYSES)
def test_analysis_of_another_phase_has_a_result(name: str) -> None:
    assert ANALYSES[name]()


def test_analyses_are_all_listed_here() -> None:
    functions = {name for name in analysis.__all__ if name[0].islower()}
    assert functions == ANALYSES.keys() | OF_NO_PROFILE


def test_another_phase_comes_last_in_printed_order() -> None:
    phases = ("forward", "backward", "recompute", "optimizer", "extra")
    assert analysis.phases_of(PROFILE) == phases
    assert tuple(analysis.phase_seconds(PROFILE)) == phases
    seconds, words = analysis.measured_seconds(PROFILE)
    assert words == "forward + backward + optimizer + extra"
    assert seconds == pytest.approx(2.0 + (97.51 + 240.09 + 314.47) * 1e-6)


def _merged(
    render: Callable[[ClusterProfile, View], str],
) -> Callable[[Profile, View], str]:
    return lambda profile, view: render(ClusterProfile.merge([profile]), view)


def _with_memory(render: Callable[[Profile, View], str]) -> Callable[[Profile, View], str]:
    use = MemoryUse(role="temporaries", fqn="", phase=EXTRA, bytes=3)
    peak = MemoryPeak(peak_bytes=3, peak_at=PeakMoment(fqn="", phase=EXTRA), uses=(use,))
    memory = MemoryProfile(devices=(DeviceMemory(device="cpu", peaks=(peak,)),))
    return lambda profile, view: render(dataclasses.replace(profile, memory=memory), view)


RENDERED: dict[str, tuple[Callable[[Profile, View], str], View]] = {
    "chrome_trace": (chrome_trace.render, View()),
    "chrome_trace by flops": (chrome_trace.render, View(by="flops")),
    "cluster_page": (_merged(cluster_page.render), View()),
    "cluster_table": (_merged(cluster_table.render), View()),
    "collapsed": (collapsed.render, View(phase=EXTRA)),
    "communication": (communication.render, View(phase=EXTRA)),
    "csv": (csv_renderer.render, View()),
    "csv of operators": (csv_renderer.render, View(table="operators")),
    "deepspeed": (deepspeed.render, View()),
    "html": (html.render, View()),
    "memory_table": (_with_memory(memory_table.render), View(phase=EXTRA)),
    "notebook": (notebook.render, View()),
    "overview": (overview.render, View()),
    "table": (table.render, View()),
    "table of operators": (table.render, View(table="operators")),
}


@pytest.mark.parametrize("name", RENDERED)
def test_render_of_another_phase_shows_it(name: str) -> None:
    render, view = RENDERED[name]
    text = render(PROFILE, view)
    if name in ("html", "cluster_page"):
        assert "extra" in page_data(text)["views"]
    else:
        assert "lib.prepare.default" in text if name == "collapsed" else "extra" in text


def test_renderers_are_all_listed_here() -> None:
    listed = {name.split(" ")[0] for name in RENDERED}
    others = {"View", "dataframe", "plan_page", "plan_table", "plots", "scalars"}
    assert listed | others == set(renderers.__all__)


def test_scalars_of_another_phase_name_it() -> None:
    found = scalars.scalars(PROFILE)
    assert (found["macs/extra"], found["latency_s/extra"]) == (MACS, 2.0)


@pytest.mark.slow
def test_plots_of_another_phase_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    assert plots.top_modules(PROFILE, phase=EXTRA)
    assert plots.roofline(PROFILE, MACHINE)


def test_data_frame_of_another_phase_has_its_columns() -> None:
    pytest.importorskip("pandas")
    assert dataframe.modules(PROFILE)["extra_macs"].tolist()[1] == MACS
    assert "extra" in dataframe.operators(PROFILE)["phase"].tolist()


def test_csv_of_another_phase_has_its_columns_in_every_row() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_renderer.render(PROFILE))))
    assert [row["extra_macs"] for row in rows] == [str(MACS), str(MACS), "0", "0", "0"]


def test_chrome_trace_of_another_phase_has_its_track() -> None:
    events = json.loads(chrome_trace.render(PROFILE))["traceEvents"]
    (span,) = [event for event in events if event.get("cat") == "extra" and event["dur"] == 2e6][1:]
    assert span["args"]["fqn"] == "0"
