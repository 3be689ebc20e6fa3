"""Counting and timing in one pass, on a clock that only the test's own operators advance."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dispatch_flops import FlopCounterMode, OpCost, Profile, register_flops, unregister_flops
from dispatch_flops.counting.profile_builder import build_profile
from dispatch_flops.profilers import session
from dispatch_flops.timing import calibrated
from dispatch_flops.timing.operator_timers import HostOperatorTimer, _Span
from dispatch_flops.timing.overhead import CallOverhead, Overhead

WORK, PRICING, GRADIENT = 2.0, 100.0, 3.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


@torch.library.custom_op("dispatch_flops_timed::work", mutates_args=())
def work(x: torch.Tensor) -> torch.Tensor:
    CLOCK.now += WORK
    return x.clone()


@torch.library.custom_op("dispatch_flops_timed::work_backward", mutates_args=())
def work_backward(x: torch.Tensor) -> torch.Tensor:
    CLOCK.now += GRADIENT
    return x.clone()


work.register_autograd(lambda ctx, grad: work_backward(grad))


class Worker(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return work(x)


@pytest.fixture(autouse=True)
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def slow_formula(x: torch.Tensor, *, out: torch.Tensor, **_: object) -> OpCost:
        CLOCK.now += PRICING  # the profiler's own time, and a lot of it
        return OpCost(flops=x.numel())

    CLOCK.now = 0.0
    monkeypatch.setattr("dispatch_flops.timing.overhead._now", CLOCK)
    monkeypatch.setattr(calibrated, "call_overhead", CallOverhead)
    register_flops([work, work_backward])(slow_formula)
    yield
    unregister_flops([work, work_backward])


def test_the_profilers_own_time_is_nobodys() -> None:
    model = nn.Sequential(Worker(), nn.Sequential(Worker(), Worker()))
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.ones(3))
    profile = counter.profile
    assert profile.node("0").latency_s == WORK
    assert profile.node("1").latency_s == 2 * WORK
    assert profile.root.latency_s == 3 * WORK
    assert CLOCK.now == 3 * WORK + PRICING  # one signature, priced once


def test_the_unseen_way_is_as_many_times_slower_as_the_seen_one() -> None:
    own = Overhead(CallOverhead(per_operator_s=2.0, per_module_s=6.0, reach_s=0.5))
    own.operator(seen_s=7.0, reach_s=0.25)  # never faster than when it was measured
    assert own.seconds == 7.0 + 2.0
    own.operator(seen_s=0.0, reach_s=1.5)
    assert own.seconds == 9.0 + 2.0 * 3
    own.operator(seen_s=0.0, reach_s=None)  # not known: as the one before
    assert own.seconds == 15.0 + 2.0 * 3
    begun = own.hook()
    CLOCK.now += 1.0
    own.hook_since(begun)
    assert own.seconds == 21.0 + 1.0 + 6.0 / 2 * 3
    own.operator(seen_s=0.0, reach_s=1e6)  # something else ran meanwhile
    assert own.seconds == 31.0 + 2.0 * 10


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_only_a_look_up_counts_as_the_way(
    monkeypatch: pytest.MonkeyPatch, grad_mode: type[torch.no_grad]
) -> None:
    """Not the first call of an operator, which is decided on, nor one that is taken apart."""
    reaches: list[float | None] = []
    monkeypatch.setattr(Overhead, "operator", lambda own, seen_s, reach_s: reaches.append(reach_s))
    x = torch.ones(2, 3)
    with grad_mode(), FlopCounterMode(display=False, latency=True):
        torch.neg(x)
        torch.neg(x)
        torch.nn.functional.linear(x, x)
    composite = grad_mode is torch.inference_mode  # linear reaches the mode whole
    assert reaches[:2] == [None, 0.0]
    assert set(reaches[2:]) == {None}
    assert len(reaches) == 3 if composite else 4


def test_no_module_takes_less_than_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is taken off for what is not seen, were it a hundred times too much."""
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


def test_operators_have_their_time() -> None:
    model = nn.Sequential(Worker(), Worker())
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.ones(3))
    assert counter.profile.by_operator()["dispatch_flops_timed.work.default"].latency_s == 2 * WORK


def test_backward_lasts_from_its_first_to_its_last_operator() -> None:
    model = nn.Sequential(Worker(), Worker())
    x = torch.ones(3, requires_grad=True)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        for _ in range(2):
            CLOCK.now += 50.0  # between the passes: neither forward nor backward
            model(x).sum().backward()
    profile = counter.profile
    assert profile.timing.latency("backward") == 2 * 2 * GRADIENT
    assert profile.root.latency_s == 2 * 2 * WORK


def test_the_whole_is_all_that_ran_but_the_profiler() -> None:
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


def test_the_whole_is_the_same_whoever_asks() -> None:
    model = Worker()
    seen: list[float | None] = []
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(torch.ones(3))
        thread = threading.Thread(target=lambda: seen.append(counter.profile.timing.iteration_s))
        thread.start()
        thread.join()
    assert seen == [WORK]


def test_what_reading_a_profile_takes_is_the_profilers(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_step_that_a_backward_pass_runs_is_no_part_of_it() -> None:
    class Slow(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            CLOCK.now += 7.0

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return work(work(x) * self.scale)

    model = Scaled()
    optimizer = Slow(model.parameters(), lr=0.1)
    model.scale.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    x = torch.ones(3, requires_grad=True)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(x).sum().backward()
    timing = counter.profile.timing
    assert (timing.latency("optimizer"), timing.latency("backward")) == (7.0, 2 * GRADIENT)
    assert timing.iteration_s == 2 * WORK + 2 * GRADIENT + 7.0


def test_of_a_backward_pass_in_two_threads_each_ones_own_time_is_taken_off() -> None:
    timer = HostOperatorTimer(Overhead())
    timer._spans = {
        (1, 11): _Span(20.0, overhead_begun=1.0, ended=30.0, overhead_ended=3.0, in_operators=4.0),
        (1, 12): _Span(30.0, overhead_begun=90.0, ended=50.0, overhead_ended=95.0),
        (2, 12): _Span(35.0, overhead_begun=91.0, ended=40.0, overhead_ended=93.0),  # nested
        (3, 11): _Span(60.0, overhead_begun=5.0, ended=61.0, overhead_ended=5.0),
    }
    assert timer.backward_s() == (10.0 - 2.0) + (20.0 - 5.0) + 1.0


def test_optimizer_steps_are_timed() -> None:
    class Slow(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            CLOCK.now += 7.0

    model = nn.Linear(2, 3)
    optimizer = Slow(model.parameters(), lr=0.1)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        optimizer.step()
        optimizer.step()
    assert counter.profile.timing.latency("optimizer") == 2 * 7.0


def test_a_step_that_another_optimizer_takes_part_in_is_one() -> None:
    class Slow(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            CLOCK.now += 7.0

    class Around(torch.optim.SGD):
        fails = False

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            inner.step()
            CLOCK.now += 20.0
            if self.fails:
                raise ValueError

    model = nn.Linear(2, 3)
    inner = Slow(model.parameters(), lr=0.1)
    outer = Around(model.parameters(), lr=0.1)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        outer.step()
        outer.fails = True
        with pytest.raises(ValueError):
            outer.step()  # is over, though nobody says so
        inner.step()
    assert counter.profile.timing.latency("optimizer") == 7.0 + 20.0 + 7.0


def test_what_one_thread_has_profiled_is_not_taken_off_another() -> None:
    own = Overhead(CallOverhead(per_operator_s=3.0))
    own.operator(seen_s=2.0, reach_s=None)
    elsewhere: list[float] = []
    thread = threading.Thread(target=lambda: elsewhere.append(own.seconds))
    thread.start()
    thread.join()
    assert (own.seconds, elsewhere) == (5.0, [0.0])


def test_without_latency_nothing_is_measured() -> None:
    model = Worker()
    with FlopCounterMode(model, display=False) as counter:
        model(torch.ones(3))
    assert counter.profile.root.latency_s is None
    assert counter.profile.timing.latency("backward") is None
    assert all(op.latency_s is None for op in counter.profile.op_totals())


def test_a_step_with_a_closure_takes_as_long_as_its_operators() -> None:
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


def test_a_module_takes_as_long_in_backward_as_its_operators() -> None:
    model = nn.Sequential(Worker(), nn.Sequential(Worker(), Worker()))
    x = torch.ones(3, requires_grad=True)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(x).sum().backward()
    assert counter.profile.node("0").latency("backward") == GRADIENT
    assert counter.profile.node("1").latency("backward") == 2 * GRADIENT
    assert counter.profile.root.latency("backward") == 3 * GRADIENT


def test_an_operator_on_a_wrapper_takes_as_long_as_what_runs_inside() -> None:
    x = TwoTensor(torch.ones(3), torch.ones(3))
    with FlopCounterMode(display=False, latency=True) as counter:
        work(x)
    seconds = {op.op: op.latency_s for op in counter.profile.op_totals()}
    assert seconds["dispatch_flops_timed.work.default"] == 2 * WORK


def test_what_is_answered_without_running_takes_no_time() -> None:
    with FlopCounterMode(display=False, latency=True, meta_value=1.0) as counter:
        work(torch.ones(3))
        torch.ones((), device="meta").item()
    seconds = {op.op: op.latency_s for op in counter.profile.op_totals()}
    assert seconds["aten._local_scalar_dense.default"] is None
