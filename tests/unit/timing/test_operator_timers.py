"""Seconds of operators, by the host's clock and by events on a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dispatch_flops import FlopCounterMode
from dispatch_flops.timing import operator_timers
from dispatch_flops.timing.operator_timers import HostOperatorTimer, _Span
from dispatch_flops.timing.overhead import Overhead
from tests.helpers import accelerator
from tests.helpers.accelerator import GAP, KERNEL, Gpu, Launcher
from tests.helpers.clocks import CLOCK, GRADIENT, WORK, Worker, work

pytestmark = pytest.mark.usefixtures("host_clock")


# -- by the host's clock -------------------------------------------------------------------------


def test_host_operator_timer_sums_the_seconds_of_an_operator() -> None:
    model = nn.Sequential(Worker(), Worker())
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.ones(3))
    assert counter.profile.by_operator()["dispatch_flops_timed.work.default"].latency_s == 2 * WORK


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_host_operator_timer_measures_the_reach_of_known_operators_only(
    monkeypatch: pytest.MonkeyPatch, grad_mode: type[torch.no_grad]
) -> None:
    """It excludes the first call of an operator, whose plan is made, and composite operators."""
    reaches: list[float | None] = []
    monkeypatch.setattr(Overhead, "operator", lambda own, seen_s, reach_s: reaches.append(reach_s))
    x = torch.ones(2, 3)
    CLOCK.now = 50.0
    with grad_mode(), FlopCounterMode(display=False, latency=True):
        torch.neg(x)
        torch.neg(x)
        torch.nn.functional.linear(x, x)
    composite = grad_mode is torch.inference_mode  # linear reaches the mode whole
    assert reaches[:2] == [None, 0.0]
    assert set(reaches[2:]) == {None}
    assert len(reaches) == (3 if composite else 4)


def test_host_operator_timer_spans_backward_from_first_to_last_operator() -> None:
    model = nn.Sequential(Worker(), Worker())
    x = torch.ones(3, requires_grad=True)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        for _ in range(2):
            CLOCK.now += 50.0  # between the passes, in neither forward nor backward
            model(x).sum().backward()
    profile = counter.profile
    assert profile.timing.latency("backward") == 2 * 2 * GRADIENT
    assert profile.root.latency_s == 2 * 2 * WORK


def test_host_operator_timer_subtracts_the_overhead_of_each_thread_in_backward() -> None:
    timer = HostOperatorTimer(Overhead())
    timer._spans = {
        (1, 11): _Span(20.0, overhead_begun=1.0, ended=30.0, overhead_ended=3.0, in_operators=4.0),
        (1, 12): _Span(30.0, overhead_begun=90.0, ended=50.0, overhead_ended=95.0),
        (2, 12): _Span(35.0, overhead_begun=91.0, ended=40.0, overhead_ended=93.0),  # nested
        (3, 11): _Span(60.0, overhead_begun=5.0, ended=61.0, overhead_ended=5.0),
    }
    assert timer.backward_s() == (10.0 - 2.0) + (20.0 - 5.0) + 1.0


def test_host_operator_timer_times_an_operator_on_a_subclass_by_its_inner_ones() -> None:
    x = TwoTensor(torch.ones(3), torch.ones(3))
    with FlopCounterMode(display=False, latency=True) as counter:
        work(x)
    seconds = {op.op: op.latency_s for op in counter.profile.op_totals()}
    assert seconds["dispatch_flops_timed.work.default"] == 2 * WORK


def test_host_operator_timer_has_no_time_for_an_operator_that_does_not_run() -> None:
    with FlopCounterMode(display=False, latency=True, meta_value=1.0) as counter:
        work(torch.ones(3))
        torch.ones((), device="meta").item()
    seconds = {op.op: op.latency_s for op in counter.profile.op_totals()}
    assert seconds["aten._local_scalar_dense.default"] is None


# -- by events on a device -----------------------------------------------------------------------


def test_event_operator_timer_reads_events_before_there_are_too_many(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_timers, "_UNREAD", 4)
    model = Launcher()
    with FlopCounterMode(model, display=False, latency=True) as counter:
        for _ in range(10):
            model(torch.ones(3))
    assert counter.profile.root.latency_s == 10 * KERNEL
    operators = 2 * 10  # ``work``, and ``ones`` for its input
    assert gpu.waited == operators // 4 + 1


def test_event_operator_timer_keeps_unread_times_when_calls_are_aggregated(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch_flops.counting.dispatch_mode._LIMIT", 4)
    model = Launcher()
    with FlopCounterMode(model, display=False, latency=True) as counter:
        for size in range(1, 20):
            model(torch.ones(size))
    assert counter.profile.root.latency_s == 19 * KERNEL


def test_event_operator_timer_has_no_time_for_captured_operators(gpu: Gpu) -> None:
    model = Launcher()
    with FlopCounterMode(model, display=False, latency=True) as counter:
        gpu.capturing = True
        model(torch.ones(3))
        gpu.capturing = False
        model(torch.ones(3))
    assert counter.profile.root.latency_s == KERNEL
    assert counter.profile.root.calls == 2


@pytest.mark.parametrize(
    "limit", ("timing.operator_timers._UNREAD", "counting.dispatch_mode._LIMIT")
)
def test_event_operator_timer_does_not_wait_during_capture(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(f"dispatch_flops.{limit}", 7)
    model = Launcher()
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.ones(3))
        gpu.capturing = True
        for size in range(1, 20):
            model(torch.ones(size))
        gpu.capturing = False
        model(torch.ones(5))
    assert counter.profile.root.latency_s == 2 * KERNEL
    assert counter.profile.root.calls == 21


def test_event_operator_timer_has_no_time_for_views(gpu: Gpu) -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gpu.host += 50.0
            return accelerator.work(x).t().reshape(3, 2)

    model = Views()
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.ones(3, 2))
    profile = counter.profile
    assert profile.root.latency_s == KERNEL
    assert profile.by_operator()["aten.t.default"].latency_s is None
    assert profile.timing.operator_resolution_s == 10 * GAP
