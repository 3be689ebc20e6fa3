"""Measured peaks of a machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch_flops import FlopCounterMode
from dispatch_flops.analysis.kernel_families import KernelFamily, family_of
from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.timing.kernels import kernels_of
from dispatch_flops.timing.peaks import measure_machine


def test_measure_machine_on_an_accelerator_shares_one_wait_over_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wait for the device takes as long as a kernel: 1 s."""
    launched: list[torch.device] = []

    def seconds_of(run: Callable[[], object], now: object) -> float:
        launched.clear()
        run()
        return 1.0 + len(launched)

    def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
        launched.append(target.device)

    monkeypatch.setattr("dispatch_flops.timing.peaks.seconds_of", seconds_of)
    monkeypatch.setattr("dispatch_flops.timing.peaks.device_name", lambda device: f"a {device}")
    monkeypatch.setattr(torch, "mm", lambda a, b: launched.append(a.device))
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    with FakeTensorMode():
        machine = measure_machine("cuda:0", [torch.float16])
    assert machine.name == "a cuda:0"
    assert machine.flops_per_s == {"float16": pytest.approx(2 * 8192**3, rel=0.1)}
    assert machine.bytes_per_s == pytest.approx(2 * 2**30, rel=0.1)
    assert set(launched) == {torch.device("cuda:0")}


def test_measure_machine_ends_the_readings_of_a_figure_after_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where bfloat16 is emulated, a product takes seconds. Copies and float32 are fast here."""
    products: list[torch.dtype] = []

    def seconds_of(run: Callable[[], object], now: object) -> float:
        before = products.count(torch.bfloat16)
        run()
        return 0.7 if products.count(torch.bfloat16) > before else 1e-3

    monkeypatch.setattr("dispatch_flops.timing.peaks.seconds_of", seconds_of)
    monkeypatch.setattr(torch, "mm", lambda a, b: products.append(a.dtype))
    machine = measure_machine("cpu", size=8, repeats=5)
    warm_up = 1
    assert products.count(torch.float32) == warm_up + 5
    assert products.count(torch.bfloat16) == warm_up + 1
    assert machine.flops_per_s["bfloat16"] == 2 * 8**3 / 0.7


def test_measure_machine_leaves_the_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "mm", lambda a, b: factors.extend((a, b)))
    before = torch.get_rng_state()
    measure_machine("cpu", [torch.float64], size=7, repeats=1, families=["recurrent"])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(factor.unique().numel() == 7 * 7 for factor in factors)


def test_measure_machine_of_meta_raises() -> None:
    with pytest.raises(TargetError, match="meta"):
        measure_machine("meta")


@pytest.mark.parametrize("family", ["product", "convolution", "attention", "recurrent"])
def test_kernels_of_a_family_run_the_macs_they_state(family: KernelFamily) -> None:
    for run, macs in kernels_of(family, torch.device("cpu"), torch.float32):
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_macs() == macs
        ran = {op.op for op in counter.profile.op_totals() if op.cost and op.cost.macs}
        assert ran and all(family_of(op) == family for op in ran)


def test_measure_machine_of_an_unknown_device_raises() -> None:
    with pytest.raises(TargetError, match="device='gpu' is not a device of torch"):
        measure_machine("gpu")


@pytest.mark.parametrize(
    "options",
    [
        {"dtypes": torch.float32},
        {"dtypes": ["float32"]},
        {"size": 0},
        {"size": True},
        {"repeats": 0},
        {"repeats": 2.0},
        {"families": ["softmax"]},
    ],
    ids=str,
)
def test_measure_machine_with_an_unusable_option_names_it(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*: pass "):
        measure_machine(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtypes": [torch.uint8]}, "torch.uint8, .*the peak of int8; pass torch.int8"),
        ({"dtypes": [torch.complex64]}, "torch.complex64, .*pass torch.float32"),
        ({"dtypes": [torch.bool]}, "torch.bool, which cpu does not multiply: .*'Bool'"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used: "),
        ({"size": 10**9}, "size=1000000000: pass a smaller one, .*memory"),
    ],
    ids=str,
)
def test_measure_machine_of_what_it_cannot_multiply_says_so_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("dispatch_flops.timing.peaks.seconds_of", None)
    with pytest.raises((ConfigError, TargetError), match=message):
        measure_machine(**options)


def test_measure_machine_of_a_family_that_lacks_the_dtype_names_it() -> None:
    with pytest.raises(ConfigError, match=r"recurrent kernels do not run in torch.int32 on cpu"):
        measure_machine(dtypes=[torch.int32], size=8, repeats=1, families=["recurrent"])


def test_measure_machine_of_float8_has_the_peak_that_its_work_is_compared_with() -> None:
    machine = measure_machine(dtypes=[torch.float8_e4m3fn], size=8, repeats=1)
    assert machine.peak("float8_e5m2") == machine.flops_per_s["float8"] > 0


def test_measure_machine_of_families_has_their_peaks() -> None:
    machine = measure_machine(dtypes=[torch.float32], size=32, repeats=1, families=["recurrent"])
    assert machine.kernel_flops_per_s["recurrent"]["float32"] > 0
    assert (
        machine.peak("float32", "recurrent") == machine.kernel_flops_per_s["recurrent"]["float32"]
    )
    assert machine.peak("float32", "attention") == machine.flops_per_s["float32"]
