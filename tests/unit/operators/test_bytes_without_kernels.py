"""Bytes of operators that have no CPU kernel, derived by hand, on tensors without data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dispatch_flops.operators import (
    formulas,  # noqa: F401  (fills the registry)
    registry,
)
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import cost_of_call

aten = torch.ops.aten
F32 = 4


def empty(*sizes: int) -> Tensor:
    return torch.empty(*sizes, device="meta")


X, GRAD, WEIGHT = empty(3, 5), empty(3, 7), empty(7, 5)
LEFT, RIGHT = empty(3, 5), empty(5, 7)
LINE, RSTD = empty(5), empty(3, 1)
IMAGE, IMAGES = empty(2, 3, 5, 7), 2 * 3 * 5 * 7
A, B, C, D, E = (empty(3) for _ in range(5))
RESERVE = empty(11)
LINEAR = {"input": (X, 3 * 5), "weight": (WEIGHT, 7 * 5), "bias": (empty(7), 7)}


def linear_backward(*wanted: str) -> tuple[Any, tuple[Any, ...], Any]:
    results = [empty(*like.shape) if name in wanted else None for name, (like, _) in LINEAR.items()]
    return aten.linear_backward, (X, GRAD, WEIGHT, [name in wanted for name in LINEAR]), results


def matmul_backward(to_left: bool, to_right: bool) -> tuple[Any, tuple[Any, ...], Any]:
    results = [empty(3, 5) if to_left else None, empty(5, 7) if to_right else None]
    return aten.matmul_backward, (GRAD, LEFT, RIGHT, [to_left, to_right]), results


def rms_norm_backward(to_input: bool, to_weight: bool) -> tuple[Any, tuple[Any, ...], Any]:
    results = [empty(3, 5) if to_input else None, empty(5) if to_weight else None]
    args = (empty(3, 5), X, [5], RSTD, LINE, [to_input, to_weight])
    return aten._fused_rms_norm_backward, args, results


def cudnn_batch_norm(training: bool) -> tuple[Any, tuple[Any, ...], Any]:
    results = [empty(2, 3, 5, 7), empty(3), empty(3), empty(11)]
    return aten.cudnn_batch_norm, (IMAGE, A, B, C, D, training, 0.1, 1e-5), results


GRADS = [empty(2, 3, 5, 7), empty(3), empty(3)]
Case = tuple[tuple[Any, tuple[Any, ...], Any], int, int]
CASES: dict[str, Case] = {
    # call and results, elements read, elements written
    "linear_backward": (
        linear_backward("input", "weight", "bias"),
        3 * 5 + 3 * 7 + 7 * 5,
        3 * 5 + 7 * 5 + 7,
    ),
    "linear_backward to input": (linear_backward("input"), 3 * 7 + 7 * 5, 3 * 5),
    "linear_backward to weight": (linear_backward("weight"), 3 * 5 + 3 * 7, 7 * 5),
    "linear_backward to bias": (linear_backward("bias"), 3 * 7, 7),
    "matmul_backward": (matmul_backward(True, True), 3 * 7 + 3 * 5 + 5 * 7, 3 * 5 + 5 * 7),
    "matmul_backward to the left": (matmul_backward(True, False), 3 * 7 + 5 * 7, 3 * 5),
    "matmul_backward to the right": (matmul_backward(False, True), 3 * 7 + 3 * 5, 5 * 7),
    "_fused_rms_norm_backward": (rms_norm_backward(True, True), 2 * 3 * 5 + 3 + 5, 3 * 5 + 5),
    "_fused_rms_norm_backward to input": (rms_norm_backward(True, False), 2 * 3 * 5 + 3 + 5, 3 * 5),
    "_fused_rms_norm_backward to weight": (rms_norm_backward(False, True), 2 * 3 * 5 + 3, 5),
    # training reads and writes the running statistics
    "cudnn_batch_norm": (cudnn_batch_norm(True), IMAGES + 4 * 3, IMAGES + 2 * 3 + 11 + 2 * 3),
    "cudnn_batch_norm, evaluation": (cudnn_batch_norm(False), IMAGES + 4 * 3, IMAGES + 2 * 3 + 11),
    # backward reads neither of them
    "cudnn_batch_norm_backward": (
        (
            aten.cudnn_batch_norm_backward,
            (IMAGE, GRADS[0], A, B, C, D, E, 1e-5, RESERVE),
            [torch.empty_like(grad) for grad in GRADS],
        ),
        2 * IMAGES + 3 * 3 + 11,
        IMAGES + 2 * 3,
    ),
    "miopen_batch_norm_backward": (
        (
            aten.miopen_batch_norm_backward,
            (IMAGE, GRADS[0], A, B, C, D, E, 1e-5),
            [torch.empty_like(grad) for grad in GRADS],
        ),
        2 * IMAGES + 3 * 3,
        IMAGES + 2 * 3,
    ),
    # the input gives a dtype alone; statistics of 2 ranks
    "batch_norm_gather_stats": (
        (
            aten.batch_norm_gather_stats,
            (IMAGE, empty(2, 3), empty(2, 3), A, B, 0.1, 1e-5, 70),
            [empty(3), empty(3)],
        ),
        2 * 2 * 3 + 2 * 3,
        2 * 3 + 2 * 3,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_a_call_without_a_kernel_are_those_of_each_element_touched_once(case: str) -> None:
    (packet, args, results), read, written = CASES[case]
    op = packet.default
    rule = registry.lookup(op, {})
    assert rule is not None
    found = cost_of_call(case, op, rule, args, {}, results, Conventions())
    assert found.cost is not None, found.error
    assert (found.cost.bytes_read, found.cost.bytes_written) == (F32 * read, F32 * written)
