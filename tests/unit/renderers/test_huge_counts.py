"""Counts beyond the range of a float, in every format."""

from __future__ import annotations

import dataclasses

import pytest

from dispatch_flops import OpCost, Profile, analysis
from dispatch_flops.analysis.machines import MACHINES
from dispatch_flops.cli.formats import FORMATS
from dispatch_flops.profile import (
    CommGroup,
    CommTotal,
    DeviceMemory,
    HeldBytes,
    MemoryPeak,
    MemoryPoint,
    MemoryProfile,
    MemoryUse,
    ModuleMemory,
    OpTotal,
    PeakMoment,
    PhaseBytes,
    RoleBytes,
    RunInfo,
    StepTiming,
)
from dispatch_flops.renderers import View, chrome_trace, dataframe, notebook, plots, scalars
from dispatch_flops.renderers.deepspeed.units import number_to_string
from dispatch_flops.units import flops_text
from tests.helpers.trees import module, place, timed

HUGE = 10**400
MACHINE = MACHINES["NVIDIA H200"]


def huge() -> Profile:
    cost = OpCost(macs=HUGE, flops=2 * HUGE, bytes_read=HUGE, bytes_written=HUGE)
    ops = tuple(
        OpTotal(op="x.y", phase=phase, calls=HUGE, cost=cost, dtype="float32", latency_s=1e-3)
        for phase in ("forward", "backward", "recompute", "optimizer")
    )
    partly = dataclasses.replace(ops[0], op="x.partly", uncounted=1)
    held = HeldBytes(parameters=HUGE)
    leaf = module(
        "Leaf", name="a", own_params=HUGE, calls=HUGE, ops=(*ops, partly), latency_s=1.0,
        memory=ModuleMemory(own=held, total=held, peak_bytes=PhaseBytes({"forward": HUGE})),
    )  # fmt: skip
    moment = PeakMoment(fqn="a", phase="forward")
    uses = (MemoryUse(role="parameters", bytes=HUGE),)
    point = MemoryPoint(operators=1, at=moment, bytes_by_role=RoleBytes({"parameters": HUGE}))
    peak = MemoryPeak(peak_bytes=HUGE, peak_at=moment, uses=uses)
    device = DeviceMemory(device="cpu", peaks=(peak,), timeline=(point,))
    sent = CommTotal(
        fqn="a", phase="forward", kind="all_reduce", op="c10d.allreduce_.default", dtype="float32",
        group=CommGroup(name="all", size=2, ranks=(0, 1)), calls=HUGE, payload_bytes=HUGE,
    )  # fmt: skip
    run = RunInfo(
        world_size=4, data_parallel_size=HUGE, model_parallel_size=HUGE, expert_params=HUGE,
        model_expert_params=HUGE, batch_size=HUGE, step=HUGE,
    )  # fmt: skip
    timing = StepTiming(
        seconds=timed(forward=1.0, backward=2.0, optimizer=3.0), iteration_s=6.0,
        resolution_s=1e-6, operator_resolution_s=1e-6,
    )  # fmt: skip
    return Profile(
        root=place(module("Net", leaf, latency_s=1.0)), timing=timing, run=run,
        communication=(sent,), memory=MemoryProfile(devices=(device,)),
    ).check()  # fmt: skip


@pytest.mark.parametrize("has_machine", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_render_of_huge_counts_in_a_format_has_a_result(name: str, has_machine: bool) -> None:
    for fold in (False, True):
        assert FORMATS[name].render(
            huge(), View(machine=MACHINE if has_machine else None, fold=fold)
        )


def test_render_of_huge_counts_elsewhere_has_a_result() -> None:
    assert notebook.render(huge())
    assert scalars.scalars(huge(), MACHINE)["flops/total"] == 2 * 5 * HUGE
    assert chrome_trace.render(huge(), View(by="flops"))
    assert analysis.diff(huge(), huge()).total.after is not None


def test_data_frame_of_huge_counts_is_exact() -> None:
    pytest.importorskip("pandas")
    assert dataframe.modules(huge())["total_macs"].tolist()[:2] == [5 * HUGE, 5 * HUGE]
    assert len(dataframe.operators(huge()))


@pytest.mark.parametrize("by", ["flops", "macs", "bytes", "params", "latency"])
def test_plot_of_huge_counts_is_drawn(by: analysis.Key) -> None:
    pytest.importorskip("matplotlib")
    assert plots.top_modules(huge(), by=by)


def test_saved_profile_of_huge_counts_is_read_back() -> None:
    assert Profile.from_json(huge().to_json()) == huge()


def test_text_of_a_huge_count_has_its_power_of_ten() -> None:
    assert flops_text(HUGE) == "1.00e+376 YFLOPs"
    assert flops_text(-HUGE) == "-1.00e+376 YFLOPs"
    assert number_to_string(HUGE) == "1e+388 T"
