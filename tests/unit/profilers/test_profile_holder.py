"""What has a profile says so where only the profile has what is asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dispatch_flops
from dispatch_flops import FlopCounterMode, FlopsProfiler, StepProfiler
from dispatch_flops.renderers import csv, overview


def counted() -> FlopCounterMode:
    model = nn.Linear(3, 5)
    with FlopCounterMode(model, display=False) as counter:
        model(torch.ones(2, 3))
    return counter


def step_profiler() -> StepProfiler:
    model = nn.Linear(3, 5)
    return StepProfiler(model, torch.optim.SGD(model.parameters()), {"profile_step": 1})


@pytest.mark.parametrize(
    "holder",
    [FlopCounterMode(), FlopsProfiler(nn.Linear(3, 5)), step_profiler()],
    ids=["counter", "profiler", "step profiler"],
)
@pytest.mark.parametrize("name", ["root", "total", "by_module"])
def test_holder_asked_for_what_its_profile_has_names_the_profile(holder: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; .* \.profile"):
        getattr(holder, name)


def test_holder_asked_for_another_name_says_nothing_of_the_profile() -> None:
    with pytest.raises(AttributeError) as caught:
        _ = FlopCounterMode().totl  # type: ignore[attr-defined]
    assert str(caught.value) == "'FlopCounterMode' object has no attribute 'totl'"


@pytest.mark.parametrize(
    "read",
    [
        lambda counter: dispatch_flops.diff(counter, counter.profile),
        csv.render,
        overview.render,
        dispatch_flops.analysis.headline,
    ],
)
def test_function_given_a_counter_says_what_to_pass(read: Callable[[Any], Any]) -> None:
    with pytest.raises(AttributeError, match=r"pass \.profile"):
        read(counted())


def test_copy_of_a_counter_has_its_profile() -> None:
    counter = counted()
    assert copy.deepcopy(counter).profile.total().macs == 2 * 3 * 5
