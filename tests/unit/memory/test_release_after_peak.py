"""Activations that are made after every peak, and released before the end of the block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dispatch_flops import FlopCounterMode

F32 = 4


def kept_by(run: Callable[[], object], model: nn.Module) -> dict[str, int]:
    """Return ``{name: bytes}`` of activations that each child kept."""
    with FlopCounterMode(model, display=False, memory=True) as counter:
        run()
    found = {}
    for child in counter.profile.check().root.children:
        assert child.memory is not None
        found[child.fqn] = child.memory.own.activations
    return found


def test_activation_of_a_model_that_runs_backward_in_its_forward_is_kept() -> None:
    """Kept are the exponential, its sum, and the gradient of the sum that starts the backward."""

    class Gradient(nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            torch.autograd.grad(x.exp().sum(), x)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = Gradient(), Gradient()

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> None:
            self.large(a), self.small(b)

    a, b = (torch.ones(size, requires_grad=True) for size in (1009, 13))
    model = Both()
    kept = kept_by(lambda: model(a, b), model)
    assert kept == {"large": (1009 + 2) * F32, "small": (13 + 2) * F32}


def test_result_that_is_released_after_the_call_is_kept() -> None:
    model = nn.ModuleDict({"large": nn.ReLU(), "small": nn.ReLU()})

    def run() -> None:
        model["large"](torch.ones(1009))
        result = model["small"](torch.ones(13))
        del result

    assert kept_by(run, model) == {"large": 1009 * F32, "small": 13 * F32}
