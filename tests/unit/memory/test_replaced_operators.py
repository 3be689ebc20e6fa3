"""Backward passes that run other operators without a dispatch mode: their peaks are marked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dispatch_flops import FlopCounterMode
from dispatch_flops.profile import MemoryProfile
from tests.helpers.allocator import peak_bytes

ROWS, COLUMNS = 67, 31
MASK = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) % 3 > 0
VALUE = torch.ones((), requires_grad=True)
FACTORS = torch.full((COLUMNS,), 0.5, requires_grad=True)
LOWER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fill with a value that has a gradient": lambda x: x.masked_fill(MASK, VALUE),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
    "householder_product": lambda x: torch.linalg.householder_product(x, FACTORS),
    "ormqr": lambda x: torch.ormqr(x, FACTORS, x),
}
EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fill with a constant": lambda x: x.masked_fill(MASK, VALUE.detach()),
    "amax": lambda x: x.amax(),
    "choice": lambda x: torch.where(MASK, x, VALUE),
    "difference": lambda x: (x - 2) * 3,
}


def truth_and_ours(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[int, MemoryProfile]:
    x = torch.randn(ROWS, COLUMNS, requires_grad=True)

    def run() -> None:
        function(x).sum().backward()
        x.grad = VALUE.grad = FACTORS.grad = None

    held = (x, MASK, VALUE, FACTORS)
    run()
    truth = peak_bytes(run, held)
    with FlopCounterMode(display=False, memory=True) as counter:
        for tensor in held:
            tensor.detach()  # is met, and counts as there before
        run()
    memory = counter.profile.memory
    assert memory is not None
    return truth, memory


@pytest.mark.parametrize("name", LOWER)
def test_peak_without_the_replaced_operator_is_a_lower_bound(name: str) -> None:
    truth, memory = truth_and_ours(LOWER[name])
    assert memory.peak_bytes < truth
    assert [node for node in memory.unseen if "Backward" in node]
    assert memory.is_lower_bound


@pytest.mark.parametrize("name", EXACT)
def test_other_nodes_with_such_operators_have_exact_peaks(name: str) -> None:
    truth, memory = truth_and_ours(EXACT[name])
    assert abs(memory.peak_bytes - truth) <= 16  # bytes of numbers
    assert not memory.is_lower_bound
