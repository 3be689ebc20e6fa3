"""Counting and timing in one pass, on clocks that only the operators of the tests advance."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode, Profile
from dispatch_flops.analysis.latency import latency_of
from dispatch_flops.counting.profile_builder import build_profile
from dispatch_flops.profilers import session
from dispatch_flops.timing import calibrated
from dispatch_flops.timing.overhead import CallOverhead
from tests.helpers.accelerator import (
    GRADIENT_KERNEL,
    KERNEL,
    UPDATE,
    Event,
    Gpu,
    Launcher,
    update,
)
from tests.helpers.clocks import CLOCK, GRADIENT, PRICING, WORK, Worker, work, work_backward

pytestmark = pytest.mark.usefixtures("host_clock")


def test_host_pass_excludes_the_time_of_pricing() -> None:
    model = nn.Sequential(Worker(), nn.Sequential(Worker(), Worker()))
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.ones(3))
    profile = counter.profile
    assert profile.node("0").latency_s == WORK
    assert profile.node("1").latency_s == 2 * WORK
    assert profile.root.latency_s == 3 * WORK
    assert CLOCK.now == 3 * WORK + PRICING  # one signature, priced once


def test_host_pass_gives_modules_at_least_the_time_of_their_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This holds even if the calibrated overhead is a hundred times too large."""
    monkeypatch.setattr(
        calibrated, "call_overhead", lambda: CallOverhead(100 * WORK, 100 * WORK, 0.0)
    )
    model = nn.Sequential(Worker(), nn.Sequential(Worker(), Worker()))
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.ones(3))
    profile = counter.profile
    assert profile.node("0").latency_s == WORK
    assert profile.node("1").latency_s == 2 * WORK
    assert profile.root.latency_s == 3 * WORK


def test_host_pass_gives_modules_at_least_the_time_of_layers_in_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list is never called and has no time of its own."""
    monkeypatch.setattr(
        calibrated, "call_overhead", lambda: CallOverhead(100 * WORK, 100 * WORK, 0.0)
    )

    class Stack(Worker):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.ModuleList(nn.ModuleList([Worker(), Worker()]) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for pair in self.pairs:
                for layer in pair:
                    x = layer(x)
            return super().forward(x)

    model = Stack()
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.ones(3))
    assert counter.profile.node("pairs").latency_s is None
    assert counter.profile.root.latency_s == 3 * 2 * WORK + WORK


def test_host_pass_iteration_includes_all_code_but_the_profiler() -> None:
    model = Worker()
    with FlopCounterMode(model, display=False, latency=True) as counter:
        CLOCK.now += 5.0  # other code
        model(torch.ones(3))
        assert counter.profile.timing.iteration_s == 5.0 + WORK
        counter.pause()
        CLOCK.now += 50.0
        counter.resume()
        work(torch.ones(3))  # outside the model
    CLOCK.now += 50.0
    assert counter.profile.timing.iteration_s == 5.0 + WORK + WORK


def test_host_pass_iteration_is_the_same_from_another_thread() -> None:
    model = Worker()
    seen: list[float | None] = []
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.ones(3))
        thread = threading.Thread(target=lambda: seen.append(counter.profile.timing.iteration_s))
        thread.start()
        thread.join()
    assert seen == [WORK]


def test_host_pass_iteration_excludes_the_time_of_building_profiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow_build(*args: Any, **kwargs: Any) -> Profile:
        CLOCK.now += PRICING
        return build_profile(*args, **kwargs)

    monkeypatch.setattr(session, "build_profile", slow_build)
    model = Worker()
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.ones(3))
        assert counter.profile.timing.iteration_s == WORK
        model(torch.ones(3))
    assert counter.profile.timing.iteration_s == 2 * WORK


def test_untimed_pass_measures_nothing() -> None:
    model = Worker()
    with FlopCounterMode(model, display=False) as counter:
        model(torch.ones(3))
    assert counter.profile.root.latency_s is None
    assert counter.profile.timing.latency("backward") is None
    assert all(op.latency_s is None for op in counter.profile.op_totals())


def test_host_pass_times_a_step_with_a_closure_by_its_operators() -> None:
    class Closing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            assert callable(closure)
            with torch.enable_grad():
                closure()
            with torch.no_grad():
                work_backward(torch.ones(3))

    model = nn.Sequential(Worker(), Worker())
    x = torch.ones(3, requires_grad=True)
    optimizer = Closing([x], lr=0.1)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        optimizer.step(lambda: model(x).sum().backward())
    timing = counter.profile.timing
    assert timing.latency("optimizer") == GRADIENT
    assert timing.latency("backward") == 2 * GRADIENT


@pytest.mark.parametrize("steps", [0, 2])
def test_host_pass_adds_what_clips_gradients_to_the_steps(steps: int) -> None:
    class Slow(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            CLOCK.now += 7.0
            with torch.no_grad():
                work_backward(torch.ones(3))

    model = Worker()
    x = torch.ones(3, requires_grad=True)
    optimizer = Slow([x], lr=0.1)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(x).sum().backward()
        with torch.no_grad():
            work(torch.ones(3))
        for _ in range(steps):
            optimizer.step()
    timing = counter.profile.timing
    assert timing.latency("optimizer") == WORK + steps * (7.0 + GRADIENT)


def test_host_pass_times_backward_of_a_module_by_its_operators() -> None:
    model = nn.Sequential(Worker(), nn.Sequential(Worker(), Worker()))
    x = torch.ones(3, requires_grad=True)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(x).sum().backward()
    assert counter.profile.node("0").latency("backward") == GRADIENT
    assert counter.profile.node("1").latency("backward") == 2 * GRADIENT
    assert counter.profile.root.latency("backward") == 3 * GRADIENT


# -- on an accelerator ---------------------------------------------------------------------------


def test_event_pass_times_every_layer_of_a_kind_and_every_step(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Event] = []
    record = Event.record

    def noted(event: Event, stream: Any) -> None:
        recorded.append(event)
        record(event, stream)

    monkeypatch.setattr(Event, "record", noted)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        for _ in range(4):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    profile = counter.profile
    assert all(layer.latency_s is not None for layer in profile.root.children)
    timed = [op.calls for op in profile.op_totals() if op.latency_s is not None]
    assert len(recorded) == 2 * sum(timed)
    assert {op.kind for op in profile.op_totals() if op.latency_s is None} == {"free"}


def test_event_pass_times_modules_and_phases_by_their_operators(gpu: Gpu) -> None:
    class Optimizer(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            gpu.host += 50.0  # Python's time, while the device has nothing to do
            update(torch.ones(2))

    model = nn.Sequential(Launcher(), Launcher(Launcher(), Launcher()))
    optimizer = Optimizer([nn.Parameter(torch.ones(1))])
    x = torch.ones(3, requires_grad=True)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(x).sum().backward()
        optimizer.step()
    profile = counter.profile
    assert profile.node("0").latency_s == KERNEL
    assert profile.node("1").latency_s == 3 * KERNEL
    assert profile.node("1").latency("backward") == 3 * GRADIENT_KERNEL
    assert profile.root.latency_s == 4 * KERNEL
    assert latency_of(profile.root, "backward") == 4 * GRADIENT_KERNEL
    assert profile.timing.latency("backward") == 4 * GRADIENT_KERNEL
    assert profile.timing.latency("optimizer") == UPDATE
    assert profile.by_operator()["dispatch_flops_devices.work.default"].latency_s == 4 * KERNEL
    assert profile.timing.method is not None and "events on the device" in profile.timing.method
    assert profile.run.device == "cuda"
    assert gpu.waited == 1
