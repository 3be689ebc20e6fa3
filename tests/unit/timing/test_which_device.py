"""The device that is meant is the one that is named, measured and left as it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch_flops import FlopCounterMode, profile_model
from dispatch_flops.counting.placement import device_name
from dispatch_flops.timing.peaks import measure_machine


def test_every_device_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the one of {device}")
    assert device_name("cuda:0") == "the one of cuda:0"
    assert device_name(torch.device("cuda", 1)) == "the one of cuda:1"
    assert device_name("cuda") == "the one of cuda"
    assert device_name("cuda:2") is None
    assert device_name("meta") is None
    assert device_name("cpu") == device_name("cpu:0") is not None


def test_a_device_that_is_not_there_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with FakeTensorMode():
        model = nn.ReLU()
        model.register_buffer("held", torch.empty(2, 3, device="cuda"))
        with FlopCounterMode(model, display=False) as counter:
            model(model.held)
    assert (counter.profile.run.device, counter.profile.run.device_name) == ("cuda", None)


def test_accelerators_are_measured_by_large_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the device takes as long as one of its kernels: 1 s."""
    launched: list[torch.device] = []

    def time_call(run: Callable[[], object], **_: object) -> tuple[float, None]:
        launched.clear()
        run()
        return 1.0 + len(launched), None

    def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
        launched.append(target.device)

    monkeypatch.setattr("dispatch_flops.timing.peaks.time_call", time_call)
    monkeypatch.setattr("dispatch_flops.timing.peaks.device_name", lambda device: f"a {device}")
    monkeypatch.setattr(torch, "mm", lambda a, b: launched.append(a.device))
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    with FakeTensorMode():
        machine = measure_machine("cuda:0", [torch.float16])
    assert machine.name == "a cuda:0"
    assert machine.flops_per_s == {"float16": pytest.approx(2 * 8192**3, rel=0.1)}
    assert machine.bytes_per_s == pytest.approx(2 * 2**30, rel=0.1)
    assert set(launched) == {torch.device("cuda:0")}


def test_numbers_that_are_measured_with_are_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "mm", lambda a, b: factors.extend((a, b)))
    before = torch.get_rng_state()
    measure_machine("cpu", [torch.float64], size=7)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(factor.unique().numel() == 7 * 7 for factor in factors)


def test_random_state_is_kept_on_every_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []

    def fork_rng(devices: list[int], device_type: str) -> AbstractContextManager[None]:
        kept.append((devices, device_type))
        return nullcontext()

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    profile_model(nn.Linear(5, 7), (2, 5))
    assert kept == [([0, 1, 2], "cuda")]
