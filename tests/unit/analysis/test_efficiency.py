"""Rates, utilisations and rooflines on hand-built profiles with round peaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from dispatch_flops.analysis.efficiency import (
    compute_s,
    hfu,
    hfu_is_lower_bound,
    machine_of,
    mfu,
    mfu_is_lower_bound,
    node_roofline,
    roofline,
    utilisation,
    why_no_utilisation,
)
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.roofline_points import roofline_data
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import ModuleNode, OpTotal, Profile
from dispatch_flops.profile.cost import OpCost
from dispatch_flops.renderers import View
from tests.helpers.trees import timed, unknown

MACHINE = Machine(name="test", flops_per_s={"float32": 100.0, "bfloat16": 400.0}, bytes_per_s=10.0)


def op(phase: str = "forward", dtype: str | None = "float32", flops: int = 0, moved: int = 0):
    cost = OpCost(flops=flops, bytes_read=moved)
    return OpTotal(op="aten.mm.default", phase=phase, dtype=dtype, calls=1, cost=cost)


def profile(*ops: OpTotal, latency_s: float | None = None) -> Profile:
    return Profile(
        root=ModuleNode(fqn="", class_name="Net", ops=ops, seconds=timed(forward=latency_s))
    )


@pytest.mark.parametrize(
    ("dtype", "machine", "seconds", "expected"),
    [
        ("float32", MACHINE, 1.0, ""),
        ("float32", None, 1.0, "the device's peaks are not known; pass machine="),
        ("float32", MACHINE, None, "the time was not measured"),
        ("float32", MACHINE, 0.0, "the time was not measured"),
        ("float64", MACHINE, 1.0, "no peak of test is known for float64"),
        (None, MACHINE, 1.0, "no peak of test is known for operators without a dtype"),
        ("int64", MACHINE, 1.0, ""),  # left out: 0 is the lower bound
    ],
)
def test_why_no_utilisation_names_what_is_not_known(
    dtype: str | None, machine: Machine | None, seconds: float | None, expected: str
) -> None:
    ops = [op(flops=50, dtype=dtype), op("backward", flops=50, dtype="float16")]
    assert why_no_utilisation(ops, ["forward"], machine, seconds) == expected
    assert (utilisation(ops, ["forward"], machine, seconds) is None) == bool(expected)


def test_why_no_utilisation_of_flops_beyond_floats_says_so() -> None:
    ops = [op(flops=10**400)]
    assert "range of a float" in why_no_utilisation(ops, ["forward"], MACHINE, 1.0)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), True, "1", [1.0]])
def test_seconds_that_are_no_time_are_refused(seconds: Any) -> None:
    measured = profile(op(flops=50))
    for of in (mfu, hfu, lambda one, *rest: roofline(one.op_totals(), *rest)):
        with pytest.raises(ConfigError, match=r"seconds=.*: pass the seconds that the run took"):
            of(measured, MACHINE, seconds)


def test_utilisation_in_one_dtype_is_flops_over_seconds_times_peak() -> None:
    p = profile(op(flops=60), op("backward", flops=140), op("recompute", flops=50))
    assert mfu(p, MACHINE, 4.0) == (60 + 140) / (100 * 4.0)
    assert hfu(p, MACHINE, 4.0) == (60 + 140 + 50) / (100 * 4.0)


def test_utilisation_in_two_dtypes_takes_the_peak_of_each() -> None:
    p = profile(op(flops=100), op(dtype="bfloat16", flops=400))
    assert mfu(p, MACHINE, 4.0) == (100 / 100 + 400 / 400) / 4.0


@pytest.mark.parametrize(
    "read",
    [
        lambda profile, machine: mfu(profile, machine, 1.0),
        lambda profile, machine: hfu(profile, machine, 1.0),
        lambda profile, machine: node_roofline(profile.root, machine),
        lambda profile, machine: machine_of(profile, machine),
        lambda profile, machine: mfu_is_lower_bound(profile, machine),
        lambda profile, machine: hfu_is_lower_bound(profile, machine),
        lambda profile, machine: compute_s(profile.op_totals(), machine),
        lambda profile, machine: roofline_data(profile, machine),
        lambda _, machine: View(machine=machine),
    ],
)
def test_name_in_place_of_a_machine_says_what_to_pass(read: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="machine='H100': pass a Machine"):
        read(profile(op(flops=1)), "H100")


def test_utilisation_with_tf32_takes_its_peak_for_float32() -> None:
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


def test_machine_in_tf32_has_no_peak_of_float32_kernels_that_were_measured_without() -> None:
    machine = Machine(
        name="test",
        flops_per_s={"float32": 100.0, "tf32": 800.0},
        kernel_flops_per_s={
            "product": {"float32": 90.0, "bfloat16": 1500.0},
            "attention": {"float32": 50.0, "tf32": 400.0},
        },
    ).with_tf32()
    assert machine.peak("float32", "product") == machine.peak("float32") == 800.0
    assert machine.peak("bfloat16", "product") == 1500.0
    assert machine.peak("float32", "attention") == 400.0


def test_utilisation_of_work_without_flops_needs_no_peak() -> None:
    assert mfu(profile(op(flops=50), op(dtype="int64")), MACHINE, 1.0) == 0.5


def test_utilisation_with_integer_products_is_a_lower_bound() -> None:
    p = profile(op(flops=50), op(dtype="int64", flops=30))
    assert mfu(p, MACHINE, 1.0) == 50 / 100
    assert mfu_is_lower_bound(p, MACHINE)
    assert not mfu_is_lower_bound(profile(op(flops=50), op(dtype="int64")), MACHINE)
    known = Machine(name="t", flops_per_s={"float32": 100.0, "int64": 10.0})
    assert mfu(p, known, 10.0) == (50 / 100 + 30 / 10) / 10
    assert not mfu_is_lower_bound(p, known)
    assert mfu(profile(op(flops=50), op(dtype="int8", flops=30)), MACHINE, 1.0) is None


def test_utilisation_is_a_lower_bound_by_operators_of_its_own_phases() -> None:
    p = profile(op(flops=50), unknown("lib.step.default", "optimizer"))
    assert not mfu_is_lower_bound(p, MACHINE)
    assert hfu_is_lower_bound(p, MACHINE)


def test_utilisation_above_the_peak_is_returned_unchanged() -> None:
    p = profile(op(flops=300), latency_s=1.0)
    assert mfu(p, MACHINE, 1.0) == 3.0
    assert node_roofline(p.root, MACHINE).exceeds_peak


def test_roofline_of_an_operator_takes_the_longer_of_computing_and_moving() -> None:
    compute_bound = roofline([op(flops=1000, moved=20)], MACHINE)  # 10 s against 2 s
    assert (compute_bound.attainable_s, compute_bound.bound) == (10.0, "compute")
    assert compute_bound.attainable_flops_per_s == 100.0
    assert compute_bound.arithmetic_intensity == 50.0
    memory_bound = roofline([op(flops=100, moved=40)], MACHINE)  # 1 s against 4 s
    assert (memory_bound.attainable_s, memory_bound.bound) == (4.0, "memory")
    assert memory_bound.attainable_flops_per_s == 25.0


def test_roofline_of_two_operators_adds_their_seconds() -> None:
    both = roofline([op(flops=1000, moved=20), op(flops=100, moved=40)], MACHINE)
    assert both.attainable_s == 10.0 + 4.0
    assert both.bound == "compute"


def test_roofline_of_shares_of_one_call_is_that_of_one_kernel() -> None:
    """A fused attention's backward moves its bytes while it recomputes the scores, too."""
    share = dataclasses.replace(op("recompute", flops=50), calls=0)
    limit = roofline([op("backward", flops=100, moved=20), share], MACHINE)
    assert (limit.attainable_s, limit.bound) == (2.0, "memory")
    limit = roofline([op("backward", flops=200, moved=20), share], MACHINE)
    assert (limit.attainable_s, limit.bound) == (2.5, "compute")


def test_roofline_without_a_machine_has_the_arithmetic_intensity() -> None:
    nothing = roofline([op(flops=6, moved=3)], None)
    assert nothing.arithmetic_intensity == 2.0
    assert nothing.attainable_s is None
    assert nothing.bound is None


def test_roofline_of_no_seconds_does_not_exceed_the_peak() -> None:
    """As for ``mfu``, 0 seconds are a time that was not measured."""
    assert not roofline([op(flops=50, moved=100)], MACHINE, seconds=0).exceeds_peak


def test_roofline_of_less_seconds_than_the_flops_take_exceeds_peak() -> None:
    """0.5 s at the peak, of an operator that waits for memory for 10 s, and 1 s."""
    ops = [op(flops=50, moved=100), op(flops=100)]
    assert roofline(ops, MACHINE, seconds=1.4).exceeds_peak
    assert roofline(ops, MACHINE, seconds=1.6).exceeds_peak  # by the bytes, which take 10 s
    assert not roofline(ops, MACHINE, seconds=10.5).exceeds_peak
    assert not roofline(ops, Machine(name="t", flops_per_s=MACHINE.flops_per_s), 1.6).exceeds_peak
    assert roofline(ops, MACHINE).attainable_s == 10.0 + 1.0
    no_bandwidth = Machine(name="test", flops_per_s={"float32": 100.0}, bytes_per_s=None)
    assert roofline(ops, no_bandwidth, seconds=1.4).exceeds_peak


def test_hfu_counts_phases_beyond_the_known_ones() -> None:
    p = profile(op(flops=60), op("setup", flops=40))
    assert mfu(p, MACHINE, 1.0) == 60 / 100
    assert hfu(p, MACHINE, 1.0) == (60 + 40) / 100


@pytest.mark.parametrize("function", [utilisation, why_no_utilisation])
def test_one_phase_in_place_of_a_list_is_an_error(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="phases='forward': pass a list of phases"):
        function([op(flops=50)], "forward", MACHINE, 1.0)


def test_node_roofline_of_a_phase_takes_its_seconds() -> None:
    root = ModuleNode(
        fqn="",
        class_name="Net",
        ops=(op(flops=100), op("backward", flops=300)),
        seconds=timed(forward=2.0, backward=2.0),
    )
    assert not node_roofline(root, MACHINE).exceeds_peak
    assert node_roofline(root, MACHINE, "backward").exceeds_peak
    assert not node_roofline(root, MACHINE, "optimizer").exceeds_peak
    whole = node_roofline(root, MACHINE, None)
    assert (whole.cost.flops, whole.exceeds_peak) == (100 + 300, False)  # 4 s at 100 FLOP/s
    shorter = dataclasses.replace(root, seconds=timed(forward=2.0, backward=1.0))
    assert node_roofline(shorter, MACHINE, None).exceeds_peak
