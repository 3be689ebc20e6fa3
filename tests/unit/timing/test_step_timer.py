"""Seconds of optimizer steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode
from tests.helpers.clocks import CLOCK, GRADIENT, WORK, work

pytestmark = pytest.mark.usefixtures("host_clock")


def test_step_timer_sums_the_seconds_of_steps() -> None:
    class Slow(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            CLOCK.now += 7.0

    model = nn.Linear(2, 3)
    optimizer = Slow(model.parameters(), lr=0.1)
    with FlopCounterMode(model, display=False, latency=True) as counter:
        optimizer.step()
        optimizer.step()
    assert counter.profile.timing.latency("optimizer") == 2 * 7.0


def test_step_timer_counts_a_nested_step_once() -> None:
    class Slow(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            CLOCK.now += 7.0

    class Around(torch.optim.SGD):
        fails = False

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            CLOCK.now += 3.0
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
            outer.step()  # it is over, although its post hook does not run
        inner.step()
    assert counter.profile.timing.latency("optimizer") == (3.0 + 7.0 + 20.0) + 7.0


def test_step_timer_excludes_a_step_within_backward_from_backward() -> None:
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
