"""The device that is meant is the one that is named, measured and left as it was."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch_flops import FlopCounterMode, profile_model
from dispatch_flops.devices import device_name


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
    assert (counter.profile.scope.device, counter.profile.scope.device_name) == ("cuda", None)


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
