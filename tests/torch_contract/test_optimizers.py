"""Optimizers: a step runs the operators of the one before, whatever its number and its values.

dispatch_flops runs steps that are like an earlier one without its mode (counting/known_steps.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RAdam

from dispatch_flops import _torch
from dispatch_flops.counting.known_steps import KINDS
from tests.helpers.modes import OperatorNames

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD, all options": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, maximize=True),
    "SGD, foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD, fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: Adam(p, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda p: AdamW(p),
    "AdamW, foreach": lambda p: AdamW(p, foreach=True, amsgrad=True),
    "AdamW, fused": lambda p: AdamW(p, fused=True),
}


def operators_of_steps(make: Callable[[Any], Optimizer], steps: int) -> list[list[str]]:
    parameters = [nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(7))]
    optimizer = make(parameters)
    found = []
    for number in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 10.0 ** (number - 9)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        with OperatorNames() as names:
            optimizer.step()
        found.append(names.seen)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_from_the_second_on_run_the_same_operators(name: str) -> None:
    _, second, *later = operators_of_steps(OPTIMIZERS[name], 15)
    assert second
    assert all(step == second for step in later)


def test_steps_of_radam_depend_on_their_number() -> None:
    """It is therefore not among the optimizers whose steps are compared."""
    steps = operators_of_steps(lambda p: RAdam(p, betas=(0.9, 0.8)), 15)
    assert steps[1] != steps[-1]


@pytest.mark.parametrize("cls", [SGD, Adam, AdamW])
def test_first_compilation_wraps_parts_of_optimizers_that_are_found_again(
    cls: type[Optimizer],
) -> None:
    """Whether anything was compiled before in this process does not matter."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    init_group: Any = cls._init_group  # type: ignore[attr-defined]
    assert init_group is not _torch.undisabled(init_group)
    assert KINDS[cls].is_original(cls([nn.Parameter(torch.ones(1))], lr=0.1))
