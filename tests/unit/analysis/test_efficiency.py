"""Rates, utilisations and rooflines on hand-built profiles with round peaks."""

from __future__ import annotations

import pytest

from dispatch_flops.analysis.efficiency import hfu, mfu, node_roofline, roofline
from dispatch_flops.analysis.machines import MACHINES, Machine, find
from dispatch_flops.errors import TargetError
from dispatch_flops.profile import ModuleNode, OpTotal, Profile
from dispatch_flops.profile.cost import OpCost
from dispatch_flops.timing.peaks import measure_machine

MACHINE = Machine(name="test", flops_per_s={"float32": 100.0, "bfloat16": 400.0}, bytes_per_s=10.0)


def op(phase: str = "forward", dtype: str | None = "float32", flops: int = 0, moved: int = 0):
    cost = OpCost(flops=flops, bytes_read=moved)
    return OpTotal(op="aten.mm.default", phase=phase, dtype=dtype, calls=1, cost=cost)


def profile(*ops: OpTotal, latency_s: float | None = None) -> Profile:
    return Profile(root=ModuleNode(fqn="", class_name="Net", ops=ops, latency_s=latency_s))


def test_utilisation_in_one_dtype() -> None:
    p = profile(op(flops=60), op("backward", flops=140), op("recompute", flops=50))
    assert mfu(p, MACHINE, 4.0) == (60 + 140) / (100 * 4.0)
    assert hfu(p, MACHINE, 4.0) == (60 + 140 + 50) / (100 * 4.0)


def test_each_dtype_is_held_against_its_own_peak() -> None:
    p = profile(op(flops=100), op(dtype="bfloat16", flops=400))
    assert mfu(p, MACHINE, 4.0) == (100 / 100 + 400 / 400) / 4.0


def test_an_unknown_peak_gives_none_never_a_number() -> None:
    p = profile(op(flops=100), op(dtype="float16", flops=1))
    assert mfu(p, MACHINE, 1.0) is None
    assert mfu(p, None, 1.0) is None
    assert mfu(profile(), None, 1.0) is None
    assert mfu(profile(op(flops=1)), MACHINE, None) is None
    assert mfu(profile(op(flops=1)), MACHINE, 0.0) is None


def test_float32_work_in_tf32_is_held_against_its_peak() -> None:
    peaks = {"float32": 100.0, "tf32": 800.0, "bfloat16": 1600.0}
    machine = Machine(name="test", flops_per_s=peaks, bytes_per_s=10.0, source="a sheet")
    p = profile(op(flops=200), op(dtype="complex64", flops=200), op(dtype="bfloat16", flops=800))
    assert mfu(p, machine, 5.0) == (200 / 100 + 200 / 100 + 800 / 1600) / 5.0
    tf32 = machine.with_tf32()
    assert mfu(p, tf32, 5.0) == (200 / 800 + 200 / 800 + 800 / 1600) / 5.0
    assert roofline(p.op_totals(), tf32).attainable_s == 200 / 800 + 200 / 800 + 800 / 1600
    assert (tf32.name, tf32.bytes_per_s) == ("test", 10.0)
    assert tf32.source == "a sheet; float32 work in TF32"
    assert MACHINE.with_tf32() is MACHINE
    assert tf32.with_tf32() is tf32


def test_work_without_flops_needs_no_peak() -> None:
    assert mfu(profile(op(flops=50), op(dtype="int64")), MACHINE, 1.0) == 0.5


def test_a_value_above_the_peak_is_shown() -> None:
    p = profile(op(flops=300), latency_s=1.0)
    assert mfu(p, MACHINE, 1.0) == 3.0
    assert node_roofline(p.root, MACHINE).exceeds_peak


def test_the_roofline_takes_the_longer_of_computing_and_moving() -> None:
    compute_bound = roofline([op(flops=1000, moved=20)], MACHINE)  # 10 s against 2 s
    assert (compute_bound.attainable_s, compute_bound.bound) == (10.0, "compute")
    assert compute_bound.attainable_flops_per_s == 100.0
    assert compute_bound.arithmetic_intensity == 50.0
    memory_bound = roofline([op(flops=100, moved=40)], MACHINE)  # 1 s against 4 s
    assert (memory_bound.attainable_s, memory_bound.bound) == (4.0, "memory")
    assert memory_bound.attainable_flops_per_s == 25.0


def test_operators_run_one_after_the_other() -> None:
    both = roofline([op(flops=1000, moved=20), op(flops=100, moved=40)], MACHINE)
    assert both.attainable_s == 10.0 + 4.0
    assert both.bound == "compute"


def test_a_roofline_without_a_machine_still_knows_the_work() -> None:
    nothing = roofline([op(flops=6, moved=3)], None)
    assert nothing.arithmetic_intensity == 2.0
    assert nothing.attainable_s is None
    assert nothing.bound is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA L4", "NVIDIA L4"),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA L40", "NVIDIA L40"),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce GTX 970", None),
        ("", None),
        (None, None),
    ],
)
def test_machines_are_found_by_the_drivers_name(name: str | None, expected: str | None) -> None:
    machine = find(name)
    assert (machine.name if machine else None) == expected


def test_every_machine_has_a_source_and_sane_figures() -> None:
    for machine in MACHINES.values():
        assert machine.source
        assert machine.bytes_per_s and machine.bytes_per_s > 1e11
        assert all(find(name) is machine for name in (machine.name, *machine.aliases))
        half = machine.flops_per_s["float16"]
        assert half >= machine.flops_per_s["float32"] > 1e12
        assert machine.peak("float8_e4m3fn") == machine.flops_per_s.get("float8")


@pytest.mark.parametrize(
    ("name", "dtype", "units", "per_clock", "clock_hz"),
    [  # SMs or CUs, and what the matrix cores of each do in a clock
        ("NVIDIA A100-SXM4-80GB", "float16", 108, 2048, 1.41e9),
        ("NVIDIA A100-SXM4-80GB", "float64", 108, 128, 1.41e9),
        ("NVIDIA A100-SXM4-40GB", "float64", 108, 128, 1.41e9),
        ("NVIDIA A100 80GB PCIe", "float64", 108, 128, 1.41e9),
        ("NVIDIA H100 80GB HBM3", "float64", 132, 256, 1.98e9),
        ("NVIDIA H200", "float64", 132, 256, 1.98e9),
        ("NVIDIA H100 PCIe", "float64", 114, 256, 1.755e9),
        ("AMD Instinct MI300X", "float16", 304, 2048, 2.1e9),
        ("AMD Instinct MI300X", "float64", 304, 256, 2.1e9),
        ("AMD Instinct MI250X", "float16", 110, 1024, 1.7e9),  # one die's
        ("AMD Instinct MI250X", "float32", 110, 256, 1.7e9),
        ("AMD Instinct MI250X", "float64", 110, 256, 1.7e9),
    ],
)
def test_peaks_are_what_one_devices_matrix_cores_do(
    name: str, dtype: str, units: int, per_clock: int, clock_hz: float
) -> None:
    peak = units * per_clock * clock_hz
    assert MACHINES[name].flops_per_s[dtype] == pytest.approx(peak, rel=2e-3)


def test_the_peak_bounds_all_of_the_flops() -> None:
    """0.5 s at the peak, of an operator that waits for memory for 10 s, and 1 s."""
    ops = [op(flops=50, moved=100), op(flops=100)]
    assert roofline(ops, MACHINE, seconds=1.4).exceeds_peak
    assert not roofline(ops, MACHINE, seconds=1.6).exceeds_peak
    assert roofline(ops, MACHINE).attainable_s == 10.0 + 1.0
    no_bandwidth = Machine(name="test", flops_per_s={"float32": 100.0}, bytes_per_s=None)
    assert roofline(ops, no_bandwidth, seconds=1.4).exceeds_peak


def test_there_is_no_peak_of_meta() -> None:
    with pytest.raises(TargetError, match="meta"):
        measure_machine("meta")
