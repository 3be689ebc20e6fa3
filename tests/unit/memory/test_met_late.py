"""Memory that no operator of the run returned, and that is met after the start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode
from dispatch_flops.profile import MemoryProfile
from tests.helpers.allocator import peak_bytes

BF16, F32 = 2, 4
T = TypeVar("T")


def memory_of(run: Callable[[], object], *models: nn.Module) -> MemoryProfile:
    with FlopCounterMode([*models] or None, display=False, memory=True) as counter:
        run()
    memory = counter.profile.memory
    assert memory is not None
    for device in memory.devices:
        for peak in device.peaks:
            assert sum(use.bytes for use in peak.uses) == peak.peak_bytes
    return memory


def in_another_thread(make: Callable[[], T]) -> T:
    """Return what ``make`` returns where no counter sees it, as a loader of data does."""
    made: list[T] = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    return made[0]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_gradients_of_each_step_that_another_thread_makes_count_once(steps: int) -> None:
    model, x = nn.Linear(100, 100, bias=False), torch.ones(2, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for _ in range(steps):
            with torch.no_grad():
                model(x)
            model.weight.grad = in_another_thread(lambda: torch.ones(100, 100))
            optimizer.step()
            optimizer.zero_grad()

    weight = 100 * 100 * F32
    assert memory_of(run, model).by_role() == {
        "parameters": weight, "gradients": weight, "inputs": 2 * 100 * F32,
    }  # fmt: skip


@pytest.mark.parametrize("is_given", [True, False])
def test_gradients_of_an_earlier_step_were_there_before(is_given: bool) -> None:
    model, x = nn.Linear(100, 50, bias=False), torch.ones(2, 100)

    def run() -> None:
        model(x).sum().backward()

    run()
    weight = 50 * 100 * F32
    assert memory_of(run, *[model] * is_given).by_role("forward") == {
        "parameters": weight, "gradients": weight, "inputs": 2 * 100 * F32,
        "activations": (2 * 50 + 1) * F32,
    }  # fmt: skip


@pytest.mark.parametrize("cls", [torch.Tensor, nn.Parameter])
def test_gradient_of_a_leaf_that_no_module_holds_was_there_before(cls: type[torch.Tensor]) -> None:
    x = cls(torch.ones(100, 50)).requires_grad_()

    def run() -> None:
        x.exp().sum().backward()

    run()
    assert x.grad is not None
    truth, size = peak_bytes(run, [x, x.grad]), 100 * 50 * F32
    memory = memory_of(run)
    assert memory.peak_bytes == truth
    role = "parameters" if cls is nn.Parameter else "inputs"
    assert memory.by_role("forward") == {
        role: size, "gradients": size, "activations": size + 2 * F32,  # the sum, its gradient
    }  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_without_modules_batches_count_from_then_on_after_the_first_backward(steps: int) -> None:
    weight = torch.ones(250, 3, requires_grad=True)

    def run() -> None:
        for _ in range(steps):
            x = in_another_thread(lambda: torch.ones(50, 250))
            (x * weight[:, 0]).sum().backward()
            weight.grad = None
            del x

    assert memory_of(run).by_role()["inputs"] == (50 * 250 + 250 * 3) * F32


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_sparse_gradients_are_added_in_new_values(steps: int) -> None:
    def make() -> tuple[nn.Module, torch.Tensor, Callable[[], None]]:
        model, rows = nn.Embedding(500, 4, sparse=True), torch.arange(4000) % 500
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def run() -> None:
            for _ in range(steps):
                for _ in range(3):
                    model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        return model, rows, run

    model, rows, run = make()
    truth = peak_bytes(run, [*model.parameters(), rows])
    model, rows, run = make()
    assert memory_of(run, model).peak_bytes == truth


def test_batch_that_the_first_operator_after_a_step_reads_is_met() -> None:
    batch = 2 * 3 * 7 * F32
    batches = [torch.ones(2, 3, 7) for _ in range(4)]
    model = nn.Conv1d(3, 5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for x in batches:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert memory_of(run, model).by_role("optimizer")["inputs"] == 4 * batch


def test_argument_of_the_first_operator_after_backward_is_part_of_its_memory() -> None:
    big, weight = torch.ones(10_007), torch.ones(3, requires_grad=True)

    def run() -> None:
        weight.sum().backward()
        big + 1

    held = 2 * 3 * F32  # the weight and its gradient
    assert memory_of(run).peak_bytes == held + 2 * 10_007 * F32


def test_optimizer_state_that_is_met_in_the_first_step_was_there_before() -> None:
    model = nn.Linear(3, 5, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert memory_of(step, model).by_role("forward")["optimizer state"] == 3 * 5 * F32


def test_parameters_that_no_module_holds_are_those_of_their_optimizer() -> None:
    model, x = nn.Linear(5, 7, bias=False).bfloat16(), torch.ones(3, 5, dtype=torch.bfloat16)
    master = model.weight.detach().float().requires_grad_()
    optimizer = torch.optim.SGD([master], lr=0.1)

    def run() -> None:
        model(x).sum().backward()
        assert model.weight.grad is not None
        master.grad = model.weight.grad.float()
        optimizer.step()

    memory = memory_of(run, model)
    assert memory.by_role("optimizer") == {
        "parameters": 5 * 7 * (BF16 + F32),
        "gradients": 5 * 7 * (BF16 + F32),
        "inputs": 3 * 5 * BF16,
    }
    assert memory.by_role("forward")["parameters"] == 5 * 7 * (BF16 + F32)


@pytest.mark.parametrize("has_operator", [False, True])
def test_batch_that_is_copied_to_another_device_alone_is_in_the_peak_of_its_own(
    has_operator: bool,
) -> None:
    model = nn.Linear(100, 10, bias=False, device="meta")

    def run() -> None:
        if has_operator:
            torch.ones(2) + 1
        with torch.no_grad():
            model(torch.ones(1, 100, device="meta"))
            for rows in (3, 7, 5):
                x = in_another_thread(lambda rows=rows: torch.ones(rows, 100))  # type: ignore[misc]
                model(x.to("meta"))
                del x

    peaks = {device.device: device.peak_bytes for device in memory_of(run, model).devices}
    assert peaks["cpu"] == 7 * 100 * F32
    assert peaks["meta"] == (10 * 100 + 7 * 100 + 7 * 10) * F32


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Tanh(), nn.Sigmoid()

    def forward(self, x: torch.Tensor, load: Callable[[], torch.Tensor]) -> None:
        y = self.first(x)
        self.second(load())
        del y


def test_batch_that_a_module_reads_is_not_in_the_peak_of_the_one_before() -> None:
    model, x, late = Two(), torch.ones(3), 10_007
    with FlopCounterMode(model, display=False, memory=True) as counter, torch.no_grad():
        model(x, lambda: x)
        model(x, lambda: in_another_thread(lambda: torch.ones(late)))
    first, second = (child.memory for child in counter.profile.root.children)
    assert first is not None and second is not None
    assert first.peak_bytes["forward"] == 2 * 3 * F32  # the input and the result
    assert second.peak_bytes["forward"] == (2 * 3 + 2 * late) * F32
