"""Parameters, buffers and gradients of modules whose storages change in the run."""

from __future__ import annotations

import torch
from torch import nn

from dispatch_flops import FlopCounterMode

F32 = 4


def test_lazy_parameters_count_from_the_first_call_on() -> None:
    model, x = nn.Sequential(nn.LazyLinear(5), nn.ReLU()), torch.ones(3, 7)
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model(x)
    root = counter.profile.root
    assert root.memory is not None and root.memory.total.parameters == (7 * 5 + 5) * F32
