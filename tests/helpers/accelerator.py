"""Imitation of an accelerator, whose kernels run while the host goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Seconds that kernels take on the device, and formulas on the host.
KERNEL, GRADIENT_KERNEL, UPDATE, PRICING = 2.0, 3.0, 5.0, 100.0
GAP = 1 / 64  # between the events around an operator
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Gpu:
    """Accelerator with one queue; an event completes after everything queued before it."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0
        self.waited = 0
        self.capturing = False

    def launch(self, seconds: float) -> None:
        self.busy_until = self.queue() + seconds

    def queue(self) -> float:
        return max(self.host, self.busy_until)

    def synchronize(self, device: torch.device) -> None:
        assert device.type == "cuda"
        assert not self.capturing  # torch would raise and end the capture
        self.waited += 1
        self.host = self.queue()


GPU = Gpu()


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None

    def record(self, stream: Any) -> None:
        assert stream == f"stream of {FIRST}"
        self.at = GPU.queue()

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None and end.at is not None and end.at <= GPU.host
        return (end.at - self.at) * 1e3


@torch.library.custom_op("dispatch_flops_devices::work", mutates_args=())
def work(x: torch.Tensor) -> torch.Tensor:
    GPU.launch(KERNEL)
    return x.clone()


@torch.library.custom_op("dispatch_flops_devices::work_backward", mutates_args=())
def work_backward(x: torch.Tensor) -> torch.Tensor:
    GPU.launch(GRADIENT_KERNEL)
    return x.clone()


@torch.library.custom_op("dispatch_flops_devices::update", mutates_args=("x",))
def update(x: torch.Tensor) -> None:
    GPU.launch(UPDATE)


work.register_autograd(lambda ctx, grad: work_backward(grad))


class Launcher(nn.Module):
    """Module that launches one kernel, and then calls the modules below it."""

    def __init__(self, *below: nn.Module) -> None:
        super().__init__()
        self.below = nn.ModuleList(below)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = work(x)
        for module in self.below:
            x = module(x)
        return x
