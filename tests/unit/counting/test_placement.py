"""Models whose parameters rest on the meta device, and are brought in for each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode, profile_model
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
def test_computes_where_it_is_brought_to(inputs: dict[str, Any], chained: bool) -> None:
    model = offloaded(chained=chained)
    profile = profile_model(model, **inputs)
    assert profile.run.device == "cpu"
    assert profile.timing.latency("forward")
    assert profile.root.latency_s
    assert profile.total().macs == MACS
    assert all(parameter.is_meta for parameter in model.parameters())


def test_parameters_that_were_brought_in_took_part() -> None:
    model = nn.ModuleList([offloaded(), offloaded()])
    with FlopCounterMode(model, display=False) as counter:
        model[0](torch.ones(2, 8))
    params = 8 * 16 + 16 + 16 * 3 + 3
    assert counter.profile.total_params == 2 * params
    assert counter.profile.root.active_params == params


def test_the_counter_names_the_device_too() -> None:
    model = offloaded()
    with FlopCounterMode(model, display=False) as counter:
        model(torch.ones(2, 8))
    assert counter.profile.run.device == "cpu"


def test_accelerators_go_by_what_the_hook_says() -> None:
    with torch.device("meta"):
        layer = nn.Linear(3, 3)
    assert Devices.of([layer]).type == "meta"
    layer._hf_hook = hooks.AlignDevicesHook(execution_device="cuda:1", offload=True)
    assert Devices.of([layer]) == Devices("cuda", (torch.device("cuda", 1),))


def test_a_model_that_stays_on_meta_is_there() -> None:
    with torch.device("meta"):
        profile = profile_model(nn.Linear(8, 3), (2, 8))
    assert profile.run.device == "meta"
    assert profile.timing.latency("forward") is None
