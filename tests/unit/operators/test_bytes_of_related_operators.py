"""Bytes of operators that share a rule with a more common one, derived by hand on meta tensors."""

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
I64 = 2  # in elements of float32, as all sizes here


def empty(*sizes: int) -> Tensor:
    return torch.empty(*sizes, device="meta")


def longs(*sizes: int) -> Tensor:
    return torch.empty(*sizes, device="meta", dtype=torch.long)


A, LINE, ROW = empty(3, 5), empty(5), empty(3)
IMAGE, POOLED = empty(2, 3, 8, 9), empty(2, 3, 4, 3)
VOLUME, SMALL = empty(2, 3, 4, 5, 6), empty(2, 3, 2, 2, 2)
OF_IMAGE, OF_POOLED, OF_VOLUME, OF_SMALL = 2 * 3 * 8 * 9, 2 * 3 * 4 * 3, 2 * 3 * 120, 2 * 3 * 8
X, GRAD, WEIGHT = empty(2, 3, 8, 9), empty(2, 5, 7, 6), empty(5, 3, 2, 4)
OF_X, OF_GRAD, OF_WEIGHT = 2 * 3 * 8 * 9, 2 * 5 * 7 * 6, 5 * 3 * 2 * 4
C1, C2, C3, C4 = (empty(3) for _ in range(4))
SHARED_MEAN, SHARED_VAR = empty(1).expand(3), empty(1).expand(3)  # of all channels: an element
BATCH = empty(2, 3, 5, 7)
OF_BATCH = 2 * 3 * 5 * 7
M, L, R = empty(3, 7), empty(3, 5), empty(5, 7)
SQUARE, PIVOTS = empty(5, 5), torch.empty(5, device="meta", dtype=torch.int32)
TABLE, FEW = empty(11, 7), empty(2, 7)

Call = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


def call(op: Any, *args: Any, out: Any, **kwargs: Any) -> Call:
    return op, args, kwargs, out


def mps_backward(*mask: bool) -> Call:
    """The kernel returns tensors in place of gradients that are not asked for."""
    grads = [torch.empty_like(t) for t in (X, WEIGHT, LINE)]
    lists = ([0, 0], [1, 1], [1, 1], 1, list(mask))
    return call(aten.mps_convolution_backward.default, X, GRAD, WEIGHT, *lists, out=grads)


def batch_norm_backward(train: bool, *mask: bool) -> Call:
    """Both statistics are given: those of the batch 3 elements each, the running ones 1."""
    shapes = ((2, 3, 5, 7), (3,), (3,))
    grads = [empty(*shape) if wanted else None for shape, wanted in zip(shapes, mask, strict=True)]
    args = (BATCH.clone(), BATCH, C1, SHARED_MEAN, SHARED_VAR, C2, C3, train, 1e-5, list(mask))
    return call(aten.native_batch_norm_backward.default, *args, out=grads)


def batch_norm_backward_by_update(update: bool) -> Call:
    mask, reserve = [True, True, True], empty(3)
    running, saved = (SHARED_MEAN, SHARED_VAR), (C2, C3)
    args = (BATCH.clone(), BATCH, C1, *running, *saved, update, 1e-5, mask, reserve)
    return call(
        aten.batch_norm_backward.default, *args, out=[empty(2, 3, 5, 7), empty(3), empty(3)]
    )


def rrelu_backward(training: bool) -> Call:
    """Noise of 5 elements, which 3 rows share."""
    args = (empty(3, 5), A, empty(5).expand(3, 5), 0.1, 0.3, training, False)
    return call(aten.rrelu_with_noise_backward.default, *args, out=empty(3, 5))


def convolved(weight: Tensor) -> Call:
    """A line of 19 by windows that cover all of it."""
    args = (empty(1, 1, 19), weight, None, [1], [0], [1], False, [0], 1)
    return call(aten.convolution.default, *args, out=empty(1, 1, 17))


def convolved_by_itself() -> Call:
    line = empty(19)
    _, args, kwargs, out = convolved(line[:3].view(1, 1, 3))
    return call(aten.convolution.default, line.view(1, 1, 19), *args[1:], **kwargs, out=out)


CASES: dict[str, tuple[Call, int, int]] = {
    # call, elements read, elements written
    "convolution": (convolved(empty(1, 1, 3)), 19 + 3, 17),
    "convolution by a part of the input": (convolved_by_itself(), 19, 17),
    # -- the input is only a shape
    "fractional_max_pool2d_backward": (
        call(
            aten.fractional_max_pool2d_backward.default,
            POOLED, IMAGE, [2, 3], [4, 3], longs(2, 3, 4, 3), out=torch.empty_like(IMAGE),
        ),
        (1 + I64) * OF_POOLED, OF_IMAGE,
    ),
    "fractional_max_pool3d_backward": (
        call(
            aten.fractional_max_pool3d_backward.default,
            SMALL, VOLUME, [2, 2, 2], [2, 2, 2], longs(2, 3, 2, 2, 2), out=torch.empty_like(VOLUME),
        ),
        (1 + I64) * OF_SMALL, OF_VOLUME,
    ),
    "adaptive_max_pool3d_backward": (
        call(
            aten.adaptive_max_pool3d_backward.default,
            SMALL, VOLUME, longs(2, 3, 2, 2, 2), out=torch.empty_like(VOLUME),
        ),
        (1 + I64) * OF_SMALL, OF_VOLUME,
    ),
    "max_pool3d_with_indices_backward": (
        call(
            aten.max_pool3d_with_indices_backward.default,
            SMALL, VOLUME, [2, 2, 3], [2, 2, 3], [0, 0, 0], [1, 1, 1], False,
            longs(2, 3, 2, 2, 2), out=torch.empty_like(VOLUME),
        ),
        (1 + I64) * OF_SMALL, OF_VOLUME,
    ),
    "avg_pool3d_backward": (
        call(
            aten.avg_pool3d_backward.default,
            SMALL, VOLUME, [2, 2, 3], [2, 2, 3], [0, 0, 0], False, True, None,
            out=torch.empty_like(VOLUME),
        ),
        OF_SMALL, OF_VOLUME,
    ),
    "adaptive_avg_pool3d_backward into a tensor": (
        call(
            aten.adaptive_avg_pool3d_backward.grad_input,
            SMALL, VOLUME, grad_input=VOLUME.clone(), out=VOLUME.clone(),
        ),
        OF_SMALL, OF_VOLUME,
    ),
    "_adaptive_avg_pool3d_backward": (
        call(
            aten._adaptive_avg_pool3d_backward.default,
            SMALL, VOLUME, out=torch.empty_like(VOLUME),
        ),
        OF_SMALL, OF_VOLUME,
    ),
    "mkldnn_adaptive_avg_pool2d_backward": (
        call(
            aten.mkldnn_adaptive_avg_pool2d_backward.default,
            POOLED, IMAGE, out=torch.empty_like(IMAGE),
        ),
        OF_POOLED, OF_IMAGE,
    ),
    "reflection_pad3d_backward": (
        call(
            aten.reflection_pad3d_backward.default,
            empty(2, 3, 4, 5, 9), VOLUME, [1, 2, 0, 0, 0, 0], out=torch.empty_like(VOLUME),
        ),
        2 * 3 * 4 * 5 * 9, OF_VOLUME,
    ),
    "replication_pad3d_backward": (
        call(
            aten.replication_pad3d_backward.default,
            empty(2, 3, 4, 5, 9), VOLUME, [1, 2, 0, 0, 0, 0], out=torch.empty_like(VOLUME),
        ),
        2 * 3 * 4 * 5 * 9, OF_VOLUME,
    ),
    # -- losses: a weight for each target, at most one for each of the classes
    "nll_loss_backward with class weights": (
        call(
            aten.nll_loss_backward.default,
            empty(()), TABLE, longs(11), empty(7), 1, -100, empty(()), out=torch.empty_like(TABLE),
        ),
        1 + 11 * I64 + 7 + 1, 11 * 7,
    ),
    "nll_loss_backward with class weights for few targets": (
        call(
            aten.nll_loss_backward.default,
            empty(()), FEW, longs(2), empty(7), 2, -100, empty(()), out=torch.empty_like(FEW),
        ),
        1 + 2 * I64 + 2, 2 * 7,
    ),
    "nll_loss2d_backward": (
        call(
            aten.nll_loss2d_backward.default,
            empty(()), BATCH, longs(2, 5, 7), None, 2, -100, empty(()),
            out=torch.empty_like(BATCH),
        ),
        1 + 2 * 5 * 7 * I64, OF_BATCH,
    ),
    # -- copies of a part, and with a part replaced
    "slice_scatter": (
        call(aten.slice_scatter.default, A, empty(2, 5), 0, 1, 3, out=empty(3, 5)),
        2 * 5 + 5, 3 * 5,
    ),
    "diagonal_scatter": (
        call(aten.diagonal_scatter.default, A, ROW, out=empty(3, 5)), 3 + 12, 3 * 5,
    ),
    "as_strided_scatter": (
        call(aten.as_strided_scatter.default, A, empty(2, 2), [2, 2], [5, 1], out=empty(3, 5)),
        4 + 11, 3 * 5,
    ),
    # -- a factor of 0
    "addbmm with beta 0": (
        call(aten.addbmm.default, M, empty(2, 3, 5), empty(2, 5, 7), beta=0, out=empty(3, 7)),
        2 * (15 + 35), 21,
    ),
    "addr with beta 0": (
        call(aten.addr.default, M, ROW, empty(7), beta=0, out=empty(3, 7)), 3 + 7, 21,
    ),
    "_addmm_activation with beta 0": (
        call(aten._addmm_activation.default, empty(7), L, R, beta=0, out=empty(3, 7)), 15 + 35, 21,
    ),
    # -- gradients that are asked for
    "mps_convolution_backward": (
        mps_backward(True, True, True), OF_X + OF_GRAD + OF_WEIGHT, OF_X + OF_WEIGHT + 5,
    ),
    "mps_convolution_backward to the input": (
        mps_backward(True, False, False), OF_GRAD + OF_WEIGHT, OF_X,
    ),
    "mps_convolution_backward to the weight": (
        mps_backward(False, True, False), OF_GRAD + OF_X, OF_WEIGHT,
    ),
    # in training to either gradient: the input, both statistics of the batch
    "batch_norm backward in training to the input": (
        batch_norm_backward(True, True, False, False), 2 * OF_BATCH + 3 + 2 * 3, OF_BATCH,
    ),
    "batch_norm backward in training to the weight": (
        batch_norm_backward(True, False, True, False), 2 * OF_BATCH + 2 * 3, 3,
    ),
    "batch_norm backward in training to the bias": (
        batch_norm_backward(True, False, False, True), OF_BATCH, 3,
    ),
    # in evaluation the running statistics instead: the mean for the weight's gradient alone
    "batch_norm backward in evaluation to the input": (
        batch_norm_backward(False, True, False, False), OF_BATCH + 3 + 1, OF_BATCH,
    ),
    "batch_norm backward in evaluation to the weight": (
        batch_norm_backward(False, False, True, False), 2 * OF_BATCH + 2 * 1, 3,
    ),
    "batch_norm_backward of a batch": (
        batch_norm_backward_by_update(True), 2 * OF_BATCH + 3 + 2 * 3 + 3, OF_BATCH + 2 * 3,
    ),
    "batch_norm_backward of running statistics": (
        batch_norm_backward_by_update(False), 2 * OF_BATCH + 3 + 2 * 1 + 3, OF_BATCH + 2 * 3,
    ),
    # -- statistics that are written in place
    "_native_batch_norm_legit in training": (
        call(
            aten._native_batch_norm_legit.default,
            BATCH, C1, C2, C3, C4, True, 0.1, 1e-5, out=[BATCH.clone(), empty(3), empty(3)],
        ),
        OF_BATCH + 4 * 3, OF_BATCH + 2 * 3 + 2 * 3,
    ),
    "miopen_batch_norm in training": (
        call(
            aten.miopen_batch_norm.default,
            BATCH, C1, C2, C3, C4, True, 0.1, 1e-5, out=[BATCH.clone(), empty(3), empty(3)],
        ),
        OF_BATCH + 4 * 3, OF_BATCH + 2 * 3 + 2 * 3,
    ),
    "_batch_norm_with_update": (
        call(
            aten._batch_norm_with_update.default,
            BATCH, C1, C2, C3, C4, 0.1, 1e-5,
            out=[BATCH.clone(), empty(3), empty(3), empty(0)],
        ),
        OF_BATCH + 4 * 3, OF_BATCH + 2 * 3 + 2 * 3,
    ),
    "batch_norm_update_stats": (
        call(aten.batch_norm_update_stats.default, BATCH, C1, C2, 0.1, out=[empty(3), empty(3)]),
        OF_BATCH + 2 * 3, 2 * 3 + 2 * 3,
    ),
    "batch_norm_gather_stats_with_counts": (
        call(
            aten.batch_norm_gather_stats_with_counts.default,
            BATCH, empty(2, 3), empty(2, 3), C1, C2, 0.1, 1e-5, empty(2),
            out=[empty(3), empty(3)],
        ),
        2 * 2 * 3 + 2 * 3 + 2, 2 * 3 + 2 * 3,
    ),
    "rrelu_with_noise_backward in training": (rrelu_backward(True), 15 + 5, 15),
    "rrelu_with_noise_backward in evaluation": (rrelu_backward(False), 2 * 15, 15),
    # -- picks
    "_unsafe_index of more than there is": (
        call(aten._unsafe_index.Tensor, FEW, [longs(11)], out=empty(11, 7)),
        2 * 7 + 11 * I64, 11 * 7,
    ),
    "_unsafe_masked_index": (
        call(
            aten._unsafe_masked_index.default,
            TABLE, torch.empty(8, 7, dtype=torch.bool, device="meta"), [longs(8, 1), longs(7)], 0.0,
            out=empty(8, 7),
        ),
        8 * 7 + (8 + 7) * I64 + 8 * 7 // 4, 8 * 7,
    ),
    "embedding_renorm of more than there is": (
        call(aten.embedding_renorm.default, FEW, longs(11), 1.0, 2.0, out=empty(2, 7)),
        11 * I64 + 2 * 7, 2 * 7,
    ),
    "_embedding_bag_forward_only with weights": (
        call(
            aten._embedding_bag_forward_only.default,
            TABLE, longs(5), longs(2), False, 0, False, empty(5),
            out=[empty(2, 7), longs(0), longs(2), longs(0)],
        ),
        5 * 7 + 5 * I64 + 2 * I64 + 5, 2 * 7 + 2 * I64,
    ),
    # -- windows of 2 at a distance of 3 touch 6 of 8, and 6 of 9
    "mkldnn_max_pool2d": (
        call(aten.mkldnn_max_pool2d.default, IMAGE, [2, 2], [3, 3], out=empty(2, 3, 3, 3)),
        2 * 3 * 6 * 6, 2 * 3 * 3 * 3,
    ),
    "quantized_max_pool2d": (
        call(aten.quantized_max_pool2d.default, IMAGE, [2, 2], [3, 3], out=empty(2, 3, 3, 3)),
        2 * 3 * 6 * 6, 2 * 3 * 3 * 3,
    ),
    # -- factors that are asked for
    "lu_unpack of the factors": (
        call(
            aten.lu_unpack.default,
            SQUARE, PIVOTS, True, False, out=[empty(0), empty(5, 5), empty(5, 5)],
        ),
        25, 2 * 25,
    ),
    "lu_unpack of the pivots": (
        call(
            aten.lu_unpack.default,
            SQUARE, PIVOTS, False, True, out=[empty(5, 5), empty(0), empty(0)],
        ),
        5, 25,
    ),
    "_cholesky_solve_helper": (
        call(aten._cholesky_solve_helper.default, empty(5, 3), empty(5, 5), False, out=empty(5, 3)),
        15 + 15, 15,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_a_related_operator_are_those_of_each_element_touched_once(case: str) -> None:
    (op, args, kwargs, out), read, written = CASES[case]
    rule = registry.lookup(op, {})
    assert rule is not None
    found = cost_of_call(case, op, rule, args, kwargs, out, Conventions())
    assert found.cost is not None, found.error
    assert (found.cost.bytes_read, found.cost.bytes_written) == (4 * read, 4 * written)
