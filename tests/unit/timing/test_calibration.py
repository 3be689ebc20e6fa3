"""Calibration is independent of the state of the program, and leaves no trace in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from dispatch_flops import FlopCounterMode, profile_model
from dispatch_flops.timing import calibration
from dispatch_flops.timing.overhead import Overhead


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear the results of earlier calibrations, and calibrate in few turns."""
    monkeypatch.setattr(calibration, "TURNS", 4)
    calibration.call_overhead.cache_clear()
    calibration.hook_overhead.cache_clear()
    yield
    calibration.call_overhead.cache_clear()
    calibration.hook_overhead.cache_clear()


def test_calibration_leaves_the_random_state() -> None:
    model = nn.Linear(3, 3)
    before = torch.get_rng_state()
    with FlopCounterMode(model, display=False, latency=True):
        model(torch.ones(3, 3))
    assert torch.equal(torch.get_rng_state(), before)


def contexts() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    return {
        "inference mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "meta by default": lambda: torch.device("meta"),
        "as usual": nullcontext,
    }


@pytest.mark.parametrize("context", contexts())
def test_call_overhead_does_not_depend_on_modes_of_the_program(context: str) -> None:
    """A linear runs two operators, neither of which is a cast; module calls have overhead too."""
    calls: list[float | None] = []
    usual = Overhead.operator

    def record(own: Overhead, seen_s: float, reach_s: float | None) -> None:
        calls.append(reach_s)
        usual(own, seen_s, reach_s)

    with pytest.MonkeyPatch.context() as patch, contexts()[context]():
        patch.setattr(Overhead, "operator", record)
        per_op, per_module, reach_s = calibration.call_overhead()
    turns = 2 * calibration.TURNS  # of bare operators, and of modules
    assert len(calls) == turns * 100 * 2
    assert calls.count(None) == 2 * 2  # the first calls of both operators in each pass
    assert per_op >= 0 and per_module >= 0 and reach_s > 0  # on a busy machine perhaps 0


def test_calibration_does_not_call_hooks_of_the_program() -> None:
    seen: list[str] = []

    def note(*_: Any) -> None:
        seen.append("called")

    model = nn.Linear(3, 3)
    handles = [
        register_module_forward_hook(note),
        register_module_module_registration_hook(note),
        register_module_parameter_registration_hook(note),
    ]
    try:
        with FlopCounterMode(model, display=False, latency=True):
            model(torch.ones(3, 3))
        profile_model(model, args=[torch.ones(3, 3)])
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == 1 + 4  # the block; then warm-up, timing, timing with hooks, counting


def test_calibration_is_not_counted_by_an_outer_counter() -> None:
    model = nn.Linear(3, 3)
    with (
        FlopCounterMode(model, display=False) as outer,
        FlopCounterMode(model, display=False, latency=True),
    ):
        model(torch.ones(5, 3))
    assert outer.get_total_macs() == 5 * 3 * 3
    assert not outer.profile.outside.children


def test_calibration_within_vmap_keeps_the_result() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        with FlopCounterMode(display=False, latency=True):
            return x * 2

    assert torch.equal(torch.func.vmap(run)(torch.ones(2, 3)), torch.full((2, 3), 2.0))
