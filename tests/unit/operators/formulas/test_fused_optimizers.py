"""Fused optimizer steps, against the unfused ones under the same counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.profiling import profile_of

P = torch.optim
STEPS = [
    (P.Adam, {}),
    (P.Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (P.AdamW, {}),
    (P.AdamW, {"weight_decay": 0}),
    (P.SGD, {"lr": 0.1}),
    (P.SGD, {"lr": 0.1, "momentum": 0.9}),
    (P.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    (P.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    (P.Adagrad, {}),
    (P.Adagrad, {"weight_decay": 0.1, "maximize": True}),
]


def optimizer(cls: Any, options: dict[str, Any], **way: bool) -> Any:
    parameters = [nn.Parameter(torch.ones(5, 7)), nn.Parameter(torch.ones(3))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return cls(parameters, **options, **way)


def step_flops(made: Any) -> list[int]:
    """The first step, which sets up state, and the second."""
    return [profile_of(made.step).total().flops for _ in range(2)]


@pytest.mark.parametrize(("cls", "options"), STEPS, ids=lambda value: str(value)[-60:])
def test_fused_step_costs_the_plain_algorithm(cls: Any, options: dict[str, Any]) -> None:
    fused = step_flops(optimizer(cls, options, fused=True))
    plain = step_flops(optimizer(cls, options, fused=False, foreach=False))
    assert fused == plain
    assert plain[1] > 0


def test_adam_step_is_thirteen_per_element() -> None:
    elements, counters = 5 * 7 + 3, 2
    made = optimizer(P.Adam, {}, fused=True)
    assert step_flops(made) == [13 * elements + counters] * 2


def test_fused_step_of_complex_parameters_counts_two_reals() -> None:
    parameter = nn.Parameter(torch.ones(5, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    made = P.Adam([parameter], foreach=False)
    made.step()
    assert profile_of(made.step).total().flops == 13 * 2 * 5 + 1


def test_fused_step_moves_its_tensors() -> None:
    """Read: parameter, gradient, two averages; written: all but the gradient; 4 bytes each."""
    made = optimizer(P.Adam, {}, fused=True)
    made.step()
    cost = profile_of(made.step).by_operator()["aten._fused_adam_.default"].cost
    assert cost is not None
    elements = 5 * 7 + 3
    assert (cost.bytes_read, cost.bytes_written) == (4 * 4 * elements, 3 * 4 * elements)


def test_unscaling_tests_and_multiplies() -> None:
    grads = [torch.ones(5, 7), torch.ones(3)]
    args = (grads, torch.zeros(1), torch.ones(1))
    total = profile_of(torch._amp_foreach_non_finite_check_and_unscale_, *args).total()
    assert total.flops == 2 * (5 * 7 + 3)


def test_unscaling_in_the_step_writes_gradients_back() -> None:
    elements = 5 * 7
    lists = [[torch.ones(5, 7)] for _ in range(5)]
    lists[4] = []  # no amsgrad
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    options = {**rates, "amsgrad": False, "maximize": False}
    steps = [torch.ones(())]
    scaled = {"grad_scale": torch.ones(1), "found_inf": torch.zeros(1)}
    for extra, flops, written in (({}, 13, 3), (scaled, 14, 4)):
        total = profile_of(
            lambda extra=extra: torch._fused_adam_(*lists, steps, **options, **extra)
        ).total()
        assert total.flops == flops * elements
        assert total.bytes_written == written * 4 * elements
