"""Steps of bitsandbytes' optimizers, once it is loaded.

FLOPs are per element of the parameter. Scalars of a step are not tensor arithmetic.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from dispatch_flops.operators.formulas.quantized_libraries import DEQUANTISE, quantize_blockwise
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.profile.cost import OpCost, flops

Tensor = torch.Tensor


class _Step(NamedTuple):
    """FLOPs per element: of every step, more with weight decay, less in the first step.

    norm: more where the norm of the update is limited.
    """

    always: int
    decay: int
    first: int = 0
    norm: int = 0


# The gradient is scaled (1). adam: 3 and 4 for the states, 3 for root, epsilon and quotient, a
# product and a sum. ademamix: 3 + 3 + 4, mixed momentum 3, root, quotient and epsilon, quotient,
# product and difference. momentum: 2, two products and a sum. lion: 3, sign, a product, a
# difference, 3. rmsprop: 4, product, root, epsilon, quotient, difference. adagrad: 2, the same.
# The norm is of a second pass: the update again, its square, and the sum over all elements.
_STEPS_32 = {
    "adam": _Step(13, 1, norm=15),
    "ademamix": _Step(20, 1, norm=3),
    "momentum": _Step(6, 2, first=2, norm=5),
    "lion": _Step(10, 1, norm=5),
    "rmsprop": _Step(10, 2, norm=10),
    "adagrad": _Step(8, 2, norm=8),
}
# By in-place operators: ``add_`` with alpha 2, ``addcmul_`` and ``addcdiv_`` with a value 3. The
# decay of the last three is part of every step.
_STEPS_8 = {
    "adam": _Step(14, 1),
    "ademamix": _Step(20, 1),
    "momentum": _Step(7, 0, first=2),
    "lion": _Step(10, 1),
    "rmsprop": _Step(12, 0),
    "adagrad": _Step(11, 0),
}
_LIMIT = 2  # the root of the squared norm, and its comparison with the limit
_BLOCK = 256  # elements of a state that share a maximum
_SAME_AS = {"lamb": "adam", "lars": "momentum"}


def _step_cost(
    steps: dict[str, _Step], name: str, elements: int, *, decays: bool, is_first: bool, norms: bool
) -> OpCost:
    found = steps[_SAME_AS.get(name, name)]
    each = found.always + found.decay * decays - found.first * is_first
    # The norm's own step of momentum has no product with the state either.
    each += (found.norm - found.first * is_first) * norms
    return flops(elements * each + _LIMIT * norms)


def _moving(cost: OpCost, read: Any, written: Any) -> OpCost:
    return dataclasses.replace(cost, bytes_read=nbytes(read), bytes_written=nbytes(written))


@register_flops("bitsandbytes::optimizer_update_32bit", by_name=True)
@tells_apart(0, 1)
def optimizer_update_32bit(
    *,
    optimizer_name: str,
    g: Tensor,
    p: Tensor,
    state1: Tensor,
    state2: Tensor | None,
    unorm_vec: Tensor | None,
    max_unorm: float,
    weight_decay: float,
    step: int,
    out: None,
    **_: Any,
) -> OpCost:
    """Per element: adam and lamb 13, ademamix 20, momentum and lars 6 (4 in the first step), lion
    10, rmsprop 10, adagrad 8; weight decay 1, or 2 in the gradient. ``max_unorm`` adds the norm.

    Source: bitsandbytes/backends/default/ops.py.
    """
    cost = _step_cost(
        _STEPS_32,
        optimizer_name,
        p.numel(),
        decays=weight_decay != 0,
        is_first=step == 1,
        norms=max_unorm != 0,
    )
    return _moving(cost, (g, p, state1, state2, unorm_vec), (p, state1, state2))


@register_flops("bitsandbytes::optimizer_update_8bit_blockwise", by_name=True)
@tells_apart(0, 1)
def optimizer_update_8bit(
    *,
    optimizer_name: str,
    g: Tensor,
    p: Tensor,
    state1: Tensor,
    state2: Tensor | None,
    weight_decay: float,
    step: int,
    qmap1: Tensor,
    qmap2: Tensor | None,
    absmax1: Tensor,
    absmax2: Tensor | None,
    out: None,
    **_: Any,
) -> OpCost:
    """Per element: adam and lamb 14, ademamix 20, momentum and lars 7 (5 in the first step), lion
    10, rmsprop 12, adagrad 11; weight decay 1 for adam, lamb, ademamix and lion. The states are
    dequantised before and quantised after, as ``quantize_blockwise`` does.

    Source: bitsandbytes/backends/cpu/ops.py.
    """
    cost = _step_cost(
        _STEPS_8,
        optimizer_name,
        p.numel(),
        decays=weight_decay != 0,
        is_first=step == 1,
        norms=False,
    )
    for state, code in ((state1, qmap1), (state2, qmap2)):
        if state is not None:
            cost += flops(state.numel() * DEQUANTISE)
            cost += quantize_blockwise(A=state, blocksize=_BLOCK, code=code, out=None)
    states = (state1, state2, absmax1, absmax2)
    return _moving(cost, (g, p, *states, qmap1, qmap2), (p, *states))
