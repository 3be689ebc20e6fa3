"""Clocks that only tests advance, and operators and modules that advance them."""

from __future__ import annotations

import torch
from torch import nn


class Ticks:
    """Clock that tests advance, and that advances by ``per_reading`` at each reading."""

    def __init__(self, per_reading: float = 0.0) -> None:
        self.now = 0.0
        self.per_reading = per_reading

    def __call__(self) -> float:
        self.now += self.per_reading
        return self.now


class Working(nn.Module):
    """Module that takes ``seconds`` of the clock, and then calls its children."""

    def __init__(self, clock: Ticks, seconds: float, *children: nn.Module) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = seconds
        self.inner = nn.ModuleList(children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += self.seconds
        for child in self.inner:
            x = child(x)
        return x


# Seconds of CLOCK that the operator, its backward and its formula take.
WORK, GRADIENT, PRICING = 2.0, 3.0, 100.0


class Clock:
    """Clock of the host while the fixture ``host_clock`` is in use."""

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
    """Module that runs ``work`` once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return work(x)
