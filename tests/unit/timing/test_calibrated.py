"""Passes without a dispatch mode on an accelerator."""

from __future__ import annotations

import torch
from torch import nn

from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.timing.calibrated import ModulePass
from dispatch_flops.timing.devices import Devices
from tests.helpers.accelerator import FIRST, KERNEL, Gpu, Launcher, work


def test_module_pass_on_an_accelerator_synchronizes_once(gpu: Gpu) -> None:
    model = Launcher(Launcher(), Launcher(Launcher()))
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


def test_module_pass_on_an_accelerator_counts_the_outermost_call_of_recursion(gpu: Gpu) -> None:
    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            x = work(x)
            return self(x, depth - 1) if depth else x

    model = Recursive()
    with ModulePass(ModuleNames([model]), devices=Devices("cuda", (FIRST,))) as latency:
        model(torch.ones(1), 3)
    assert latency.seconds() == {"": 4 * KERNEL}
