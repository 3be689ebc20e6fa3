"""Clocks and events of devices, on an imitated accelerator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops.timing.devices import CPU, Devices
from tests.helpers.accelerator import FIRST, SECOND, Event, Gpu


def test_clock_does_not_wait_during_capture(gpu: Gpu) -> None:
    now = Devices("cuda", (FIRST, SECOND)).clock()
    gpu.capturing = True
    now()
    assert gpu.waited == 0


def test_clock_of_several_accelerators_waits_at_every_reading(gpu: Gpu) -> None:
    devices = Devices("cuda", (FIRST, SECOND))
    assert devices.events() is None
    now = devices.clock()
    gpu.launch(7.0)
    now()
    assert gpu.host == 7.0
    assert gpu.waited == 2


def test_events_without_streams_are_none(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    assert Devices("mps", (torch.device("mps"),)).events() is None


def on(*names: str) -> nn.Module:
    """Return an object that has tensors on these devices, as a module has."""
    tensors = {str(i): SimpleNamespace(device=torch.device(name)) for i, name in enumerate(names)}
    module: Any = SimpleNamespace(_parameters=tensors, _buffers={"none": None})
    return module


@pytest.mark.parametrize(
    ("modules", "devices"),
    [
        ([on("cpu")], CPU),
        ([on("meta")], Devices("meta", computes=False)),
        ([], CPU),
        ([on("meta"), on("cuda:1")], Devices("cuda", (SECOND,))),  # offloaded in part
        ([on("cpu", "cuda:0", "cuda:0")], Devices("cuda", (FIRST,))),
        ([on("cuda:0"), on("cuda:1")], Devices("cuda", (FIRST, SECOND))),
    ],
)
def test_devices_of_modules_prefer_the_accelerator(
    modules: list[nn.Module], devices: Devices
) -> None:
    assert Devices.of(modules) == devices


def test_devices_at_a_name_are_that_device() -> None:
    assert Devices.at("cpu") == CPU
    assert Devices.at("cuda:1") == Devices("cuda", (SECOND,))
