"""What the signature of a step holds, against a counter in every step."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from dispatch_flops import FlopCounterMode, FlopMeter
from dispatch_flops.profilers import step_costs

B, IN = 4, 8
Change = Callable[[int, dict[str, Any]], dict[str, Any]]


class Net(nn.Module):
    """Returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(IN, IN)
        self.is_deep: bool | None = None

    def forward(self, x: torch.Tensor, loss: Any = torch.sum, weight: float = 1.0) -> Any:
        y = self.a(x)
        return loss(self.a(y) if self.is_deep else y) * weight


class Numbered(nn.Module):
    def forward(self, inputs: Any) -> torch.Tensor:
        x, number = inputs
        return x + x * number


class Repeated:
    def __init__(self, times: int) -> None:
        self.times = times

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            y = y.tanh()
        return y.sum()


class Plain(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                self.update(one)

    def update(self, one: torch.Tensor) -> None:
        one.sub_(one.grad)  # type: ignore[arg-type]


class Signed(Plain):
    def update(self, one: torch.Tensor) -> None:
        one.sub_(one.grad.sign() * 0.1 + 0.2 * one)  # type: ignore[union-attr]


def of_partial(step: int, on: dict[str, Any]) -> dict[str, Any]:
    other = functools.partial(functional.huber_loss, target=torch.zeros(B, IN))
    return {"loss": functools.partial(torch.sum) if step < 4 else other}


def of_lambda(step: int, on: dict[str, Any]) -> dict[str, Any]:
    return {"loss": (lambda y: y.sum()) if step < 4 else (lambda y: (y @ y.T).exp().sum())}


def of_method(step: int, on: dict[str, Any]) -> dict[str, Any]:
    return {"loss": Repeated(1 if step < 4 else 5).loss}


def of_flag(step: int, on: dict[str, Any]) -> dict[str, Any]:
    on["model"].is_deep = (None, True, False)[step // 2 % 3]
    return {}


def of_learning_rate(step: int, on: dict[str, Any]) -> dict[str, Any]:
    on["optimizer"].param_groups[0]["lr"] = torch.tensor(0.1) if step < 4 else 0.1
    return {}


def of_number_of_iterations(step: int, on: dict[str, Any]) -> dict[str, Any]:
    weights = [one for one in on["model"].parameters() if one.dim() == 2]
    on.setdefault("muon", torch.optim.Muon(weights))
    on["optimizer"] = on["muon"]
    on["optimizer"].param_groups[0]["ns_steps"] = 5 if step < 4 else 2
    return {}


def of_optimizer(step: int, on: dict[str, Any]) -> dict[str, Any]:
    """The second gets the address of the first, as far as its meter can tell."""
    if step == 0:
        on["optimizer"] = Plain(on["model"].parameters())
    on["optimizer"].__class__ = Plain if step < 4 else Signed
    return {}


@pytest.mark.parametrize(
    "change",
    [
        of_partial, of_lambda, of_method, of_flag, of_learning_rate, of_number_of_iterations,
        of_optimizer,
    ],
)  # fmt: skip
def test_what_decides_the_cost_belongs_to_the_signature(change: Change) -> None:
    model = Net()
    meter, exact = FlopMeter(model, verify_every=0), 0
    on: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    for step in range(12):
        inputs = change(step, on)
        with FlopCounterMode(display=False) as counter, meter.step():
            model(torch.ones(B, IN), **inputs).backward()
            on["optimizer"].step()
        exact += counter.get_total_flops()
        model.zero_grad()
    assert meter.total_flops == exact
    assert not meter.is_estimate
    assert meter.run.timed_steps > 4


def test_annealed_weight_of_a_loss_is_one_signature() -> None:
    """A float's value does not make a signature; that it is 0 does, as in the first step."""
    model = Net()
    meter = FlopMeter(model, verify_every=0)
    for step in range(50):
        with meter.step():
            model(torch.ones(B, IN), weight=step / 50).backward()
        model.zero_grad()
    product, sums = 2 * B * IN * IN, B * IN
    forward = product + sums + (B * IN - 1) + 1  # bias, sum, weight
    backward = product + (B - 1) * IN + 1
    assert meter.total_flops == 50 * (forward + backward)
    assert meter.run.timed_steps == 50 - 2 - 1  # the second is counted when it comes again


@pytest.mark.parametrize("is_new", [True, False])
def test_signatures_that_never_come_again_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, *, is_new: bool
) -> None:
    """With the step's number as an input, each step is new; 20 states are kept before all go."""
    monkeypatch.setattr(step_costs, "_LIMIT", 20)
    model = nn.Sequential(Numbered())
    meter, exact = FlopMeter(model, verify_every=0, window=5), 0
    for step in range(100):
        number = step if is_new else step % 3
        with meter.step(samples=2), torch.no_grad():
            model([torch.ones(number, IN), number])
        exact += 2 * number * IN
        assert len([*meter._states.segments()]) <= 2 * 20
        assert meter.total_flops == exact
        assert meter.last_step.total_flops == 2 * number * IN
    assert meter.run.samples == 2 * 100
    assert meter.run.steps == 100
    assert meter.window.total_flops == 2 * IN * sum(
        step if is_new else step % 3 for step in range(95, 100)
    )
    assert (meter.run.timed_steps == 0) is is_new


@pytest.mark.parametrize(("is_new", "verify_every"), [(True, 0), (False, 0), (False, 1)])
def test_run_whose_steps_are_all_new_is_told_why_it_has_no_rates(
    *, is_new: bool, verify_every: int
) -> None:
    model = nn.Sequential(Numbered())
    meter = FlopMeter(model, verify_every=verify_every)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(250):
            with meter.step(), torch.no_grad():
                model([torch.ones(3, IN), step if is_new else step % 3])
    told = [str(one.message) for one in found]
    assert [one.startswith("each of the first 200 steps was counted") for one in told] == (
        [True] if is_new else []
    )
    assert (meter.flops_per_s is None) is (is_new or verify_every == 1)


@pytest.mark.parametrize("is_timed", [False, True])
def test_run_is_not_told_why_it_has_no_rates_if_it_has_or_wants_none(*, is_timed: bool) -> None:
    """The 200th step is a new one in both."""
    model = nn.Sequential(Numbered())
    meter = FlopMeter(model, verify_every=0)
    meter.is_timed = is_timed
    for step in range(200):
        with meter.step(), torch.no_grad():
            model([torch.ones(3, IN), step % 3 if is_timed and step < 199 else step])
    assert (meter.flops_per_s is None) is not is_timed


def test_steps_that_an_optimizer_counts_in_an_option_are_not_new_for_ever() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = FlopMeter(model, verify_every=0)
    for step in range(150):
        optimizer.param_groups[0]["k"] = step
        with meter.step():
            model(torch.ones(B, IN)).backward()
            optimizer.step()
        model.zero_grad()
    assert meter.run.timed_steps == 150 - 101  # 0 to 99, and 100 or more


def test_option_that_cannot_be_described_is_counted_every_time() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["weights"] = {1, 2}
    meter, exact = FlopMeter(model, verify_every=0), 0
    for _ in range(4):
        with FlopCounterMode(display=False) as counter, meter.step():
            model(torch.ones(B, IN)).backward()
            optimizer.step()
        exact += counter.get_total_flops()
    assert meter.total_flops == exact
    assert meter.run.timed_steps == 0


def test_parameters_that_were_computed_belong_to_the_signature_without_a_warning() -> None:
    """An inner step of meta-learning: torch warns if the gradient of its result is read."""
    model = nn.Linear(IN, IN)
    meter, exact = FlopMeter(model, verify_every=0), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(12):
            parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
            with FlopCounterMode(display=False) as counter, meter.step():
                loss = functional_call(model, parameters, torch.ones(B, IN)).exp().sum()
                if step % 2:
                    found = torch.autograd.grad(loss, [*parameters.values()], create_graph=True)
                    parameters = {
                        name: one - 0.1 * grad
                        for (name, one), grad in zip(parameters.items(), found, strict=True)
                    }
                else:
                    loss.backward()
                functional_call(model, parameters, torch.ones(B, IN)).exp().sum().backward()
            exact += counter.get_total_flops()
            model.zero_grad()
    assert meter.total_flops == exact
    assert not meter.is_estimate
    assert meter.run.timed_steps > 6
