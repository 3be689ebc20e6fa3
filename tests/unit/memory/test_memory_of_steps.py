"""Memory of optimizers' steps that are not dispatched again: as if they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dispatch_flops import FlopCounterMode, Profile, register_workspace
from dispatch_flops.counting.known_steps import KINDS
from dispatch_flops.operators import workspaces
from tests.helpers.undispatched import note_steps, operators_and_memory

F32 = 4
Make = Callable[..., Optimizer]
Program = Callable[[nn.Module, Optimizer], Any]


pytestmark = pytest.mark.usefixtures("collected_before")


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the classes of the optimizers whose steps are not dispatched, one for each step."""
    return note_steps(monkeypatch)


class Net(nn.Module):
    """A layer, a parameter that is frozen at times, and one that no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.ones(7))
        self.shift = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.shift


def followed(make: Make, program: Program, steps: int, **options: Any) -> Profile:
    model = Net()
    optimizer = make([*model.layer.parameters(), model.scale])
    with FlopCounterMode(model, display=False, **{"memory": True, **options}) as counter:
        for _ in range(steps):
            program(model, optimizer)
    return counter.profile


def backward(model: nn.Module) -> None:
    model(torch.ones(3, 5)).sum().backward()


def train(model: nn.Module, optimizer: Optimizer) -> None:
    backward(model)
    optimizer.step()
    model.zero_grad()


def keep_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    backward(model)
    optimizer.step()
    model.zero_grad(set_to_none=False)


def step_twice(model: nn.Module, optimizer: Optimizer) -> None:
    backward(model)
    optimizer.step()
    optimizer.step()


def step_after_forward(model: Any, optimizer: Optimizer) -> None:
    """Release what a forward made after a step; each forward has a higher peak."""
    if next(model.parameters()).grad is None:
        backward(model)
        model.steps = 0
    model.steps += 1
    x = torch.ones(100) + 1
    torch.ones(1000 * model.steps) + 1
    optimizer.step()
    del x


def keep_a_tensor(model: Any, optimizer: Optimizer) -> None:
    """Begin each step with more memory than the one before it."""
    model.kept = [*getattr(model, "kept", ()), torch.ones(1000) + 1]
    train(model, optimizer)


def release_a_tensor(model: Any, optimizer: Optimizer) -> None:
    """Begin each step with less memory than the one before it."""
    if not hasattr(model, "kept"):
        model.kept = [torch.ones(1000) + 1 for _ in range(5)]
    model.kept.pop()
    train(model, optimizer)


def freeze(model: Any, optimizer: Optimizer) -> None:
    model.scale.requires_grad_(not model.scale.requires_grad)
    train(model, optimizer)


def unfreeze(model: Any, optimizer: Optimizer) -> None:
    """Give a parameter that no optimizer has a gradient in later steps, which begin with less."""
    model.steps = getattr(model, "steps", 0) + 1
    model.shift.requires_grad_(model.steps > 3)
    model.kept = torch.ones(1000 if model.steps < 4 else 1) + 1
    train(model, optimizer)


def evaluate(model: nn.Module, optimizer: Optimizer) -> None:
    train(model, optimizer)
    with torch.no_grad():
        model(torch.ones(13, 5))


def recompute(model: nn.Module, optimizer: Optimizer) -> None:
    y = torch.utils.checkpoint.checkpoint(model, torch.ones(3, 5), use_reentrant=False)
    y.sum().backward()
    optimizer.step()
    model.zero_grad()


def load_a_state(model: nn.Module, optimizer: Optimizer) -> None:
    train(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())


PROGRAMS = {
    program.__name__: program
    for program in (
        train, keep_gradients, step_twice, step_after_forward, keep_a_tensor, release_a_tensor,
        freeze, unfreeze, evaluate, recompute, load_a_state,
    )
}  # fmt: skip

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD with momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: Adam(p, amsgrad=True),
    "AdamW": lambda p: AdamW(p),
    "AdamW, foreach": lambda p: AdamW(p, foreach=True),
    "AdamW, fused": lambda p: AdamW(p, fused=True),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_memory_of_steps_that_are_alike_is_that_of_dispatched_ones(
    optimizer: str, name: str, passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Any:
        return operators_and_memory(followed(OPTIMIZERS[optimizer], PROGRAMS[name], 5))

    found = run()
    assert bool(passed) == (name != "keep_a_tensor")
    passed.clear()
    for cls in list(KINDS):
        monkeypatch.delitem(KINDS, cls)
    assert found == run()
    assert not passed


def test_step_that_begins_with_more_memory_reaches_a_peak_of_its_own(passed: list[str]) -> None:
    """A step of Adam holds each parameter four times, and what else there is: temporaries, too."""
    layer = nn.Linear(5, 7, bias=False)
    layer.weight.grad = torch.ones(7, 5)
    optimizer = AdamW(layer.parameters(), foreach=False)
    kept = []
    peaks = []
    with FlopCounterMode(layer, display=False, memory=True, optimizers=[optimizer]) as counter:
        for extra in (0, 0, 0, 1000, 1000, 500):
            kept = [torch.ones(extra) + 1]
            optimizer.step()
            assert counter.profile.memory is not None
            peaks.append(counter.profile.memory.by_role("optimizer"))
    del kept
    totals = [sum(roles.values()) for roles in peaks]
    assert passed == ["AdamW"] * 3
    assert totals[2] == totals[1]
    assert totals[3] == totals[2] + 1000 * F32
    assert totals[5] == totals[3]


def momentum(p: Any) -> Optimizer:
    return SGD(p, lr=0.1, momentum=0.9)


def test_step_that_leaves_a_tensor_is_dispatched_each_time(passed: list[str]) -> None:
    """A state that is new at each step is allocated at each."""

    def program(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.state.clear()
        train(model, optimizer)

    profile = followed(momentum, program, 5)
    assert passed == []
    assert profile.memory is not None
    assert profile.memory.by_role("optimizer")["optimizer state"] == (5 * 7 + 7 + 7) * F32


def test_workspace_of_the_users_own_is_asked_at_each_step(
    passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "_WORKSPACES", {})
    sizes: list[int] = []
    register_workspace(torch.ops.aten.add_)(lambda *_, **__: sizes.append(0) or 0)
    followed(momentum, train, 5)
    assert passed == []
    assert len(sizes) >= 5 * 3


def test_timeline_has_every_step(passed: list[str]) -> None:
    followed(momentum, train, 5, memory="timeline")
    assert passed == []
