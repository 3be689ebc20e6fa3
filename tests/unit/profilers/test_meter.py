"""The meter's totals against products of sizes, and against the counter in every step."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops import (
    FlopCounterMode,
    FlopMeter,
    Machine,
    OpCost,
    overridden,
    register_flops,
    unregister_flops,
)
from dispatch_flops.compile.step import Step
from dispatch_flops.counting.meter_reading import MeterReading
from dispatch_flops.errors import AlreadyActiveError, ConfigError, TargetError, UncountedWarning
from dispatch_flops.profilers import step_positions
from tests.helpers.clocks import Ticks
from tests.helpers.interpreters import run_python

B, IN, HID, OUT = 2, 3, 5, 7
SHAPES = (2, 11, 13)
UPDATE = 2 * (IN * HID + HID * OUT)  # p += -lr * grad


class Net(nn.Module):
    """Two layers without biases and without anything between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(IN, HID, bias=False)
        self.b = nn.Linear(HID, OUT, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def forward(rows: int) -> int:
    return 2 * rows * (IN * HID + HID * OUT)


def backward(rows: int) -> int:
    """Return the FLOPs of both weights' gradients and of the gradient between the layers."""
    return 2 * rows * (IN * HID + 2 * HID * OUT)


def loss(rows: int) -> int:
    return rows * OUT - 1  # additions of a sum


def batch(rows: int) -> int:
    return forward(rows) + loss(rows) + backward(rows)


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def optimizer(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def meter(model: Net, optimizer: torch.optim.Optimizer) -> Iterator[FlopMeter]:
    yield FlopMeter(model, optimizer, TOY, verify_every=0)
    assert not _get_current_dispatch_mode_stack()
    assert not torch.nn.modules.module._global_forward_hooks
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


TOY = Machine(name="toy", flops_per_s={"float32": 1e9}, source="made up")
SHARES = "MFU <0.01%, HFU <0.01%"


def train(model: nn.Module, optimizer: Any, rows: int, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        model(torch.ones(rows, IN)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_meter_adds_what_three_shapes_cost(model: Net, optimizer: Any, meter: FlopMeter) -> None:
    rows = [random.Random(seed).choice(SHAPES) for seed in range(40)]
    for count in rows:
        with meter.step():
            train(model, optimizer, count)
    assert meter.total_flops == sum(batch(count) + UPDATE for count in rows)
    assert meter.model_flops == sum(batch(count) for count in rows)
    costs = meter.run.costs
    assert costs["forward"].flops == sum(forward(count) + loss(count) for count in rows)
    assert costs["backward"].flops == sum(backward(count) for count in rows)
    assert costs["optimizer"].flops == len(rows) * UPDATE
    assert meter.run.steps == len(rows)
    # A new shape is counted again when it returns, for what ran before its call.
    assert meter.run.timed_steps >= len(rows) - len(SHAPES) - 4
    assert not meter.is_estimate


@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_meter_equals_the_counter_of_every_step(name: str, *, set_to_none: bool) -> None:
    """The first steps make the optimizer's state, and gradients that later ones add to."""
    model = nn.Sequential(nn.Linear(IN, HID), nn.Dropout(), nn.Linear(HID, OUT))
    options = {"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.1}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
    meter, exact = FlopMeter(model, verify_every=7), 0
    average = model[0].weight.detach().clone()
    for index in range(30):
        x = torch.ones(SHAPES[index % 3], IN)
        with FlopCounterMode(display=False) as counter, meter.step():
            out = model(x)
            out.square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            with torch.no_grad():
                average.lerp_(model[0].weight, 0.1)
            (out.detach() * 2).mean()
        exact += counter.get_total_flops()
        assert meter.last_step.total_flops == counter.get_total_flops()
        assert {p: c.flops for p, c in meter.last_step.costs.items() if c.flops} == {
            p: counter.profile.total(p).flops for p in ("forward", "backward", "optimizer")
        }
    assert meter.total_flops == exact
    assert meter.run.timed_steps
    assert not meter.is_estimate


def test_micro_batches_of_any_number_and_shape_are_added(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    """Each shape at each position is counted after three histories, not after all."""
    rng = random.Random(0)
    expected = 0
    for _ in range(120):
        rows = [rng.choice(SHAPES) for _ in range(rng.choice((1, 2, 3)))]
        with meter.step():
            for count in rows:
                model(torch.ones(count, IN)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        accumulated = (len(rows) - 1) * UPDATE // 2  # one addition for each parameter
        expected += sum(map(batch, rows)) + accumulated + UPDATE
    assert meter.total_flops == expected
    assert not meter.is_estimate
    assert meter.run.timed_steps > 60


def test_losses_of_micro_batches_that_are_summed_first(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    """One backward pass for all of them: its cost depends on all their shapes."""
    rows = [(2, 2), (11, 2), (2, 11), (2, 2), (11, 2), (2, 11), (11, 11), (11, 11)]
    for first, second in rows:
        with meter.step():
            total = model(torch.ones(first, IN)).sum() + model(torch.ones(second, IN)).sum()
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
    accumulated = UPDATE // 2  # the engine adds both gradients of a weight
    expected = sum(batch(a) + batch(b) + 1 + accumulated + UPDATE for a, b in rows)
    assert meter.total_flops == expected
    assert meter.run.timed_steps == 2  # the last two that are not new: steps 6 and 8


def test_shape_that_comes_after_others_in_a_step_is_counted_from_there(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    for rows in ((2, 2), (2, 11)):
        with meter.step():
            for count in rows:
                model(torch.ones(count, IN)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = 3 * batch(2) + batch(11) + 2 * (UPDATE // 2 + UPDATE)
    assert meter.total_flops == expected


def test_work_between_equal_calls_belongs_to_its_position(model: Net) -> None:
    meter = FlopMeter(model, verify_every=0)
    with torch.no_grad():
        for _ in range(4):
            with meter.step():
                model(torch.ones(B, IN)) * 2
                model(torch.ones(B, IN))
                model(torch.ones(B, IN))
    assert meter.total_flops == 4 * (3 * forward(B) + B * OUT)
    assert not meter.is_estimate


class Discriminated(nn.Module):
    """Discriminator of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_model_called_twice_a_step_has_both_calls() -> None:
    """The generator runs between two calls on one shape, and is part of the first call's cost."""
    discriminator, generator = Discriminated(), nn.Linear(OUT, IN, bias=False)
    of_d = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    of_g = torch.optim.SGD(generator.parameters(), lr=0.1)
    meter = FlopMeter(discriminator, verify_every=0)
    for _ in range(6):
        with meter.step():
            discriminator(torch.ones(B, IN)).sum().backward()
            fake = generator(torch.ones(B, OUT))
            discriminator(fake.detach()).sum().backward()
            of_d.step()
            of_d.zero_grad()
            discriminator(fake).sum().backward()
            of_g.step()
            of_g.zero_grad()
            of_d.zero_grad()
    call = 2 * B * IN + (B - 1)  # forward and the sum of the loss
    weight = 2 * B * IN  # gradient of the discriminator's weight
    on_d = 2 * (call + weight) + IN + 2 * IN  # accumulation, update
    on_g = 2 * B * OUT * IN + call + weight + 2 * B * IN + 2 * B * OUT * IN + 2 * OUT * IN
    assert meter.total_flops == 6 * (on_d + on_g)
    assert meter.run.timed_steps == 5


class Scheduled(Net):
    """Multiplies once more in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + x if self.training else x)


def test_eval_and_train_have_costs_of_their_own() -> None:
    model = Scheduled()
    meter = FlopMeter(model, verify_every=0)
    for index in range(8):
        model.train(index % 2 == 0)
        with meter.step(), torch.no_grad():
            model(torch.ones(B, IN))
    assert meter.total_flops == 8 * forward(B) + 4 * B * IN
    assert meter.run.timed_steps == 8 - 2 - 2  # both modes are new, and the second comes again


def test_submodule_in_eval_is_seen() -> None:
    model = nn.Sequential(Scheduled())
    meter = FlopMeter(model, verify_every=0)
    with torch.no_grad():
        for is_training in (True, False, True, False):
            model[0].train(is_training)
            with meter.step():
                model(torch.ones(B, IN))
    assert meter.total_flops == 4 * forward(B) + 2 * B * IN


def test_parameters_frozen_in_mid_run_change_the_cost(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    for index in range(9):
        model.a.weight.requires_grad = index < 3 or index >= 6
        with meter.step():
            train(model, optimizer, B)
    frozen = forward(B) + loss(B) + 2 * B * HID * OUT + 2 * HID * OUT
    assert meter.total_flops == 6 * (batch(B) + UPDATE) + 3 * frozen
    assert meter.run.timed_steps == 9 - 2 - 1  # the frozen model is counted when it comes again


def test_autocast_and_grad_mode_belong_to_the_signature(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    for _ in range(3):
        for is_cast in (False, True):
            with meter.step(), torch.no_grad(), torch.autocast("cpu", enabled=is_cast):
                model(torch.ones(B, IN))
        with meter.step():
            model(torch.ones(B, IN))
    by_dtype = {op.dtype: op.cost.flops for op in meter.run.operators if op.cost}
    assert by_dtype["bfloat16"] == 3 * forward(B)
    assert by_dtype["float32"] == 6 * forward(B)
    assert meter.run.timed_steps == 9 - 3 - 2  # until the second signature comes again


@pytest.mark.parametrize("target", [nn.Linear, torch.ops.aten.linear, torch.ops.aten.mm])
def test_formulas_that_apply_belong_to_the_signature(model: Net, target: Any) -> None:
    stated = lambda *args, out, **kwargs: OpCost(macs=17, flops=35)  # noqa: E731
    meter = FlopMeter(model)

    def step() -> int:
        with meter.step(), torch.no_grad():
            model(torch.ones(B, IN))
        return meter.last_step.total.macs

    layers, found = B * (IN * HID + HID * OUT), [step()]
    for _ in range(2):
        with overridden({target: stated}):
            found.append(step())
        found.append(step())
    assert found == [layers, 2 * 17, layers, 2 * 17, layers]
    assert copy.deepcopy(meter).total_flops == meter.total_flops
    register_flops(target, override=True)(stated)
    try:
        assert step() == 2 * 17
    finally:
        unregister_flops(target)
    assert step() == layers


def test_plain_arguments_belong_to_the_signature() -> None:
    class Repeated(Net):
        def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
            return sum(super(Repeated, self).forward(x) for _ in range(times))  # type: ignore[return-value]

    model = Repeated()
    meter = FlopMeter(model, verify_every=0)
    with torch.no_grad():
        for _ in range(3):
            for times in (1, 2):
                with meter.step():
                    model(torch.ones(B, IN), times=times)
    sums = B * OUT * (1 + 2)  # sum() begins with 0 + the first result
    assert meter.total_flops == 3 * (3 * forward(B) + sums)


def test_closure_of_an_optimizer_is_part_of_the_step(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    def closure(rows: int) -> torch.Tensor:
        optimizer.zero_grad()
        total = model(torch.ones(rows, IN)).sum()
        total.backward()
        return total

    rows = [2, 2, 11, 2, 11, 13, 11]
    for count in rows:
        with meter.step():
            optimizer.step(lambda count=count: closure(count))
    assert meter.total_flops == sum(batch(count) + UPDATE for count in rows)
    assert meter.run.costs["optimizer"].flops == len(rows) * UPDATE


@pytest.mark.parametrize("skipped", [{0, 1}, {3}, {3, 5, 6}])
def test_step_skipped_by_a_grad_scaler_has_no_update(
    model: Net, optimizer: Any, meter: FlopMeter, skipped: set[int]
) -> None:
    """As long as the gradients are infinite, the optimizer does not step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    exact, counted = [], []
    for index in range(30):
        factor = float("inf") if index in skipped else 1.0
        with FlopCounterMode(display=False) as counter, meter.step():
            scaler.scale(model(torch.ones(B, IN)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            torch.ones(7, IN) @ torch.ones(IN, OUT)
        exact.append(counter.get_total_flops())
        counted.append(meter.run.timed_steps)
    # What the scaler itself computes is the same in both: its own work and the update differ.
    whole = {count for index, count in enumerate(exact) if index not in skipped}
    assert {count - exact[min(skipped)] for count in whole} == {UPDATE}
    assert meter.total_flops == sum(exact)
    assert counted[-1] >= 10


def test_step_left_by_an_exception_is_not_part_of_the_totals(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    def fail(rows: int) -> None:
        with pytest.raises(KeyError), meter.step():
            model(torch.ones(rows, IN)).sum().backward()
            raise KeyError
        optimizer.zero_grad()

    fail(2)  # in a step that is counted
    for rows in (2, 2, 11, 11):
        with meter.step():
            train(model, optimizer, rows)
        fail(rows)  # in one that is not
    assert meter.total_flops == 2 * batch(2) + 2 * batch(11) + 4 * UPDATE
    assert meter.steps_done == 4
    assert not meter.is_estimate


def test_input_that_only_its_data_describe_is_counted_every_time() -> None:
    class Dense(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to_dense())

    model = Dense()
    meter = FlopMeter(model, verify_every=2)
    with torch.no_grad():
        for rows in (2, 11, 2):
            with meter.step():
                model(torch.ones(rows, IN).to_sparse())
    assert meter.run.timed_steps == 0
    assert meter.run.costs["forward"].macs == (2 + 11 + 2) * (IN * HID + HID * OUT)
    assert not meter.is_estimate


def test_steps_that_are_counted_every_time_have_costs_of_their_own() -> None:
    """The last step and the window show their own costs, not the mean of all steps."""

    class Chosen(nn.Linear):
        def forward(self, x: torch.Tensor, kept: set[int]) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x[: len(kept)])

    model = Chosen(IN, OUT, bias=False)
    meter = FlopMeter(model, verify_every=0, window=2)
    for rows in SHAPES:
        with meter.step(), torch.no_grad():
            model(torch.ones(max(SHAPES), IN), set(range(rows)))
        assert meter.last_step.total_flops == 2 * rows * IN * OUT
    assert meter.window.total_flops == 2 * sum(SHAPES[1:]) * IN * OUT
    assert meter.total_flops == 2 * sum(SHAPES) * IN * OUT
    assert not meter.is_estimate


def test_step_without_a_call_of_the_model_is_always_counted(model: Net, optimizer: Any) -> None:
    meter = FlopMeter(model, optimizer, verify_every=0)
    rows = [2, 2, 11, 2]
    with pytest.warns(UserWarning, match="the model was not called in a step") as found:
        for count in rows:
            with meter.step():
                train(lambda x: model.b(model.a(x)), optimizer, count)  # type: ignore[arg-type]
    assert len(found) == 1
    assert meter.total_flops == sum(batch(count) + UPDATE for count in rows)
    assert meter.run.timed_steps == 0


def test_stated_batch_stands_for_a_call_of_the_model(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    rows = [2, 2, 11, 11, 2]
    for count in rows:
        with meter.step():
            meter.note_batch(torch.ones(count, IN))
            train(lambda x: model.b(model.a(x)), optimizer, count)  # type: ignore[arg-type]
    assert meter.total_flops == sum(batch(count) + UPDATE for count in rows)
    assert meter.run.timed_steps == 2


def test_method_that_runs_in_place_of_forward_is_the_stated_work(model: Net) -> None:
    """Under DDP, Lightning runs ``training_step`` so, with the number of the batch."""
    meter, own = FlopMeter(model, verify_every=0), model.forward

    def training_step(x: torch.Tensor, number: int) -> torch.Tensor:
        model.forward = own  # type: ignore[method-assign]
        return model(x[1:])

    for number in range(6):
        x = torch.ones(B, IN)
        with meter.step(inputs=(x,)):
            model.forward = training_step  # type: ignore[method-assign,assignment]
            model(x, number)
    assert meter.total_flops == 6 * forward(B - 1)
    assert meter.run.timed_steps == 6 - 2  # the second has another attribute, which is forward
    assert not meter.is_estimate


def test_stated_batch_does_not_stand_for_a_later_call_in_place_of_forward(model: Net) -> None:
    """Neither in its own step, after the call that runs it, nor in the next one."""
    meter = FlopMeter(model, verify_every=0)
    model.forward = lambda x, number: model.b(model.a(x))  # type: ignore[method-assign,assignment]
    x = torch.ones(B, IN)
    with meter.step():
        meter.note_batch(x)
        model.a(x)
    with meter.step():
        model(x, 0)
    rows = [2, 2, 11, 11, 2]
    for number, count in enumerate(rows):
        with meter.step(inputs=(x,)):
            model(x, number)
            model(torch.ones(count, IN), 0)
    stated, called = 2 * B * IN * HID, forward(B)
    assert meter.total_flops == stated + called + sum(forward(B) + forward(one) for one in rows)


def test_number_that_a_stated_batch_is_called_with_belongs_to_the_signature() -> None:
    class Repeating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(IN, IN, bias=False)

        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            for _ in range(times):
                x = self.layer(x)
            return x

    model, x = Repeating(), torch.ones(B, IN)
    meter = FlopMeter(model, verify_every=0)
    for times in (1, 2, 2, 3):
        with meter.step(inputs=(x,)):
            model(x, times)
    assert meter.total_flops == (1 + 2 + 2 + 3) * 2 * B * IN * IN


def test_rates_leave_out_steps_that_another_profiler_slows(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    for is_timed in (True, True, False, False, True):  # the first is counted
        meter.is_timed = is_timed
        with meter.step():
            train(model, optimizer, B)
    assert meter.run.timed_steps == 2
    assert meter.total_flops == 5 * (batch(B) + UPDATE)


def test_step_that_starts_with_the_stated_batch_is_known_after_one_run(model: Net) -> None:
    """No work comes before the batch, so that a new shape is counted once."""
    meter = FlopMeter(model, verify_every=0)
    for rows in (2, 2, 11, 11, 13):
        x = torch.ones(rows, IN)
        with meter.step(inputs=(x,)):
            model.b(model.a(x))
    assert meter.total_flops == sum(map(forward, (2, 2, 11, 11, 13)))
    assert meter.run.timed_steps == 2
    assert not meter.is_estimate


def test_data_prepared_in_the_block_cost_what_their_shape_costs(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    """It runs before the shape is known: it is counted when the shape comes again."""
    for index, rows in enumerate((2, 2, 11, 11, 2)):
        with meter.step():
            x = torch.ones(rows, IN) * 2
            model(x)
        assert meter.is_estimate is (index == 2)
    rows = 3 * 2 + 2 * 11
    assert meter.total_flops == forward(rows) + rows * IN


@pytest.mark.parametrize("shapes", [3, 5, 9])
def test_data_of_one_shape_alone_may_be_prepared_in_the_block(
    model: Net, optimizer: Any, meter: FlopMeter, shapes: int
) -> None:
    """Nothing runs before the calls on the others, also on those that were counted first."""
    for index in range(10 * shapes):
        rows = 2 + index % shapes
        with meter.step(), torch.no_grad():
            x = torch.ones(rows, IN)
            model(x * 2 if rows == 3 else x)
    assert not meter.is_estimate
    calls = sum(forward(2 + shape) for shape in range(shapes))
    assert meter.total_flops == 10 * (calls + 3 * IN)


def test_shape_whose_data_are_prepared_is_counted_when_it_comes_late(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    """As the last batch of an epoch, of 60 steps: 10 and then 40 steps ask for it, and step 180."""
    for index in range(240):
        rows = 11 if index % 60 == 59 else 2
        with meter.step(), torch.no_grad():
            x = torch.ones(rows, IN)
            model(x * 2 if rows == 11 else x)
        assert meter.is_estimate is (59 <= index < 179)
    assert meter.total_flops == forward(236 * 2 + 4 * 11) + 4 * 11 * IN
    assert meter.run.timed_steps == 240 - 2 - 10 - 40 - 1


@pytest.mark.parametrize("steps", [31, 101])
def test_shorter_last_step_of_an_epoch_is_counted_when_it_is_expected(
    model: Net, optimizer: Any, meter: FlopMeter, steps: int
) -> None:
    """Where it was of unknown cost twice, it is expected at the same distance."""
    for index in range(4 * steps):
        with meter.step():
            for _ in range(1 if index % steps == steps - 1 else 3):
                model(torch.ones(B, IN)).sum().backward()
            model.a.weight.grad.mul_(0.5)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        assert meter.is_estimate is (steps - 1 <= index < 3 * steps - 1)
    weights = IN * HID + HID * OUT
    full = 3 * batch(B) + 2 * weights + IN * HID + UPDATE
    assert meter.total_flops == 4 * ((steps - 1) * full + batch(B) + IN * HID + UPDATE)
    first, updates, asked, expected = 1, 1, 10 + 10, 1  # an update after one call is new, too
    assert meter.run.timed_steps == 4 * steps - first - updates - asked - expected


def test_window_and_last_step_have_rates_of_their_own(model: Net, optimizer: Any) -> None:
    """Steps take 1, 2, 3, ... seconds. Rates leave out the counted steps, 1 to 3."""
    times = iter(time for step in range(1, 7) for time in (100.0 * step, 101.0 * step))
    meter = FlopMeter(model, optimizer, TOY, verify_every=0, window=2, now=lambda: next(times))
    for rows in (2, 11, 11, 2, 2, 11):
        with meter.step(samples=rows, tokens=10 * rows):
            train(model, optimizer, rows)
    small, large = batch(2) + UPDATE, batch(11) + UPDATE
    assert meter.last_step.total_flops == large
    assert meter.last_step.flops_per_s == large / 6
    assert meter.last_step.mfu == pytest.approx(batch(11) / 6 / 1e9)
    assert meter.window.total_flops == small + large
    assert meter.window.tokens_per_s == 10 * (2 + 11) / (5 + 6)
    assert meter.window.samples == 2 + 11
    assert meter.run.seconds == 4 + 5 + 6
    assert meter.flops_per_s == (2 * small + large) / (4 + 5 + 6)
    assert meter.tokens_per_s == 10 * (2 * 2 + 11) / (4 + 5 + 6)
    assert meter.hfu == pytest.approx((2 * small + large) / 15 / 1e9)
    assert meter.mfu == pytest.approx((2 * batch(2) + batch(11)) / 15 / 1e9)
    assert meter.total_flops == 3 * small + 3 * large


def test_utilisation_takes_the_peaks_of_families_of_kernels() -> None:
    """As that of a profile does: products have a peak, and the update has another."""
    product, other, seconds = 4e6, 1e6, 3.0
    peaks = {"product": {"float32": product}}
    machine = Machine(
        name="toy", flops_per_s={"float32": other}, kernel_flops_per_s=peaks, source="made up"
    )
    model, clock = Net(), Ticks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = FlopMeter(model, optimizer, machine, verify_every=0, now=clock)
    for _ in range(4):
        with meter.step():
            train(model, optimizer, B)
            clock.now += seconds
    continued = FlopMeter(model, machine=machine)
    continued.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    products = forward(B) + backward(B)
    hfu = (products / product + (batch(B) - products + UPDATE) / other) / seconds
    for reading in (meter.last_step, meter.window, meter.run, continued.run):
        assert reading.hfu == pytest.approx(hfu)
    assert {op.op for op in meter.run.operators} == {"product", "other"}


@pytest.mark.parametrize("passed", [-100.0, float("nan")])
def test_step_in_which_the_clock_is_set_back_has_no_part_in_rates(passed: float) -> None:
    model, clock = Net(), Ticks()
    meter = FlopMeter(model, verify_every=0, now=clock)
    for seconds in (1.0, 2.0, 2.0, passed):
        with meter.step(tokens=B):
            model(torch.ones(B, IN))
            clock.now += seconds
    assert meter.run.steps == 4 and meter.run.timed_steps == 2
    assert meter.total_flops == 4 * forward(B)
    assert meter.run.flops_per_s == meter.window.flops_per_s == forward(B) / 2.0
    assert meter.tokens_per_s == B / 2.0
    assert meter.last_step.flops_per_s is None


def test_meter_shows_its_totals(model: Net, optimizer: Any) -> None:
    """Two steps of 1 s, of which the first is counted: rates and shares are of the second."""
    times = iter((0.0, 1.0, 2.0, 3.0))
    meter = FlopMeter(model, optimizer, TOY, now=lambda: next(times))
    assert repr(meter) == "<FlopMeter of Net: 0 steps, 0 FLOPs>"
    for _ in range(2):
        with meter.step():
            train(model, optimizer, B)
    one = batch(B) + UPDATE
    assert repr(meter) == f"<FlopMeter of Net: 2 steps, {2 * one} FLOPs, {one} FLOP/s, {SHARES}>"
    assert repr(meter.last_step).startswith(f"<MeterReading: 1 step, {one} FLOPs, ")
    assert repr(MeterReading(uncounted={"a.b": 1})) == "<MeterReading: 0 steps, at least 0 FLOPs>"
    assert repr(MeterReading(is_estimate=True)) == "<MeterReading: 0 steps, about 0 FLOPs>"


def test_state_of_an_estimate_has_its_variance(meter: FlopMeter) -> None:
    saved = {**meter.state_dict(), "is_estimate": True}
    for variance, error in ((9.0, 3.0), (None, None)):
        meter.load_state_dict({**saved, "variance": variance})
        assert meter.run.standard_error == error
        assert meter.state_dict()["variance"] == variance
    del saved["variance"]  # as earlier versions saved it
    meter.load_state_dict(saved)
    assert meter.run.standard_error is None
    meter.load_state_dict({**saved, "is_estimate": False})
    assert meter.run.standard_error == 0
    with pytest.raises(ConfigError, match="damaged"):
        meter.load_state_dict({**saved, "variance": -1.0})


def test_meter_without_steps_has_no_rates(meter: FlopMeter) -> None:
    assert meter.total_flops == 0
    for reading in (meter.run, meter.window, meter.last_step):
        assert reading.flops_per_s is reading.tokens_per_s is reading.mfu is reading.hfu is None


def test_model_that_is_copied_in_a_step_is_counted_as_before(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    """The copy is called in the block, too: its work is counted, but it is not the model."""
    copies: list[nn.Module] = []
    for _ in range(3):
        with meter.step():
            copies.append(copy.deepcopy(model))
            copies.append(pickle.loads(pickle.dumps(model)))
            with torch.no_grad():
                copies[-1](torch.ones(11, IN))
            train(model, optimizer, B)
    assert meter.total_flops == 3 * (batch(B) + UPDATE + forward(11))
    assert meter.run.timed_steps == 2


def test_call_of_a_copy_is_not_a_call_of_the_model(model: Net, meter: FlopMeter) -> None:
    with pytest.warns(UserWarning, match="the model was not called in a step"), meter.step():
        copy.deepcopy(model)(torch.ones(B, IN))
    assert meter.total_flops == forward(B)


def test_way_through_a_step_that_was_never_counted_is_an_estimate(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    """In most steps nothing runs before the first call; in some, the model is not called."""

    def parts(x: torch.Tensor) -> torch.Tensor:
        return model.b(model.a(x))  # type: ignore[no-any-return]

    for called in (model, model, parts):
        assert not meter.is_estimate
        with meter.step():
            train(called, optimizer, B)  # type: ignore[arg-type]
    assert meter.is_estimate
    with pytest.warns(UserWarning, match="the model was not called in a step"), meter.step():
        train(parts, optimizer, B)  # type: ignore[arg-type]
    assert not meter.is_estimate
    assert meter.total_flops == 4 * (batch(B) + UPDATE)


@pytest.mark.slow
def test_hook_of_a_pickled_model_does_not_meet_another_hook(
    model: Net, meter: FlopMeter, tmp_path: Path
) -> None:
    """In another process, ids of hooks begin with 0: one could become that of the meter's hook."""
    with meter.step():
        torch.save(model, tmp_path / "model.pt")
    code = f"""
import sys
import torch
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from torch.utils.hooks import RemovableHandle
RemovableHandle.next_id = 0
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
(key,) = model._forward_pre_hooks
print(RemovableHandle.next_id > key, model(torch.ones(2, 3)).shape)
"""
    done = run_python("-c", code)
    assert done.stdout.strip() == "True torch.Size([2, 7])", done.stderr


def test_two_meters_on_one_model_count_the_same(model: Net, optimizer: Any) -> None:
    first = FlopMeter(model, optimizer, verify_every=4)
    second = FlopMeter(model, verify_every=3)
    for rows in (2, 2, 11, 2, 11, 2):
        with first.step(), second.step():
            train(model, optimizer, rows)
    with first.step():
        train(model, optimizer, B)
    assert second.total_flops == 4 * batch(2) + 2 * batch(11) + 6 * UPDATE
    assert first.total_flops == second.total_flops + batch(B) + UPDATE
    assert not model._forward_pre_hooks


def test_hooks_that_the_program_replaces_are_installed_anew(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    for index in range(8):
        if index == 4:
            model._forward_pre_hooks = type(model._forward_pre_hooks)()
        with meter.step():
            train(model, optimizer, B)
    assert meter.total_flops == 8 * (batch(B) + UPDATE)


def test_program_may_clear_the_hooks_in_a_step(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    for _ in range(3):
        with meter.step():
            train(model, optimizer, B)
            model._forward_pre_hooks.clear()
    assert meter.total_flops == 3 * (batch(B) + UPDATE)


def test_hooks_of_the_program_are_kept(model: Net, optimizer: Any, meter: FlopMeter) -> None:
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append("call"))
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    with meter.step():
        train(model, optimizer, B)
        handle = model.register_forward_pre_hook(lambda *_: seen.append("late"))
    train(model, optimizer, B)
    handle.remove()
    assert seen == ["call", "step", "call", "late", "step"]
    model._forward_pre_hooks.clear()
    optimizer._optimizer_step_post_hooks.clear()


def test_more_histories_than_are_kept_are_counted_right(
    model: Net, meter: FlopMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an event led is a cache: steps that are not in it go by their states."""
    monkeypatch.setattr(step_positions, "_LIMIT", 7)
    rng, expected = random.Random(0), 0
    for _ in range(60):
        rows = [rng.choice(SHAPES) for _ in range(rng.choice((1, 2, 3)))]
        with meter.step(), torch.no_grad():
            for count in rows:
                model(torch.ones(count, IN))
        expected += sum(map(forward, rows))
        assert meter._path._positions._number <= 7
    assert meter.total_flops == expected
    assert meter.run.timed_steps > 30


def test_optimizer_that_comes_later_is_followed(model: Net) -> None:
    meter = FlopMeter(model, verify_every=0)
    for _ in range(4):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with meter.step():
                train(model, optimizer, B)
        assert not optimizer._optimizer_step_pre_hooks
    assert meter.run.costs["optimizer"].flops == 8 * UPDATE
    assert meter.total_flops == 8 * (batch(B) + UPDATE)


def test_resumed_run_continues_the_totals(model: Net, optimizer: Any, meter: FlopMeter) -> None:
    for _ in range(3):
        with meter.step(samples=B, tokens=5):
            train(model, optimizer, B)
    saved = json.loads(json.dumps(meter.state_dict()))
    resumed = FlopMeter(model, optimizer, TOY, verify_every=0)
    resumed.load_state_dict(saved)
    assert resumed.run == meter.run
    for _ in range(2):
        with resumed.step(samples=B, tokens=5):
            train(model, optimizer, B)
    assert resumed.total_flops == 5 * (batch(B) + UPDATE)
    assert (resumed.run.steps, resumed.run.samples, resumed.run.tokens) == (5, 5 * B, 5 * 5)
    wrong_amount = [["forward", "float32", "product", "flops", "many"]]
    wrong_figure = [["forward", "float32", "product", "joules", 3]]
    for damaged in (
        {"steps": 3},
        {**saved, "steps": "x"},
        {**saved, "steps": -1},
        {**saved, "seconds": float("nan")},
        {**saved, "seconds": -1.0},
        {**saved, "seconds": 10**400},
        {**saved, "amounts": wrong_amount},
        {**saved, "amounts": [["forward", "float32", "product", "flops", -3]]},
        {**saved, "amounts": [[7, "float32", "product", "flops", 3]]},
        {**saved, "timed_amounts": wrong_figure},
    ):
        with pytest.raises(ConfigError, match="the state of a meter is damaged"):
            resumed.load_state_dict(damaged)
    with pytest.raises(ConfigError, match=r"is of type str; pass what state_dict\(\) returned"):
        resumed.load_state_dict("meter.pt")  # type: ignore[arg-type]
    assert resumed.run.steps == 5
    resumed.load_state_dict({**saved, "amounts": [["forward", "float32", "flops", 3]]})  # older
    assert resumed.total_flops == 3


def test_started_meter_finds_the_steps_by_the_optimizer(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    meter.start()
    for index in range(5):
        train(model, optimizer, B, micro_batches=2)
        if index % 2:
            with torch.no_grad():
                model(torch.ones(13, IN))  # an evaluation between two steps
    meter.stop()
    train(model, optimizer, B)
    assert meter.steps_done == 5
    assert meter.total_flops == 5 * (2 * batch(B) + UPDATE // 2 + UPDATE)


def test_started_meter_without_an_optimizer_takes_each_call_as_a_step(model: Net) -> None:
    meter = FlopMeter(model, verify_every=0)
    meter.start()
    for rows in (2, 11, 2):
        model(torch.ones(rows, IN))
    with pytest.raises(RuntimeError):
        model(torch.ones(rows, IN + 1))
    model(torch.ones(2, IN))
    with pytest.raises(AlreadyActiveError):
        meter.start()
    meter.stop()
    assert meter.steps_done == 4
    assert meter.total_flops == forward(3 * 2 + 11)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_recomputation_of_the_whole_model_is_not_a_call(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    from torch.utils.checkpoint import checkpoint

    for _ in range(3):
        with meter.step():
            checkpoint(model, torch.ones(B, IN), use_reentrant=False).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert meter.run.costs["recompute"].flops == 3 * 2 * B * IN * HID  # up to what b has saved
    assert meter.model_flops == 3 * batch(B)


def test_operator_without_a_formula_makes_a_lower_bound(model: Net) -> None:
    meter = FlopMeter(model, verify_every=0, custom_mapping={})
    with torch.library._scoped_library("meter_test", "FRAGMENT") as library:
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("unknown", torch.clone, "CPU")
        expected = pytest.warns(UncountedWarning, match="meter_test.unknown.default")
        with torch.no_grad(), expected as found:
            for rows in (B, B, 7):
                with meter.step():
                    torch.ops.meter_test.unknown(model(torch.ones(rows, IN)))
    assert [one.filename for one in found] == [__file__]
    assert meter.run.is_lower_bound
    assert meter.run.uncounted == {"meter_test.unknown.default": 3}


def broken(*_: Any, **__: Any) -> int:
    raise ZeroDivisionError("as told")


def test_formula_that_fails_is_warned_of_with_its_error(model: Net) -> None:
    meter = FlopMeter(model, custom_mapping={torch.ops.aten.mm: broken})
    message = "ZeroDivisionError: as told.*Mend the formula of aten.mm.default"
    with pytest.warns(UncountedWarning, match=message), meter.step(), torch.no_grad():
        model(torch.ones(B, IN))


def test_step_inside_a_step_is_refused(model: Net, meter: FlopMeter) -> None:
    with meter.step(), torch.no_grad():
        model(torch.ones(B, IN))
        with pytest.raises(AlreadyActiveError), meter.step():
            pass
    assert meter.total_flops == forward(B)


def test_size_that_is_stated_is_of_one_step_alone(
    model: Net, optimizer: Any, meter: FlopMeter
) -> None:
    first, second = meter.step(samples=3, tokens=31), meter.step(samples=5, tokens=53)
    with first:
        train(model, optimizer, 3)
        with pytest.raises(AlreadyActiveError), meter.step(samples=1000):
            pass
    assert (meter.last_step.samples, meter.last_step.tokens) == (3, 31)
    with second:
        train(model, optimizer, 5)
    assert (meter.last_step.samples, meter.last_step.tokens) == (5, 53)
    meter.start()
    train(model, optimizer, 5)
    assert meter.last_step.samples == 0
    meter.note_size(samples=7)  # before the step, which begins with the call
    train(model, optimizer, 7)
    assert meter.last_step.samples == 7
    train(model, optimizer, 5)
    meter.stop()
    assert meter.last_step.samples == 0
    assert (meter.run.samples, meter.run.tokens) == (3 + 5 + 7, 31 + 53)


def test_wrong_arguments_are_refused(model: Net) -> None:
    with pytest.raises(TargetError, match="optimizer is of type str"):
        FlopMeter(model, "SGD")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="window=0"):
        FlopMeter(model, window=0)
    with pytest.raises(ConfigError, match="verify_every=-1"):
        FlopMeter(model, verify_every=-1)
    with pytest.raises(ConfigError, match="tokens=-3"):
        FlopMeter(model).step(tokens=-3)
    with pytest.raises(TargetError, match="inputs is of type Tensor; pass a tuple"):
        FlopMeter(model).step(inputs=torch.ones(B, IN))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="machine='H100'"):
        FlopMeter(model, machine="H100")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="now=5: pass a function"):
        FlopMeter(model, now=5)  # type: ignore[arg-type]


def test_step_of_the_counting_backend_has_the_names_of_a_reading() -> None:
    step = Step(
        costs={
            "forward": OpCost(macs=2 * 3, flops=2 * 2 * 3),
            "backward": OpCost(flops=5),
            "optimizer": OpCost(flops=7),
        },
        seconds=2.0,
    )
    assert (step.total_flops, step.model_flops) == (2 * 2 * 3 + 5 + 7, 2 * 2 * 3 + 5)
    for name in ("costs", "total", "model_total", "flops_per_s", "uncounted", "is_lower_bound"):
        assert hasattr(step, name)
        assert hasattr(MeterReading(), name)
