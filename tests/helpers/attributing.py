"""Own MACs by module and phase, and small models to attribute them in."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dispatch_flops import Profile
from dispatch_flops.profile.cost import PHASES
from tests.helpers.profiling import profile_of

Work = dict[str, dict[str, int]]


def work_of(profile: Profile) -> Work:
    """Return ``{fqn: {phase: MACs of its own operators}}`` without the zeros."""
    table: Work = {}
    for node in profile.nodes():
        for phase in PHASES:
            macs = node.own(phase).macs
            if macs:
                table.setdefault(node.fqn, {})[phase] = macs
    return table


def work(fn: Callable[..., Any], *args: Any, model: nn.Module | None = None) -> Work:
    """Return the own MACs by module and phase of ``fn(*args)``."""
    return work_of(profile_of(fn, *args, model=model))


def plain(*sizes: int) -> nn.Sequential:
    """Build linear layers of these sizes without biases, so that they are only matrix products."""
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)))


def rows(n: int, width: int, *, grad: bool = False) -> Tensor:
    return torch.randn(n, width, requires_grad=grad)


def train(model: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
    """Run one forward and one backward pass."""
    model(*args, **kwargs).sum().backward()


class Products(nn.Module):
    """Products with tensors that are not parameters."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.factors = [rows(a, b, grad=True) for a, b in pairwise(sizes)]

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = x @ factor
        return x
