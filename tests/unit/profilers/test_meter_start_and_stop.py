"""Where a meter starts and stops counting, and where steps begin and end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopMeter, _torch

B, IN, OUT = 2, 3, 5
UPDATE = 2 * IN * OUT  # p += -lr * grad


class Net(nn.Module):
    """One layer without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def forward(rows: int) -> int:
    return 2 * rows * IN * OUT


def batch(rows: int) -> int:
    """Return the FLOPs of forward, a sum, and the gradient of the weight."""
    return forward(rows) + (rows * OUT - 1) + 2 * rows * IN * OUT


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def optimizer(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not _torch.modes_in_force()
    assert not _torch.are_modes_seen()
    assert not torch.nn.modules.module._global_forward_hooks
    assert not _torch.all_step_pre_hooks


def train(model: nn.Module, optimizer: Any, rows: int = B) -> None:
    model(torch.ones(rows, IN)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- inference mode ---------------------------------------------------------------------------


def test_evaluation_in_inference_mode_within_a_step_is_counted(model: Net, optimizer: Any) -> None:
    """Counting that began before the evaluation, for a new shape, does not stop inside it."""
    meter, exact = FlopMeter(model, verify_every=0), 0
    for rows, evaluations in (4, 1), (4, 0), (4, 0), (7, 0), (7, 1), (7, 1), (9, 1), (4, 1):
        with meter.step():
            train(model, optimizer, rows)
            for _ in range(evaluations):
                with torch.inference_mode():
                    model(torch.ones(B, IN))
        torch.ones(2)  # raises if the dispatch keys are not those before the step
        exact += batch(rows) + UPDATE + evaluations * forward(B)
    assert meter.total_flops == exact
    assert not meter.is_estimate


@pytest.mark.parametrize("lengths", ["1 2 1 3 2 3", "4 4 4 1 2 3 4 3 2 1"])
def test_calls_in_inference_mode_before_training_are_counted(
    lengths: str, model: Net, optimizer: Any
) -> None:
    """A call that is new there is counted to the end, in a step that is counted as a whole."""
    meter, exact = FlopMeter(model, verify_every=0), 0
    for length in map(int, lengths.split()):
        with meter.step():
            with torch.inference_mode():
                for _ in range(length):
                    model(torch.ones(B, IN))
            train(model, optimizer, length)
        exact += length * forward(B) + batch(length) + UPDATE
    assert meter.total_flops == exact
    assert not meter.is_estimate
    assert meter.run.timed_steps > 0


def test_call_in_inference_mode_that_comes_once_makes_an_estimate(
    model: Net, optimizer: Any
) -> None:
    meter = FlopMeter(model, verify_every=0)
    for rows in (B, B, 11, B, B):
        with meter.step():
            with torch.inference_mode():
                model(torch.ones(rows, IN))
            train(model, optimizer)
    assert meter.is_estimate
    assert meter.last_step.total_flops == forward(B) + batch(B) + UPDATE


def test_step_inside_inference_mode_is_counted_at_once(model: Net) -> None:
    meter, shapes = FlopMeter(model, verify_every=0), (2, 7, 11, 7, 2, 13)
    with torch.inference_mode():
        for rows in shapes:
            with meter.step():
                model(torch.ones(rows, IN))
                model(torch.ones(rows, IN))
        assert not _torch.are_modes_seen()
    assert meter.total_flops == 2 * forward(sum(shapes))
    assert not meter.is_estimate
    assert meter.run.timed_steps == 2  # of the shapes that came before


def test_inference_mode_within_another_is_counted(model: Net) -> None:
    """No flag tells one mode from the other; what counts from the inner one on ends with it."""

    @torch.inference_mode()
    def evaluate(rows: int) -> None:
        model(torch.ones(rows, IN))

    meter, shapes = FlopMeter(model, verify_every=0), (2, 7, 7, 2, 11, 11)
    with torch.inference_mode():
        for rows in shapes:
            with meter.step():
                evaluate(rows)
                torch.ones(B, IN) @ torch.ones(IN, OUT)
            torch.ones(2)
    assert meter.total_flops == sum(forward(rows) + forward(B) for rows in shapes)
    assert not meter.is_estimate


# -- optimizers that step in the backward pass ------------------------------------------------


def test_optimizer_that_steps_in_the_backward_pass_is_counted() -> None:
    """Autograd restores the dispatch modes after each node: no counting starts or stops there."""
    model = nn.Sequential(*(nn.Linear(IN, IN, bias=False) for _ in range(3)))
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)

        def step(_: torch.Tensor, own: Any = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    meter, shapes = FlopMeter(model, verify_every=0), (2, 2, 7, 2, 7, 11, 11, 2)
    for rows in shapes:
        with meter.step():
            model(torch.ones(rows, IN)).sum().backward()
        assert not _torch.modes_in_force()
    # Three products in forward, three gradients of weights, and two between the layers.
    products = 3 + 3 + 2
    assert meter.total_flops == sum(
        products * 2 * rows * IN * IN + (rows * IN - 1) + 3 * 2 * IN * IN for rows in shapes
    )
    assert not meter.is_estimate
    assert meter.run.timed_steps > 0
