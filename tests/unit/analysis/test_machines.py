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


def test_machine_figures_are_of_one_document() -> None:
    """An HGX B200 has 75 and 37 TFLOP/s at 7.7 TB/s; a GB200 has 80 and 40 at 8 TB/s."""
    b200 = MACHINES["NVIDIA B200"]
    peaks = (b200.flops_per_s["float32"], b200.flops_per_s["float64"], b200.bytes_per_s)
    assert peaks == (75e12, 37e12, 7.7e12)


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
        ("NVIDIA A10", "float16", 72, 1024, 1.695e9),
        ("NVIDIA A10", "tf32", 72, 512, 1.695e9),
        ("NVIDIA A10", "int8", 72, 2048, 1.695e9),
        ("NVIDIA A10", "float32", 72, 256, 1.695e9),  # of the vector units
        ("NVIDIA GeForce RTX 3090", "float16", 82, 512, 1.695e9),
        ("NVIDIA GeForce RTX 3090", "tf32", 82, 256, 1.695e9),
        ("NVIDIA GeForce RTX 3090", "int8", 82, 2048, 1.695e9),
        ("NVIDIA GeForce RTX 3090", "float32", 82, 256, 1.695e9),
        ("Tesla V100-SXM2", "float64", 80, 64, 1.53e9),
        ("Tesla V100-SXM2", "float32", 80, 128, 1.53e9),
        ("Tesla V100-SXM2", "float16", 80, 1024, 1.53e9),
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
    assert MACHINES[name].flops_per_s[dtype] == pytest.approx(
        peak, rel=5e-3
    )  # as far as vendors round
