"""Peaks of training steps against the events of torch's CPU allocator."""

from __future__ import annotations

import pytest
import torch

from dispatch_flops import FlopCounterMode
from dispatch_flops.profile import MemoryProfile
from tests.helpers.allocator import peak_bytes
from tests.helpers.training_steps import ON_CPU, MakeOptimizer, Workload, step_of

pytestmark = pytest.mark.slow

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), foreach=False),
    "AdamW, foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False),
    "SGD, foreach": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, foreach=True),
}


def truth_and_ours(workload: Workload, make_optimizer: MakeOptimizer) -> tuple[int, MemoryProfile]:
    """Return the allocator's peak of a steady training step, and the memory of the next one."""
    model, x, loss = workload()
    step, before = step_of(model, x, loss, make_optimizer)
    truth = peak_bytes(step, before)
    with FlopCounterMode(model, display=False, memory=True) as counter:
        step()
    memory = counter.profile.memory
    assert memory is not None
    return truth, memory


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("workload", ON_CPU)
def test_peak_equals_the_allocators_within_a_thousandth(workload: str, optimizer: str) -> None:
    truth, memory = truth_and_ours(ON_CPU[workload], OPTIMIZERS[optimizer])
    assert abs(memory.peak_bytes - truth) <= truth / 1000
    assert not memory.is_lower_bound
    assert sum(use.bytes for use in memory.at_peak) == memory.peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("queries", [100, 250, 800])
def test_flash_workspaces_are_those_of_the_allocator(dtype: torch.dtype, queries: int) -> None:
    q, k = (torch.randn(2, 3, length, 40, dtype=dtype) for length in (queries, 600))
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, lse = forward(q, k, k)
    for run in (
        lambda: forward(q, k, k),
        lambda: backward(out, q, k, k, out, lse, 0.0, False),
        lambda: backward(q, q, k, k, out, lse, 0.0, False),
    ):
        truth = peak_bytes(run, [q, k, out, lse])
        with FlopCounterMode(display=False, memory=True) as counter:
            for tensor in (q, k, out, lse):
                tensor.detach()  # is met, and counts as there before
            run()
        assert counter.profile.memory is not None
        assert counter.profile.memory.peak_bytes == truth
        assert counter.profile.memory.by_role()["workspace"] > 0


MASKS = {
    "gaps": torch.ones(5, 14)[:, ::2],
    "transposed": torch.ones(7, 5).T,
    "a copy of the heads": torch.ones(2, 1, 5, 14)[..., ::2].expand(2, 3, 5, 7),
    "rows": torch.ones(10, 7)[::2],
    "one row": torch.ones(7).expand(5, 7),
    "one column": torch.ones(5, 1),
    "one number": torch.ones(1, 2)[:, ::2],
}


@pytest.mark.parametrize("runs_backward", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_flash_copies_a_mask_that_has_gaps(mask: torch.Tensor, runs_backward: bool) -> None:
    q, k = (torch.randn(2, 3, length, 11, requires_grad=True) for length in (5, 7))
    attention = torch.nn.functional.scaled_dot_product_attention

    def run() -> None:
        out = attention(q, k, k, attn_mask=mask)
        if runs_backward:
            out.backward(torch.ones(2, 3, 5, 11))
            q.grad = k.grad = None

    truth = peak_bytes(run, [q, k, mask])
    with FlopCounterMode(display=False, memory=True) as counter:
        for tensor in (q, k, mask):
            tensor.detach()  # is met, and counts as there before
        run()
    memory = counter.profile.memory
    assert memory is not None
    assert not memory.is_lower_bound
    assert memory.peak_bytes == truth
