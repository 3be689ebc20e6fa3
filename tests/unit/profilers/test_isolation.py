"""The state of model and process after a profile."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dispatch_flops import get_model_profile, profile_model
from dispatch_flops.counting.undo import UndoStack
from dispatch_flops.profilers.isolation import garbage_collection_later, isolated, moved_to_meta
from tests.helpers.interrupting import TooLateError, interrupted_at
from tests.helpers.small_net import B, Net
from tests.helpers.untouched import model_state


def test_get_model_profile_leaves_model_and_process_unchanged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Net().train()
    model.a.eval()
    stdout, state = sys.stdout, torch.get_rng_state()
    flags = [m.training for m in model.modules()]
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    get_model_profile(model, (B, 5), warm_up=3, repeats=2)
    assert sys.stdout is stdout
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == flags
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes


def test_frozen_parameters_are_frozen_without_data_too() -> None:
    model = nn.Linear(3, 5)
    model.bias.requires_grad_(False)
    with moved_to_meta(model):
        assert model.weight.is_meta and model.bias.is_meta
        assert model.weight.requires_grad and not model.bias.requires_grad
    assert not model.weight.is_meta


def test_garbage_collection_is_off_inside_and_as_before_afterwards() -> None:
    assert gc.isenabled()
    with garbage_collection_later():
        assert not gc.isenabled()
        with garbage_collection_later():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


class Draws(nn.Module):
    """Draws from every generator that programs use."""

    def forward(self) -> Any:
        return torch.rand(2) + random.random() + float(np.random.rand())


def test_profile_model_restores_random_state() -> None:
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    profile_model(Draws())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert repr(np.random.get_state()) == states[2]


def test_train_flags_after_an_exception_are_restored() -> None:
    model = Net().train()
    with pytest.raises(RuntimeError, match="shapes"):
        get_model_profile(model, (B, 6), print_profile=False)
    assert all(m.training for m in model.modules())


def test_frozen_torchscript_model_stays_without_train_flag() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)).eval()
    frozen = torch.jit.freeze(torch.jit.script(model))
    profile = profile_model(frozen, (2, 3))
    assert profile.total().macs == 2 * (3 * 5 + 5 * 7)
    assert not hasattr(frozen, "training")


def test_profile_model_restores_the_random_state_of_every_device_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restored: dict[object, object] = {}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: f"state of {device}")
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: restored.update({device: state})
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    profile_model(nn.Linear(5, 7), (2, 5))
    assert restored == {torch.device("cuda", i): f"state of cuda:{i}" for i in range(3)}


@pytest.mark.parametrize("part", [False, True])
def test_exported_program_which_cannot_change_its_mode_is_profiled(part: bool) -> None:
    exported = torch.export.export(nn.Linear(3, 5), (torch.ones(2, 3),)).module()
    model = nn.Sequential(exported, nn.Dropout()) if part else exported
    flags = [module.training for module in model.modules()]
    profile = profile_model(model, (2, 3))
    assert profile.total().macs == 2 * 3 * 5
    assert "aten.bernoulli_.float" not in profile.by_operator()  # the Dropout is in evaluation
    assert [module.training for module in model.modules()] == flags


def test_model_is_as_before_where_the_end_of_isolation_is_interrupted() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout())
    before = model_state(model)
    for moment in range(100):
        with (
            contextlib.suppress(TooLateError),
            interrupted_at(
                moment, lambda frame: frame.f_code is UndoStack.__exit__.__code__, TooLateError
            ) as hits,
            isolated(model, on_meta=True),
        ):
            pass
        assert model_state(model) == before, moment
        if not hits:
            break
    assert 3 < moment < 100
