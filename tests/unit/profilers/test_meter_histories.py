"""The meter where the cost of what follows a call depends on earlier calls of the step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dispatch_flops import FlopMeter
from dispatch_flops.profilers.step_costs import _ALIKE

IN, OUT, ROWS = 3, 7, 4
OTHERS = (2, 11, 13, 5)  # rows of the other call of a step


def forward(rows: int) -> int:
    return 2 * rows * IN * OUT


def retrieval(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> int:
    """Scores of ``ROWS`` documents for each query."""
    with torch.no_grad():
        model(torch.ones(rows, IN)) @ model(torch.ones(ROWS, IN)).T
    return forward(rows) + forward(ROWS) + 2 * rows * OUT * ROWS


def frozen_target(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> int:
    """The loss compares with a target of more rows, which was computed without gradients."""
    with torch.no_grad():
        target = model(torch.ones(rows, IN))
    (model(torch.ones(ROWS, IN)) @ target.T).sum().backward()
    loss = 2 * ROWS * OUT * rows  # and its gradient
    return forward(rows) + 2 * forward(ROWS) + 2 * loss + ROWS * rows - 1


def metrics(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> int:
    """Work on the outputs of all micro-batches after the optimizer's step."""
    outs = []
    for count in (rows, ROWS):
        outs.append(model(torch.ones(count, IN)))
        outs[-1].sum().backward()
    optimizer.step()
    torch.cat(outs).detach().exp()
    batches = 2 * forward(rows + ROWS) + (rows + ROWS) * OUT - 2
    return batches + IN * OUT + 2 * IN * OUT + (rows + ROWS) * OUT


def earlier_output(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> int:
    """The loss of the second micro-batch is on the output of the first, which has no graph."""
    first = model(torch.ones(rows, IN))
    first.sum().backward()
    (model(torch.ones(ROWS, IN)) @ first.detach().T).sum().backward()
    product = 2 * ROWS * OUT * rows
    sums = rows * OUT - 1 + ROWS * rows - 1
    return 2 * forward(rows) + 2 * forward(ROWS) + 2 * product + sums + IN * OUT


@pytest.mark.parametrize("step", [retrieval, frozen_target, metrics, earlier_output])
@pytest.mark.parametrize("steps", [9, 99])
def test_what_follows_a_call_may_depend_on_earlier_calls(
    step: Callable[[nn.Module, torch.optim.Optimizer, int], int], steps: int
) -> None:
    model, expected = nn.Linear(IN, OUT, bias=False), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = FlopMeter(model, verify_every=0)
    for index in range(steps):
        with meter.step():
            expected += step(model, optimizer, OTHERS[index % len(OTHERS)])
        model.zero_grad()
    assert meter.total_flops == expected
    assert not meter.is_estimate


def test_histories_that_do_not_matter_are_counted_a_few_times() -> None:
    """Of four micro-batches of four shapes there are 256 histories; ``_ALIKE`` for each call do."""
    model, rng, counted = nn.Linear(IN, OUT, bias=False), random.Random(0), []
    meter, expected = FlopMeter(model, verify_every=0), 0
    for _ in range(200):
        rows = [rng.choice(OTHERS) for _ in range(4)]
        with meter.step(), torch.no_grad():
            for count in rows:
                model(torch.ones(count, IN))
        expected += sum(map(forward, rows))
        counted.append(meter.last_step.timed_steps == 0)
    assert meter.total_flops == expected
    assert not meter.is_estimate
    assert sum(counted) <= 4 * len(OTHERS) * _ALIKE
    assert not any(counted[100:])
    parts = {(one.state, one.event) for one in meter._states.segments()}
    assert len(parts) == len(OTHERS) * (1 + 4)  # before and after calls


@pytest.mark.parametrize("first", [None, OTHERS[0]])
def test_data_of_each_micro_batch_may_be_prepared_in_the_block(first: int | None) -> None:
    """A frozen teacher is called before the model, on the same rows: all batches, or the first
    alone, come in several shapes."""
    model, teacher = nn.Linear(IN, OUT, bias=False), nn.Linear(IN, OUT, bias=False)
    meter, expected, rng = FlopMeter(model, verify_every=0), 0, random.Random(0)
    for _ in range(99):
        batches = [first or rng.choice(OTHERS), rng.choice(OTHERS), rng.choice(OTHERS)]
        with meter.step(), torch.no_grad():
            for rows in batches:
                teacher(torch.ones(rows, IN))
                model(torch.ones(rows, IN))
        expected += 2 * sum(map(forward, batches))
    assert meter.total_flops == expected
    assert not meter.is_estimate


def test_equal_work_before_all_calls_is_no_preparation_of_data() -> None:
    """Until a second shape comes first, it may be one; what ran until then is known later, too."""
    model, rng = nn.Linear(IN, OUT, bias=False), random.Random(0)
    meter, expected = FlopMeter(model, verify_every=0), 0
    for index in range(99):
        batches = [OTHERS[0] if index < 3 else rng.choice(OTHERS), rng.choice(OTHERS)]
        with meter.step(), torch.no_grad():
            torch.ones(IN).exp()
            for rows in batches:
                model(torch.ones(rows, IN))
        expected += IN + sum(map(forward, batches))
    assert meter.total_flops == expected
    assert not meter.is_estimate


def test_option_of_the_optimizer_that_changes_after_some_histories_changes_the_cost() -> None:
    """Those have told the cost of the optimizer's step, as long as its options are the same."""
    model = nn.Linear(IN, OUT, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter, exact = FlopMeter(model, verify_every=0), 0
    decayed = 2 * IN * OUT  # added to the gradient
    for rows, decay in ((2, 0), (3, 0), (7, 0), (11, 0), (2, 0), (2, 0.5), (3, 0.5), (2, 0.5)):
        optimizer.param_groups[0]["weight_decay"] = decay
        with meter.step():
            model(torch.ones(rows, IN)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        exact += 2 * forward(rows) + rows * OUT - 1 + 2 * IN * OUT + decayed * bool(decay)
    assert meter.total_flops == exact
    assert not meter.is_estimate


def test_work_after_the_optimizer_has_its_phase_also_where_counting_starts_there() -> None:
    """An evaluation in the third step makes its end unknown; the ends of later ones are counted."""
    model = nn.Linear(IN, OUT, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter, average = FlopMeter(model, verify_every=0), torch.zeros(OUT, IN)
    for index in range(9):
        with meter.step():
            model(torch.ones(ROWS, IN)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                average.mul_(0.5).add_(model.weight)
                if index in (3, 5):
                    model(torch.ones(ROWS, IN))
    assert meter.run.costs["optimizer"].flops == 9 * (2 + 2) * IN * OUT
    assert meter.model_flops == 9 * (2 * forward(ROWS) + ROWS * OUT - 1) + 2 * forward(ROWS)


def test_work_on_gradients_after_the_optimizer_is_forward_also_where_counting_starts_there() -> (
    None
):
    """With gradients enabled, only the step tells it from a norm of gradients before the step."""
    model = nn.Linear(IN, OUT, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = FlopMeter(model, verify_every=0)
    for index in range(9):
        with meter.step():
            model(torch.ones(ROWS, IN)).sum().backward()
            optimizer.step()
            model.weight.grad * 3  # type: ignore[operator]
            if index in (3, 5):
                with torch.no_grad():
                    model(torch.ones(ROWS, IN))
            optimizer.zero_grad()
    assert meter.run.costs["optimizer"].flops == 9 * 2 * IN * OUT
    each = forward(ROWS) + ROWS * OUT - 1 + IN * OUT
    assert meter.run.costs["forward"].flops == 9 * each + 2 * forward(ROWS)


def test_work_after_an_optimizer_that_steps_before_any_call_is_forward() -> None:
    """No backward pass of the step comes first, whether it is counted from there or as a whole.

    The optimizer's step costs something from the second step on; step 12 is verified.
    """
    model = nn.Linear(IN, OUT, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter, average = FlopMeter(model), torch.zeros(OUT, IN)
    for _ in range(20):
        with meter.step():
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                average.mul_(0.5).add_(model.weight)
            model(torch.ones(ROWS, IN)).sum().backward()
    assert meter.run.costs["optimizer"].flops == 19 * 2 * IN * OUT
    own = 2 * IN * OUT + ROWS * OUT - 1
    assert meter.run.costs["forward"].flops == 20 * (own + forward(ROWS))
    assert not meter.is_estimate
    assert meter.run.timed_steps >= 15


def test_work_on_a_stated_batch_has_its_phase_also_where_counting_starts_there() -> None:
    """It follows the backward pass of the batch before, up to the first call of a module."""
    model = nn.Sequential(nn.Linear(IN, OUT, bias=False))
    meter = FlopMeter(model, verify_every=0)
    for index in range(9):
        with meter.step():
            for rows in (ROWS, OTHERS[index % len(OTHERS)]):
                x = torch.ones(rows, IN)
                meter.note_batch(x)
                with torch.no_grad():
                    x = x.exp()
                model[0](x).sum().backward()
                model.zero_grad()
    second = [OTHERS[index % len(OTHERS)] for index in range(9)]
    assert meter.run.costs["optimizer"].flops == sum(rows * IN for rows in second)
    assert not meter.is_estimate
