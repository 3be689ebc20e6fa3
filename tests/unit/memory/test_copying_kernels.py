"""Kernels that copy arguments with gaps, against the events of torch's allocator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from dispatch_flops import FlopCounterMode
from tests.helpers.allocator import peak_bytes

SHAPE = (5, 6, 14, 16)
Function = Callable[[torch.Tensor], torch.Tensor]
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(SHAPE),
    "transposed": lambda: torch.randn(SHAPE[::-1]).permute(3, 2, 1, 0),
    "channels last": lambda: torch.randn(SHAPE).to(memory_format=torch.channels_last),
}
NORM, BATCH_NORM, GROUP_NORM = nn.LayerNorm(16), nn.BatchNorm2d(6), nn.GroupNorm(3, 6)
WIDE = nn.BatchNorm1d(14 * 16 * 6)
FUNCTIONS: dict[str, tuple[Function, nn.Module | None]] = {
    "layer_norm": (NORM, NORM),
    "layer_norm without parameters": (lambda x: functional.layer_norm(x, (16,)), None),
    "layer_norm, bfloat16": (lambda x: functional.layer_norm(x.bfloat16(), (16,)).float(), None),
    "batch_norm": (BATCH_NORM, BATCH_NORM),
    "batch_norm of rows": (lambda x: WIDE(x.flatten(1)), WIDE),
    "group_norm": (GROUP_NORM, GROUP_NORM),
    "softmax": (lambda x: x.softmax(-1), None),
    "log_softmax": (lambda x: x.log_softmax(1), None),
    "gelu": (functional.gelu, None),
    "max_pool": (lambda x: functional.max_pool2d(x, 2), None),
    "avg_pool": (lambda x: functional.avg_pool2d(x, 2), None),
    "adaptive_avg_pool": (lambda x: functional.adaptive_avg_pool2d(x, 2), None),
    "nearest": (lambda x: functional.interpolate(x, scale_factor=2), None),
    "bilinear": (lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), None),
    "unfold": (lambda x: functional.unfold(x, 3), None),
    "mask": (lambda x: x[x > 0], None),
    "tril": (torch.tril, None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("is_expanded", [False, True], ids=["square", "sum"])
def test_peak_equals_the_allocators(name: str, layout: str, is_expanded: bool) -> None:
    function, module = FUNCTIONS[name]

    def step() -> None:
        x.grad = None
        if module is not None:
            module.zero_grad()
        y = function(x)
        (y if is_expanded else y.square()).sum().backward()
        x.grad = None

    x = LAYOUTS[layout]().requires_grad_()
    held = [x, *(() if module is None else (*module.parameters(), *module.buffers()))]
    step()
    if module is not None:
        module.zero_grad()
    truth = peak_bytes(step, held)
    if module is not None:
        module.zero_grad()
    with FlopCounterMode(module, display=False, memory=True) as counter:
        step()
    memory = counter.profile.memory
    assert memory is not None and not memory.is_lower_bound
    assert abs(memory.peak_bytes - truth) <= 16  # scalars of the profiler's own run
