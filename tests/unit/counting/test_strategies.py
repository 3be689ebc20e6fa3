"""Forward-mode differentiation: tangents that are all zero cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian, jvp

from tests.helpers.profiling import profile_of

N = 5
W, X = torch.arange(1.0, N + 1), torch.linspace(-1, 1, N)
SQUARE = torch.arange(1.0, N * N + 1).view(N, N)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.add(x, W, alpha=2),
        lambda x: torch.sub(x, W, alpha=2),
        lambda x: x.clone().add_(W, alpha=2),
        lambda x: torch.addmm(SQUARE, x.expand(N, N), SQUARE, beta=2),
        lambda x: torch.addcmul(x, W, W, value=2),
        lambda x: torch.addcdiv(x, W, W, value=2),
        lambda x: torch.index_add(x, 0, torch.arange(N), W, alpha=2),
    ],
)
def test_jvp_of_a_scaled_constant_gives_the_bare_result(
    function: Callable[[Tensor], Tensor],
) -> None:
    """torch recurses infinitely on ``zeros * 2`` below a dispatch mode."""
    bare = jvp(function, (X,), (X,))
    counted: list[tuple[Tensor, Tensor]] = []
    profile_of(lambda: counted.append(jvp(function, (X,), (X,))))
    for a, b in zip(bare, counted[0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("number", [2, 2j])
def test_product_of_a_zero_tangent_is_as_without_a_counter(device: str, number: complex) -> None:
    zeros = torch._efficientzerotensor((N,), device=device)
    multiply = partial(torch.ops.aten.mul.Scalar, zeros, number)
    bare, counted = multiply(), list[Tensor]()
    profile = profile_of(lambda: counted.append(multiply()))
    assert profile.total().flops == 0
    assert counted[0]._is_zerotensor()
    for found in (bare, *counted):
        assert (found.shape, found.device.type) == ((N,), device)
        assert found.is_complex() == isinstance(number, complex)


def test_jvp_of_a_linear_layer_does_not_count_zero_tangents() -> None:
    model = nn.Linear(N, 3)
    profile = profile_of(lambda: jvp(model, (X[None],), (X[None],)))
    assert not profile.uncounted_ops()
    # The product and, by the product rule, one for each tangent (torch fills the weight's with
    # zeros); the bias, and the sum of the tangents. The tangent of the bias costs nothing.
    assert profile.total().macs == 3 * N * 3
    assert profile.total().flops == 2 * 3 * N * 3 + 3 + 3
    profile = profile_of(lambda: hessian(lambda x: model(x).tanh().sum())(X))
    assert not profile.uncounted_ops()


def test_jvp_of_dot_with_a_constant_counts_one_tangent() -> None:
    profile = profile_of(lambda: jvp(lambda x: torch.dot(x, W), (X,), (X,)))
    assert profile.total().macs == 2 * N
    profile = profile_of(lambda: jvp(lambda x: torch.dot(x, x), (X,), (X,)))
    assert profile.total().macs == 3 * N
