"""Tensors that modules hold themselves: their classes and devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch_flops.counting.held_tensors import HeldTensors
from dispatch_flops.counting.placement import Placement

CPU, META = torch.device("cpu"), torch.device("meta")


class Scaled(nn.Module):
    """A module that holds a buffer and no parameter."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("absent", None)


def test_each_device_of_parameters_and_buffers_is_found_once() -> None:
    on_cpu, on_meta = nn.Linear(3, 5), nn.Linear(3, 5, device="meta")
    assert [*HeldTensors([on_cpu, Scaled(torch.ones(2))]).devices()] == [CPU]
    assert [*HeldTensors([on_cpu, Scaled(torch.ones(2, device="meta"))]).devices()] == [CPU, META]
    assert [*HeldTensors([on_meta, Scaled(torch.ones(2))]).devices()] == [META, CPU]
    assert [*HeldTensors([Scaled(torch.ones(2))]).devices()] == [CPU]
    assert not HeldTensors([nn.ReLU(), nn.Sequential(on_cpu)]).devices()


def test_parameters_are_those_of_each_module_itself() -> None:
    layer, model = nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 7, bias=False))
    held = HeldTensors([layer, model, model[0]])
    assert held.by_module == [[layer.weight, layer.bias], [], [model[0].weight]]
    assert held.parameters == [layer.weight, layer.bias, model[0].weight]
    assert held.are_ordinary and held.are_on_cpu
    assert not HeldTensors([nn.LazyLinear(5)]).are_ordinary
    assert not HeldTensors([nn.Linear(3, 5, device="meta")]).are_on_cpu


def test_fake_buffer_has_no_data_to_compute_with() -> None:
    with FakeTensorMode():
        model = Scaled(torch.ones(2))
    assert not Placement.of([model]).computes


def test_program_that_uses_cuda_runs_models_without_tensors_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert Placement.of([nn.ReLU()]).accelerators == (torch.device("cuda", 1),)
    assert not Placement.of([nn.Linear(3, 5)]).accelerators
