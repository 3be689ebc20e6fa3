"""Devices of runs: of models whose parameters are offloaded between calls, and their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch_flops import FlopCounterMode, profile_model
from dispatch_flops.counting.placement import device_name
from dispatch_flops.timing.devices import Devices

accelerate = pytest.importorskip("accelerate")
hooks = pytest.importorskip("accelerate.hooks")

MACS = 2 * (8 * 16 + 16 * 3)


def offloaded(*, chained: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    accelerate.cpu_offload(model, execution_device="cpu")
    if chained:
        for layer in (model[0], model[2]):
            hooks.add_hook_to_module(layer, hooks.ModelHook(), append=True)
    return model


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("inputs", [{"args": [torch.ones(2, 8)]}, {"input_shape": (2, 8)}])
def test_offloaded_model_is_profiled_on_its_execution_device(
    inputs: dict[str, Any], chained: bool
) -> None:
    model = offloaded(chained=chained)
    profile = profile_model(model, **inputs)
    assert profile.run.device == "cpu"
    assert profile.timing.latency("forward")
    assert profile.root.latency_s
    assert profile.total().macs == MACS
    assert all(parameter.is_meta for parameter in model.parameters())


def test_offloaded_parameters_of_a_called_model_are_active() -> None:
    model = nn.ModuleList([offloaded(), offloaded()])
    with FlopCounterMode(model, display=False) as counter:
        model[0](torch.ones(2, 8))
    params = 8 * 16 + 16 + 16 * 3 + 3
    assert counter.profile.total_params == 2 * params
    assert counter.profile.root.active_params == params


def test_counter_of_an_offloaded_model_has_the_execution_device() -> None:
    model = offloaded()
    with FlopCounterMode(model, display=False) as counter:
        model(torch.ones(2, 8))
    assert counter.profile.run.device == "cpu"


def test_devices_of_an_offloaded_layer_are_those_of_its_hook() -> None:
    with torch.device("meta"):
        layer = nn.Linear(3, 3)
    assert Devices.of([layer]).type == "meta"
    layer._hf_hook = hooks.AlignDevicesHook(execution_device="cuda:1", offload=True)
    assert Devices.of([layer]) == Devices("cuda", (torch.device("cuda", 1),))


def test_model_on_meta_without_hooks_is_profiled_on_meta() -> None:
    with torch.device("meta"):
        profile = profile_model(nn.Linear(8, 3), (2, 8))
    assert profile.run.device == "meta"
    assert profile.timing.latency("forward") is None


# -- names of devices ----------------------------------------------------------------------------


def test_device_name_is_that_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the one of {device}")
    assert device_name("cuda:0") == "the one of cuda:0"
    assert device_name(torch.device("cuda", 1)) == "the one of cuda:1"
    assert device_name("cuda") == "the one of cuda"
    assert device_name("cuda:2") is None
    assert device_name("meta") is None
    assert device_name("cpu") == device_name("cpu:0") is not None


def test_device_name_of_a_missing_device_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with FakeTensorMode():
        model = nn.ReLU()
        model.register_buffer("held", torch.empty(2, 3, device="cuda"))
        with FlopCounterMode(model, display=False) as counter:
            model(model.held)
    assert (counter.profile.run.device, counter.profile.run.device_name) == ("cuda", None)
