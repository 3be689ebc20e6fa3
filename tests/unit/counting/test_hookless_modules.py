"""Modules whose ``__call__`` runs no hooks are named in a note; no others are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from tests.helpers.attributing import plain, rows, work_of
from tests.helpers.profiling import profile_of


class Direct(nn.Linear):
    """Calls forward without hooks, as a module of gpytorch does."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


class Delegating(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


class DerivedFromDirect(Direct):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


class ReadingWeight(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self[0].weight)


def test_operators_of_a_call_without_hooks_are_the_callers_as_a_note_says() -> None:
    model = nn.Sequential(Direct(3, 5, bias=False), nn.Linear(5, 7, bias=False))
    profile = profile_of(model, rows(2, 3), model=model)
    assert work_of(profile) == {"": {"forward": 2 * 3 * 5}, "1": {"forward": 2 * 5 * 7}}
    (note,) = profile.notes
    assert note.startswith("calls of 0 (Direct) ran no hooks")


@pytest.mark.parametrize("cls", [Direct, DerivedFromDirect])
def test_model_called_without_hooks_is_named(cls: type[nn.Linear]) -> None:
    model = cls(3, 5, bias=False)
    profile = profile_of(model, rows(2, 3), model=model)
    assert profile.outside.total("forward").macs == 2 * 3 * 5
    (note,) = profile.notes
    assert note.startswith(f"calls of the model ({cls.__name__}) ran no hooks")


def test_module_whose_hooks_the_program_runs_is_not_named() -> None:
    model = Direct(3, 5, bias=False)
    profile = profile_of(lambda: nn.Module.__call__(model, rows(2, 3)), model=model)
    assert work_of(profile) == {"": {"forward": 2 * 3 * 5}}
    assert profile.notes == ()


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(Delegating(3, 5), nn.Linear(5, 7)),
        fx.symbolic_trace(plain(3, 5, 7)),
        torch.compile(plain(3, 5, 7), backend="eager"),
        nn.ModuleDict({"layers": plain(3, 5, 7), "not called": Direct(5, 7)}),
        ReadingWeight(Delegating(3, 5)),
    ],
    ids=["delegating", "fx", "compiled", "not called", "read by its holder"],
)
def test_modules_whose_hooks_run_or_that_take_no_part_are_not_named(model: nn.Module) -> None:
    called: Any = model["layers"] if isinstance(model, nn.ModuleDict) else model

    def call(x: Tensor) -> Tensor:
        out: Tensor = called(x)
        return out

    assert profile_of(call, rows(2, 3), model=model).notes == ()
