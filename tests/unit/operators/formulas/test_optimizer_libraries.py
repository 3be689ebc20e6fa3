"""Steps of bitsandbytes' optimizers, against the same steps in torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.profiling import profile_of
from tests.helpers.stand_ins import nothing, stand_in

N, BLOCK = 3 * 256, 256
DECAY = 0.1

UPDATE_32 = (
    "optimizer_update_32bit(str optimizer_name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) state1, "
    "Tensor(a3!)? state2, Tensor(a4!)? unorm_vec, float max_unorm, float param_norm, float beta1, "
    "float beta2, float beta3, float alpha, float eps, float weight_decay, int step, float lr, "
    "float gnorm_scale, bool skip_zeros=False) -> ()"
)
UPDATE_8 = (
    "optimizer_update_8bit_blockwise(str optimizer_name, Tensor(a0!) g, Tensor(a1!) p, "
    "Tensor(a2!) state1, Tensor(a3!)? state2, float beta1, float beta2, float beta3, float alpha, "
    "float eps, int step, float lr, Tensor(a4!) qmap1, Tensor(a5!)? qmap2, Tensor(a6!) absmax1, "
    "Tensor(a7!)? absmax2, float weight_decay, float gnorm_scale, bool skip_zeros=False) -> ()"
)


def mean(state: Tensor, g: Tensor) -> Tensor:
    return state * 0.9 + 0.1 * g


def square(state: Tensor, g: Tensor) -> Tensor:
    return state * 0.9 + 0.1 * g * g


def adam(g: Tensor, p: Tensor, m: Tensor, n: Tensor, is_first: bool) -> Tensor:
    return p + 0.1 * (mean(m, g) / (square(n, g).sqrt() + 1e-8))


def ademamix(g: Tensor, p: Tensor, m: Tensor, n: Tensor, is_first: bool) -> Tensor:
    mixed = mean(m, g) / 0.1 + 0.5 * mean(m, g)
    return p - 0.1 * (mixed / (square(n, g).sqrt() / 0.1 + 1e-8))


def momentum(g: Tensor, p: Tensor, m: Tensor, n: Tensor, is_first: bool) -> Tensor:
    return p + 1.0 * (-0.1 * (g if is_first else m * 0.9 + g))


def lion(g: Tensor, p: Tensor, m: Tensor, n: Tensor, is_first: bool) -> Tensor:
    mean(m, g)
    return p - 0.1 * mean(m, g).sign()


def rmsprop(g: Tensor, p: Tensor, m: Tensor, n: Tensor, is_first: bool) -> Tensor:
    return p - 0.1 * g / (square(m, g).sqrt() + 1e-8)


def adagrad(g: Tensor, p: Tensor, m: Tensor, n: Tensor, is_first: bool) -> Tensor:
    return p - 0.1 * g / ((m + g * g).sqrt() + 1e-8)


STEPS = (adam, ademamix, momentum, lion, rmsprop, adagrad)
IN_GRADIENT = (momentum, rmsprop, adagrad)


def flops_of(step: Callable[..., Tensor], decay: float, is_first: bool) -> int:
    """Count the step on tensors, after the scale of the gradient and the weight decay."""

    def run() -> None:
        g, p, m, n = (torch.ones(N) for _ in range(4))
        g = 1.0 * g
        if decay and step in IN_GRADIENT:
            g = g + p * decay
        elif decay:
            p = p * (1 - decay)
        step(g, p, m, n, is_first)

    return profile_of(run).total().flops


def update_32(op: Any, name: str, decay: float, number: int, limit: float = 0.0) -> Any:
    g, p = torch.ones(N), torch.ones(N)
    states = torch.ones(2 if name == "ademamix" else 1, N), torch.ones(N)
    rest = (torch.zeros(1), limit, 1.0, 0.9, 0.9, 0.9, 0.5, 1e-8, decay, number, 0.1, 1.0)
    return profile_of(op, name, g, p, *states, *rest).total()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("decay", [0.0, DECAY])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_step_of_bitsandbytes_costs_what_its_operators_do(
    step: Callable[..., Tensor], decay: float, number: int
) -> None:
    with stand_in("bitsandbytes", UPDATE_32, nothing) as op:
        cost = update_32(op, step.__name__, decay, number)
    assert cost.flops == flops_of(step, decay, number == 1)
    states = 3 if step is ademamix else 2
    assert cost.bytes_read == 4 * ((2 + states) * N + 1)
    assert cost.bytes_written == 4 * (1 + states) * N


def test_limit_of_the_norm_costs_a_second_update_its_squares_and_their_sum() -> None:
    with stand_in("bitsandbytes", UPDATE_32, nothing) as op:
        plain = update_32(op, "adam", 0.0, 2).flops
        limited = update_32(op, "adam", 0.0, 2, limit=1.0).flops
    # The scale of the gradient, the states (3 and 4) and their corrections, root, epsilon,
    # quotient, square; the sum over all, into a number; its root and the comparison.
    assert limited - plain == N * (1 + 3 + 4 + 2 + 3 + 1) + (N - 1) + 1 + 2


def test_step_on_8_bit_states_dequantises_and_quantises_each() -> None:
    g, p = torch.ones(N), torch.ones(N)
    states = [torch.zeros(N, dtype=torch.uint8) for _ in range(2)]
    codes, maxima = [torch.ones(256) for _ in range(2)], [torch.ones(N // BLOCK) for _ in range(2)]
    with stand_in("bitsandbytes", UPDATE_8, nothing) as op:
        cost = profile_of(
            op, "adam", g, p, *states, 0.9, 0.9, 0.9, 0.5, 1e-8, 2, 0.1, *codes, *maxima, DECAY, 1.0
        ).total()

    def run() -> None:
        m, n = torch.ones(N), torch.ones(N)
        grad = g * 1.0
        m.mul_(0.9).add_(grad, alpha=0.1)
        n.mul_(0.9).addcmul_(grad, grad, value=0.1)
        p.mul_(0.9).addcdiv_(m, (n.sqrt() / 0.1).add_(1e-8), value=-0.1)

    # Each state: a product with the maximum of its block; then per element 5, less 1 per block,
    # 2 per block, and 8 comparisons in the code.
    quantising = N + N * 5 + N // BLOCK + N * 8
    assert cost.flops == profile_of(run).total().flops + 2 * quantising
