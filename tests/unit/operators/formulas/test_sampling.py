"""Random numbers are free, and the arithmetic of dropout is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.profiling import profile_of

X = torch.rand(3, 5)
FREE = {
    "rand": lambda: torch.rand(3, 5),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(7, (3,)),
    "randperm": lambda: torch.randperm(7),
    "bernoulli": lambda: torch.bernoulli(X),
    "normal": lambda: torch.normal(X, 1.0),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "multinomial": lambda: torch.multinomial(X, 2),
    "poisson": lambda: torch.poisson(X),
}


@pytest.mark.parametrize("name", FREE)
def test_random_numbers_are_free(name: str) -> None:
    profile = profile_of(FREE[name])
    assert profile.total().flops == 0
    assert profile.uncounted_ops() == {}


@pytest.mark.parametrize(("p", "train", "each"), [(0.3, True, 2), (0.3, False, 0), (1.0, True, 1)])
def test_native_dropout_counts_by_probability_and_mode(p: float, train: bool, each: int) -> None:
    x = X.to("meta")
    assert profile_of(torch.native_dropout, x, p, train).total().flops == each * 3 * 5


def test_gradient_of_a_sample_is_one_per_element() -> None:
    def program(op: Any, *args: Any) -> int:
        return profile_of(op, *args).total().flops

    assert program(torch._standard_gamma_grad, X, X) == 3 * 5
    assert program(torch._dirichlet_grad, X, X, X.sum(-1, keepdim=True)) == 3 * 5


def test_dropout_fused_or_not_costs_the_same() -> None:
    """Eager CPU draws, scales and multiplies the mask itself; inference mode fuses."""
    plain = profile_of(lambda: torch.nn.functional.dropout(X, 0.3)).total().flops
    with torch.inference_mode():
        fused = profile_of(lambda: torch.nn.functional.dropout(X, 0.3)).total().flops
    assert plain == fused == 2 * 3 * 5


def test_older_fused_dropout_and_its_backward_are_two_per_element() -> None:
    """Only the formulas are called: the operators need a GPU."""
    from dispatch_flops.operators.registry import lookup

    aten, x = torch.ops.aten, X.to("meta")
    for op, args in (
        (aten._fused_dropout.default, (x, 0.7)),
        (aten._masked_scale.default, (x, x, 2.0)),
    ):
        rule = lookup(op)
        assert rule is not None
        found: Any = rule.answer(op, args, {}, x)
        assert found.flops == 2 * 3 * 5
