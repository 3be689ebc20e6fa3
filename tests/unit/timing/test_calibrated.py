"""Passes without a dispatch mode."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.timing import calibrated
from dispatch_flops.timing.calibrated import ModulePass
from dispatch_flops.timing.devices import Devices, Now
from dispatch_flops.timing.module_timer import HookOverhead
from tests.helpers.accelerator import FIRST, KERNEL, Gpu, Launcher, work


@pytest.mark.parametrize(("now", "is_calibrated"), [(None, True), (time.perf_counter, False)])
def test_module_pass_excludes_the_calibrated_overhead_of_its_hooks_on_its_own_clock(
    now: Now | None, is_calibrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated, "hook_overhead", lambda: HookOverhead(inside=1e9))
    model = nn.Identity()
    with ModulePass(ModuleNames([model]), now=now) as latency:
        model(torch.ones(1))
    assert (latency.seconds()[""] == 0.0) is is_calibrated


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
