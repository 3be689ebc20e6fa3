"""Fixtures for tests of time: a clock of the host, and an imitated accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dispatch_flops import OpCost, register_flops, unregister_flops
from dispatch_flops.counting.placement import Placement
from dispatch_flops.timing import calibrated
from dispatch_flops.timing.overhead import CallOverhead
from tests.helpers import accelerator, clocks
from tests.helpers.accelerator import GPU, Gpu
from tests.helpers.clocks import CLOCK


@pytest.fixture
def host_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the profiler read ``CLOCK``; formulas of ``clocks.work`` take ``clocks.PRICING``."""

    def slow_formula(x: torch.Tensor, *, out: torch.Tensor, **_: object) -> OpCost:
        CLOCK.now += clocks.PRICING
        return OpCost(flops=x.numel())

    CLOCK.now = 0.0
    monkeypatch.setattr("dispatch_flops.timing.overhead._now", CLOCK)
    monkeypatch.setattr(calibrated, "call_overhead", CallOverhead)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # by another test, perhaps
    register_flops([clocks.work, clocks.work_backward])(slow_formula)
    yield
    unregister_flops([clocks.work, clocks.work_backward])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Put every module on the imitated accelerator; formulas of its operators take long."""

    def slow_formula(x: torch.Tensor, *, out: Any, **_: object) -> OpCost:
        GPU.host += accelerator.PRICING
        return OpCost(flops=x.numel())

    module = SimpleNamespace(
        Event=accelerator.Event,
        current_stream=lambda device: f"stream of {device}",
        is_current_stream_capturing=lambda: GPU.capturing,
    )
    GPU.__init__()  # type: ignore[misc]
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "synchronize", GPU.synchronize)
    on_first = classmethod(lambda cls, held: cls("cuda", (accelerator.FIRST,)))
    monkeypatch.setattr(Placement, "of_tensors", on_first)
    monkeypatch.setattr(calibrated, "event_gap_s", lambda devices: accelerator.GAP)
    operators = [accelerator.work, accelerator.work_backward, accelerator.update]
    register_flops(operators)(slow_formula)
    yield GPU
    unregister_flops(operators)
