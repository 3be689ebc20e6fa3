"""Counters that overlap without nesting, in one thread and in several, and other threads' work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode, FlopsProfiler
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.errors import WrongThreadError
from dispatch_flops.timing.calibrated import ModulePass

B, IN, OUT = 5, 4, 3


@pytest.fixture
def compiled() -> Iterator[tuple[Callable[..., Any], list[str]]]:
    """A compiled layer, and what it did: compiled once at first."""
    done: list[str] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            done.append("ran compiled")
            return graph(*args)

        return run

    layer = torch.compile(nn.Linear(IN, IN), backend=backend)
    layer(torch.ones(B, IN))
    done.clear()
    yield layer, done
    assert eval_frame._stance.stance == "default"
    torch._dynamo.reset()


def test_profilers_that_overlap_count_each_its_own(compiled: Any) -> None:
    layer, done = compiled
    first, second = FlopsProfiler(nn.Linear(IN, OUT)), FlopsProfiler(nn.Linear(OUT, 2))
    first.start_profile()
    hidden = first.model(torch.ones(B, IN))
    second.start_profile()
    second.model(hidden)
    first.stop_profile()
    second.model(hidden)
    layer(torch.ones(B, IN))
    assert not done  # still counted, and so eager
    second.stop_profile()
    assert first.get_total_macs() == B * IN * OUT
    assert second.get_total_macs() == 2 * B * OUT * 2
    assert _get_current_dispatch_mode_stack() == []
    layer(torch.ones(B, IN))
    assert done == ["ran compiled"]


def test_counters_of_two_threads_leave_compiled_code_compiled(compiled: Any) -> None:
    layer, done = compiled
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first() -> None:
        with FlopCounterMode(nn.Linear(IN, OUT), display=False):
            first_is_in.set()
            second_is_in.wait(10)
        first_is_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(10)
    with FlopCounterMode(layer, display=False) as counter:
        second_is_in.set()
        first_is_out.wait(10)
        layer(torch.ones(B, IN))
    thread.join()
    assert not done
    assert counter.get_total_macs() == B * IN * IN
    layer(torch.ones(B, IN))
    assert done == ["ran compiled"]


def test_a_profile_is_stopped_where_it_was_started() -> None:
    profiler = FlopsProfiler(nn.Linear(IN, OUT))
    profiler.start_profile()
    refused: list[str] = []

    def stop() -> None:
        try:
            profiler.stop_profile()
        except WrongThreadError as error:
            refused.append(str(error))

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()
    assert "another thread" in refused[0]
    profiler.model(torch.ones(B, IN))
    profiler.stop_profile()
    assert profiler.get_total_macs() == B * IN * OUT
    assert _get_current_dispatch_mode_stack() == []


class Meeting(nn.Module):
    """In whose forward another thread's model is run, whole or half."""

    def __init__(self, other: Callable[[], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT)
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=self.other)
        thread.start()
        thread.join()
        return self.layer(x)


@pytest.mark.parametrize("given", [True, False])
def test_another_threads_modules_are_not_the_models(given: bool) -> None:
    stranger = nn.Sequential(nn.Linear(10, 10), nn.ReLU())
    model = Meeting(lambda: stranger(torch.ones(1, 10)))
    mods = model if given else None
    with FlopCounterMode(mods, display=False, latency=True) as counter:
        model(torch.ones(B, IN))
    profile = counter.profile
    assert [node.fqn for node in profile.root.walk()] == ["", "layer"]
    assert profile.total_params == IN * OUT + OUT
    assert all(node.latency_s is not None for node in profile.root.walk())


def test_a_pass_of_its_own_is_of_one_thread() -> None:
    stranger = nn.Sequential(nn.Linear(10, 10), nn.ReLU())
    model = Meeting(lambda: stranger(torch.ones(1, 10)))
    with ModulePass(ModuleNames([model])) as latency:
        model(torch.ones(B, IN))
    assert set(latency.seconds()) == {"", "layer"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_backward_pass_runs_again_is_no_forward(reentrant: bool) -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return torch.tanh(x)

    model = nn.ModuleDict({"slow": Slow()})
    x = torch.ones(2, requires_grad=True)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        checkpoint(model["slow"], x, use_reentrant=reentrant).sum().backward()
    seconds = counter.profile.node("slow").latency_s
    assert seconds is not None and 0.05 <= seconds < 0.1
