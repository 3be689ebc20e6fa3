"""Time on an accelerator: played by one that works behind a host which runs ahead of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode, OpCost, register_flops, unregister_flops
from dispatch_flops.analysis.latency import latency_of
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.placement import Placement
from dispatch_flops.timing import operator_timers
from dispatch_flops.timing.calibrated import ModulePass
from dispatch_flops.timing.devices import CPU, Devices

KERNEL, GRADIENT, PRICING, UPDATE = 2.0, 3.0, 100.0, 5.0
GAP = 1 / 64
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Gpu:
    """Kernels queue behind each other; an event is over when all that was queued before it is."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0
        self.waited = 0
        self.capturing = False

    def launch(self, seconds: float) -> None:
        self.busy_until = self.queue() + seconds

    def queue(self) -> float:
        return max(self.host, self.busy_until)

    def synchronize(self, device: torch.device) -> None:
        assert device.type == "cuda"
        assert not self.capturing  # torch raises, and the capture is lost
        self.waited += 1
        self.host = self.queue()


GPU = Gpu()


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None

    def record(self, stream: Any) -> None:
        assert stream == f"stream of {FIRST}"
        self.at = GPU.queue()

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None and end.at is not None and end.at <= GPU.host
        return (end.at - self.at) * 1e3


@torch.library.custom_op("dispatch_flops_devices::work", mutates_args=())
def work(x: torch.Tensor) -> torch.Tensor:
    GPU.launch(KERNEL)
    return x.clone()


@torch.library.custom_op("dispatch_flops_devices::work_backward", mutates_args=())
def work_backward(x: torch.Tensor) -> torch.Tensor:
    GPU.launch(GRADIENT)
    return x.clone()


@torch.library.custom_op("dispatch_flops_devices::update", mutates_args=("x",))
def update(x: torch.Tensor) -> None:
    GPU.launch(UPDATE)


work.register_autograd(lambda ctx, grad: work_backward(grad))


class Worker(nn.Module):
    def __init__(self, *below: nn.Module) -> None:
        super().__init__()
        self.below = nn.ModuleList(below)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = work(x)
        for module in self.below:
            x = module(x)
        return x


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Every module is on the played device, whose profiler is slow on the host."""

    def slow_formula(x: torch.Tensor, *, out: Any, **_: object) -> OpCost:
        GPU.host += PRICING
        return OpCost(flops=x.numel())

    module = SimpleNamespace(
        Event=Event,
        current_stream=lambda device: f"stream of {device}",
        is_current_stream_capturing=lambda: GPU.capturing,
    )
    GPU.__init__()  # type: ignore[misc]
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "synchronize", GPU.synchronize)
    played = classmethod(lambda cls, modules: cls("cuda", (FIRST,)))
    monkeypatch.setattr(Placement, "of", played)
    monkeypatch.setattr("dispatch_flops.timing.calibrated.event_gap_s", lambda devices: GAP)
    register_flops([work, work_backward, update])(slow_formula)
    yield GPU
    unregister_flops([work, work_backward, update])


def test_modules_and_phases_take_as_long_as_their_operators(gpu: Gpu) -> None:
    class Optimizer(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            gpu.host += 50.0  # Python's time, while the device has nothing to do
            update(torch.ones(2))

    model = nn.Sequential(Worker(), Worker(Worker(), Worker()))
    optimizer = Optimizer([nn.Parameter(torch.ones(1))])
    x = torch.ones(3, requires_grad=True)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(x).sum().backward()
        optimizer.step()
    profile = counter.profile
    assert profile.node("0").latency_s == KERNEL
    assert profile.node("1").latency_s == 3 * KERNEL
    assert profile.node("1").latency("backward") == 3 * GRADIENT
    assert profile.root.latency_s == 4 * KERNEL
    assert latency_of(profile.root, "backward") == 4 * GRADIENT
    assert profile.timing.latency("backward") == 4 * GRADIENT
    assert profile.timing.latency("optimizer") == UPDATE
    assert profile.by_operator()["dispatch_flops_devices.work.default"].latency_s == 4 * KERNEL
    assert profile.timing.method is not None and "events on the device" in profile.timing.method
    assert profile.run.device == "cuda"
    assert gpu.waited == 1


def test_events_are_read_before_there_are_too_many(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_timers, "_UNREAD", 4)
    model = Worker()
    with FlopCounterMode(model, display=False, latency=True) as counter:
        for _ in range(10):
            model(torch.ones(3))
    assert counter.profile.root.latency_s == 10 * KERNEL
    operators = 2 * 10  # the work and the ones that it is given
    assert gpu.waited == operators // 4 + 1


def test_times_not_yet_read_survive_a_folding_of_the_books(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch_flops.counting.dispatch_mode._LIMIT", 4)
    model = Worker()
    with FlopCounterMode(model, display=False, latency=True) as counter:
        for size in range(1, 20):
            model(torch.ones(size))
    assert counter.profile.root.latency_s == 19 * KERNEL


def test_a_capture_runs_nothing(gpu: Gpu) -> None:
    model = Worker()
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
def test_a_capture_is_not_waited_in(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(f"dispatch_flops.{limit}", 7)
    model = Worker()
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.ones(3))
        gpu.capturing = True
        for size in range(1, 20):
            model(torch.ones(size))
        gpu.capturing = False
        model(torch.ones(5))
    assert counter.profile.root.latency_s == 2 * KERNEL
    assert counter.profile.root.calls == 21


def test_a_capture_is_not_waited_in_by_the_clock_of_several_devices(gpu: Gpu) -> None:
    now = Devices("cuda", (FIRST, SECOND)).clock()
    gpu.capturing = True
    now()
    assert gpu.waited == 0


def test_what_gives_the_device_no_work_has_no_time(gpu: Gpu) -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gpu.host += 50.0
            return work(x).t().reshape(3, 2)

    model = Views()
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.ones(3, 2))
    profile = counter.profile
    assert profile.root.latency_s == KERNEL
    assert profile.by_operator()["aten.t.default"].latency_s is None
    assert profile.timing.operator_resolution_s == 10 * GAP


def test_a_pass_of_its_own_synchronizes_once(gpu: Gpu) -> None:
    model = Worker(Worker(), Worker(Worker()))
    with ModulePass(ModuleNames([model]), devices=Devices("cuda", (FIRST,))) as latency:
        model(torch.ones(1))
        model(torch.ones(1))
    assert gpu.waited == 0
    assert latency.seconds() == {
        "below.0": 2 * KERNEL,
        "below.1.below.0": 2 * KERNEL,
        "below.1": 2 * 2 * KERNEL,
        "": 2 * 4 * KERNEL,
    }
    assert gpu.waited == 1


def test_recursion_on_the_device_counts_the_outermost_call(gpu: Gpu) -> None:
    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            x = work(x)
            return self(x, depth - 1) if depth else x

    model = Recursive()
    with ModulePass(ModuleNames([model]), devices=Devices("cuda", (FIRST,))) as latency:
        model(torch.ones(1), 3)
    assert latency.seconds() == {"": 4 * KERNEL}


def test_several_accelerators_are_waited_for_at_every_reading(gpu: Gpu) -> None:
    devices = Devices("cuda", (FIRST, SECOND))
    assert devices.events() is None
    now = devices.clock()
    gpu.launch(7.0)
    now()
    assert gpu.host == 7.0
    assert gpu.waited == 2


def test_events_without_streams_are_not_used(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    assert Devices("mps", (torch.device("mps"),)).events() is None


def on(*names: str) -> nn.Module:
    """What stands for a module: all that is asked of it is where its tensors are."""
    tensors = {str(i): SimpleNamespace(device=torch.device(name)) for i, name in enumerate(names)}
    module: Any = SimpleNamespace(_parameters=tensors, _buffers={"none": None})
    return module


@pytest.mark.parametrize(
    ("modules", "devices"),
    [
        ([on("cpu")], CPU),
        ([on("meta")], Devices("meta", computes=False)),
        ([], CPU),
        ([on("meta"), on("cuda:1")], Devices("cuda", (SECOND,))),  # offloaded in part
        ([on("cpu", "cuda:0", "cuda:0")], Devices("cuda", (FIRST,))),
        ([on("cuda:0"), on("cuda:1")], Devices("cuda", (FIRST, SECOND))),
    ],
)
def test_the_accelerator_is_where_a_model_computes(
    modules: list[nn.Module], devices: Devices
) -> None:
    assert Devices.of(modules) == devices


def test_devices_by_name() -> None:
    assert Devices.at("cpu") == CPU
    assert Devices.at("cuda:1") == Devices("cuda", (SECOND,))
