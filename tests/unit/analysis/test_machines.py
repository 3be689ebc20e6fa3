"""Machines: names, sources and peaks."""

from __future__ import annotations

import pytest

from dispatch_flops.analysis.machines import MACHINES, find


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
def test_find_takes_the_drivers_exact_name(name: str | None, expected: str | None) -> None:
    machine = find(name)
    assert (machine.name if machine else None) == expected


def test_machine_of_the_table_has_a_source_and_sane_figures() -> None:
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
def test_machine_peak_is_what_the_matrix_cores_of_one_device_do(
    name: str, dtype: str, units: int, per_clock: int, clock_hz: float
) -> None:
    peak = units * per_clock * clock_hz
    assert MACHINES[name].flops_per_s[dtype] == pytest.approx(peak, rel=2e-3)
