"""A test model with its cost in closed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, an input for it, and their cost in closed form.

    macs: MACs of one forward pass.
    params: elements of the distinct parameters.
    gradient_macs: MACs of one backward pass from the output, without the input's gradient; None
        where no closed form is written.
    recomputed_macs: MACs of the attention scores, which fused attention computes again in the
        backward pass.
    modules: ``{fqn: MACs}``, inclusive, of some modules.
    runs_for_real: True if small enough to run with data in a test; else it runs on meta.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    macs: int
    params: int
    gradient_macs: int | None = None
    recomputed_macs: int = 0
    modules: Mapping[str, int] = field(default_factory=dict)
    runs_for_real: bool = False

    def build(self, device: str = "cpu") -> tuple[nn.Module, tuple[Any, ...]]:
        """Build the model, in evaluation mode, and its input."""
        with torch.device(device):
            return self.make().eval(), self.inputs()


def images(batch: int, channels: int, *size: int) -> Callable[[], tuple[torch.Tensor]]:
    """Return a function that makes images; ``size`` is one side or two."""
    height, width = size if len(size) == 2 else size * 2
    return lambda: (torch.ones(batch, channels, height, width),)


def tokens(batch: int, length: int) -> Callable[[], tuple[torch.Tensor]]:
    """Return a function that makes token ids, all 1."""
    return lambda: (torch.ones(batch, length, dtype=torch.long),)
