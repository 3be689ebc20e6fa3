"""The backward pass of mish, which torch runs by several operators on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dispatch_flops import FlopCounterMode
from dispatch_flops.profile import MemoryProfile

MISH: dict[str, Callable[[Tensor], Tensor]] = {
    "new": functional.mish,
    "in place": lambda x: functional.mish(x * 1, inplace=True),
}


def memory_of(mish: Callable[[Tensor], Tensor], *, device: str, backward: bool) -> MemoryProfile:
    x = torch.zeros(5, 7, device=device, requires_grad=backward)
    with FlopCounterMode(display=False, memory=True) as counter:
        y = mish(x)
        if backward:
            y.sum().backward()
    assert counter.profile.memory is not None
    return counter.profile.memory


@pytest.mark.parametrize("mish", MISH.values(), ids=MISH)
def test_backward_of_mish_on_meta_has_an_approximate_peak(mish: Callable[[Tensor], Tensor]) -> None:
    memory = memory_of(mish, device="meta", backward=True)
    assert memory.decomposed == ("aten.mish_backward.default",)


@pytest.mark.parametrize(("device", "backward"), [("cpu", True), ("meta", False)])
def test_other_runs_of_mish_have_exact_peaks(device: str, backward: bool) -> None:
    memory = memory_of(functional.mish, device=device, backward=backward)
    assert memory.decomposed == ()


def test_step_without_a_backward_pass_has_an_exact_peak() -> None:
    weight = nn.Parameter(torch.zeros(5, 7, device="meta"))
    weight.grad = torch.zeros(5, 7, device="meta")
    optimizer = torch.optim.SGD([weight])
    with FlopCounterMode(display=False, memory=True) as counter:
        functional.mish(weight.detach())
        optimizer.step()
    assert counter.profile.memory is not None
    assert counter.profile.memory.decomposed == ()
