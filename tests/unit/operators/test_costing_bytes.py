"""Bytes of operator calls, derived by hand: each distinct element that is touched, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dispatch_flops.analysis.machines import MACHINES
from tests.helpers.profiling import profile_of

aten = torch.ops.aten
F32, I32, I64 = 4, 4, 8


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


def longs(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long)


def ends(*offsets: int) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


A, B = ones(3, 5), ones(3, 5)
LINE = ones(5)
WIDE = LINE.expand(3, 5)
MASK = torch.tensor([True, True, False, False, True])  # 3 of 5
X4, G4 = ones(2, 3, 5, 7), ones(2, 3, 5, 7)
X, W, GRAD = ones(2, 3, 8, 9), ones(5, 3, 2, 4), ones(2, 5, 7, 6)
X_SIZE, W_SIZE, GRAD_SIZE = 2 * 3 * 8 * 9, 5 * 3 * 2 * 4, 2 * 5 * 7 * 6
C1, C2, C3, C4 = ones(3), ones(3), ones(3), ones(3)
LOGITS, PICKS = ones(11, 7), longs(11)
TABLE = ones(100, 3)
M, L, R = ones(3, 7), ones(3, 5), ones(5, 7)


def conv_backward(*mask: bool) -> Any:
    zeros, one = [0, 0], [1, 1]
    return aten.convolution_backward(GRAD, X, W, [5], one, zeros, one, False, zeros, 1, list(mask))


def layer_norm_backward(*mask: bool) -> Any:
    x, stats = ones(3, 5), ones(3, 1)
    return aten.native_layer_norm_backward(
        ones(3, 5), x, [5], stats, ones(3, 1), ones(5), ones(5), list(mask)
    )


def group_norm_backward(*mask: bool) -> Any:
    return aten.native_group_norm_backward(
        ones(2, 3, 35), ones(2, 3, 35), ones(2, 1), ones(2, 1), C1, 2, 3, 35, 1, list(mask)
    )


def batch_norm_backward(train: bool, *mask: bool) -> Any:
    saved = (ones(3), ones(3)) if train else (ones(0), ones(0))
    return aten.native_batch_norm_backward(G4, X4, C1, C2, C3, *saved, train, 1e-5, list(mask))


def batch_norm(train: bool) -> Any:
    return aten.native_batch_norm(X4, C1, C2, C3, C4, train, 0.1, 1e-5)


def nll_backward(reduction: int) -> Any:
    grad = ones(11) if reduction == 0 else torch.tensor(1.0)
    total = torch.tensor(11.0)
    return aten.nll_loss_backward(grad, LOGITS, PICKS, None, reduction, -100, total)


_, POOLED = aten.max_pool2d_with_indices(X, [2, 3])
_, ADAPTED = aten.adaptive_max_pool2d(X, [3, 2])
N4 = 2 * 3 * 5 * 7

Case = tuple[Callable[[], Any], str, int, int]
CASES: dict[str, Case] = {
    # call, operator, bytes read, bytes written
    # -- a dimension of stride 0 counts once
    "expanded": (lambda: A + WIDE, "add.Tensor", F32 * (15 + 5), F32 * 15),
    "expanded first": (lambda: WIDE + A, "add.Tensor", F32 * (5 + 15), F32 * 15),
    "expanded alone": (lambda: WIDE.exp(), "exp.default", F32 * 5, F32 * 15),
    "expanded scalar": (lambda: ones(1).expand(3, 5) / 2, "div.Tensor", F32, F32 * 15),
    "expanded then copied": (lambda: WIDE.contiguous(), "clone.default", F32 * 5, F32 * 15),
    "expanded on both sides": (
        lambda: ones(5, 1).expand(5, 7) @ ones(1, 3).expand(7, 3),
        "mm.default",
        F32 * (5 + 3),
        F32 * 5 * 3,
    ),
    "expanded in a list": (lambda: torch.cat([A, WIDE]), "cat.default", F32 * 20, F32 * 30),
    "expanded mask": (
        lambda: A.masked_fill(torch.zeros(5, dtype=torch.bool).expand(3, 5), 1.0),
        "masked_fill.Scalar",
        F32 * 15 + 5,
        F32 * 15,
    ),
    "filled with a tensor": (
        lambda: torch.empty(3, 5).fill_(torch.ones(())),
        "fill_.Tensor",
        F32,
        F32 * 15,
    ),
    "gradient of a mean": (
        lambda: ones(3, 5).requires_grad_().mean().backward(),
        "div.Scalar",
        F32,
        F32 * 15,
    ),
    "attention with an expanded mask": (
        lambda: F.scaled_dot_product_attention(
            ones(2, 3, 5, 8), ones(2, 3, 7, 8), ones(2, 3, 7, 8), ones(5, 7).expand(2, 3, 5, 7)
        ),
        "_scaled_dot_product_flash_attention_for_cpu.default",
        F32 * (2 * 3 * (5 + 7 + 7) * 8 + 5 * 7),
        F32 * 2 * 3 * (5 * 8 + 5),
    ),
    # -- the same tensor counts once
    "square": (lambda: A * A, "mul.Tensor", F32 * 15, F32 * 15),
    "product with itself": (
        lambda: (lambda s: s @ s)(ones(7, 7)),
        "mm.default",
        F32 * 49,
        F32 * 49,
    ),
    "in place with itself": (
        lambda: (lambda t: t.add_(t))(ones(3, 5)),
        "add_.Tensor",
        F32 * 15,
        F32 * 15,
    ),
    "three times": (lambda: torch.addcmul(A, A, A), "addcmul.default", F32 * 15, F32 * 15),
    "first and last": (lambda: torch.addcmul(A, B, A), "addcmul.default", F32 * 30, F32 * 15),
    "concatenated with itself": (
        lambda: torch.cat([A, A]),
        "cat.default",
        F32 * 15,
        F32 * 30,
    ),
    "attention to itself": (
        lambda: (lambda q: F.scaled_dot_product_attention(q, q, q))(ones(2, 3, 5, 8)),
        "_scaled_dot_product_flash_attention_for_cpu.default",
        F32 * 2 * 3 * 5 * 8,
        F32 * 2 * 3 * (5 * 8 + 5),
    ),
    # -- views of one storage share their elements
    "detached": (lambda: A * A.detach(), "mul.Tensor", F32 * 15, F32 * 15),
    "viewed": (lambda: A * A.view(3, 5), "mul.Tensor", F32 * 15, F32 * 15),
    "row of itself": (lambda: A - A[2], "sub.Tensor", F32 * 15, F32 * 15),
    "column of itself": (lambda: A - A[:, 3:4], "sub.Tensor", F32 * 15, F32 * 15),
    "transposed product": (
        lambda: (lambda x: x.t() @ x)(ones(3, 5)),
        "mm.default",
        F32 * 15,
        F32 * 25,
    ),
    "differences of rows": (lambda: A[1:] - A[:-1], "sub.Tensor", F32 * 15, F32 * 10),
    "differences of columns": (lambda: A[:, 1:] - A[:, :-1], "sub.Tensor", F32 * 15, F32 * 12),
    "halves": (lambda: A[:1] * A[2:], "mul.Tensor", F32 * 10, F32 * 5),
    "even and odd": (lambda: A[:, :4:2] * A[:, 1:4:2], "mul.Tensor", F32 * 12, F32 * 6),
    "real and whole": (
        lambda: (lambda z: torch.mul(z, z.real))(torch.ones(3, 5, dtype=torch.complex64)),
        "mul.Tensor",
        2 * F32 * 15,
        2 * F32 * 15,
    ),
    "attention to slices of one projection": (
        lambda: (
            lambda q, k, v: F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            )
        )(*ones(2, 5, 3, 3, 8).unbind(2)),
        "_scaled_dot_product_flash_attention_for_cpu.default",
        F32 * 3 * 2 * 5 * 3 * 8,
        F32 * 2 * 3 * (5 * 8 + 5),
    ),
    "attention of rotated queries to one latent": (
        lambda: (lambda q, kv: F.scaled_dot_product_attention(q, kv, kv[..., :8]))(
            ones(2, 3, 5, 8), ones(2, 3, 7, 8)
        ),
        "_scaled_dot_product_flash_attention_for_cpu.default",
        F32 * 2 * 3 * (5 + 7) * 8,
        F32 * 2 * 3 * (5 * 8 + 5),
    ),
    "windows": (lambda: ones(11).unfold(0, 4, 1).sum(1), "sum.dim_IntList", F32 * 11, F32 * 8),
    "windows with a hop": (
        lambda: ones(11).unfold(0, 4, 3).sum(1),
        "sum.dim_IntList",
        F32 * 10,  # starts at 0, 3 and 6
        F32 * 3,
    ),
    "windows with gaps": (
        lambda: ones(11).unfold(0, 3, 4).sum(1),
        "sum.dim_IntList",
        F32 * 3 * 3,
        F32 * 3,
    ),
    "windows of an image": (
        lambda: ones(2, 3, 8, 9).unfold(2, 2, 1).unfold(3, 4, 1).sum((4, 5)),
        "sum.dim_IntList",
        F32 * X_SIZE,
        F32 * 2 * 3 * 7 * 6,
    ),
    "diagonals of a line": (
        lambda: ones(11).as_strided((4, 3), (1, 1)).exp(),
        "exp.default",
        F32 * 6,
        F32 * 12,
    ),
    "convolution of windows": (
        lambda: F.conv1d(ones(19).unfold(0, 7, 4)[:, None], ones(5, 1, 3)),
        "convolution.default",
        F32 * (19 + 15),
        F32 * 4 * 5 * 5,
    ),
    "two tensors": (lambda: A * B, "mul.Tensor", F32 * 30, F32 * 15),
    # -- arguments that are only shapes
    "average pooling backward": (
        lambda: aten.avg_pool2d_backward(
            ones(2, 3, 4, 3), X, [2, 3], [2, 3], [0, 0], False, True, None
        ),
        "avg_pool2d_backward.default",
        F32 * 2 * 3 * 4 * 3,
        F32 * X_SIZE,
    ),
    "adaptive average pooling backward": (
        lambda: aten._adaptive_avg_pool2d_backward(ones(2, 3, 3, 2), X),
        "_adaptive_avg_pool2d_backward.default",
        F32 * 2 * 3 * 3 * 2,
        F32 * X_SIZE,
    ),
    "maximum pooling backward": (
        lambda: aten.max_pool2d_with_indices_backward(
            ones(2, 3, 4, 3), X, [2, 3], [2, 3], [0, 0], [1, 1], False, POOLED
        ),
        "max_pool2d_with_indices_backward.default",
        (F32 + I64) * 2 * 3 * 4 * 3,
        F32 * X_SIZE,
    ),
    "adaptive maximum pooling backward": (
        lambda: aten.adaptive_max_pool2d_backward(ones(2, 3, 3, 2), X, ADAPTED),
        "adaptive_max_pool2d_backward.default",
        (F32 + I64) * 2 * 3 * 3 * 2,
        F32 * X_SIZE,
    ),
    "reflection backward": (
        lambda: aten.reflection_pad1d_backward(ones(2, 3, 9), ones(2, 3, 5), [2, 2]),
        "reflection_pad1d_backward.default",
        F32 * 2 * 3 * 9,
        F32 * 2 * 3 * 5,
    ),
    "replication backward": (
        lambda: aten.replication_pad2d_backward(ones(2, 3, 6, 9), G4, [1, 1, 0, 1]),
        "replication_pad2d_backward.default",
        F32 * 2 * 3 * 6 * 9,
        F32 * N4,
    ),
    "nll_loss backward, mean": (
        lambda: nll_backward(1),
        "nll_loss_backward.default",
        F32 * 2 + I64 * 11,
        F32 * 11 * 7,
    ),
    "nll_loss backward, sum": (
        lambda: nll_backward(2),
        "nll_loss_backward.default",
        F32 + I64 * 11,
        F32 * 11 * 7,
    ),
    "nll_loss backward, none": (
        lambda: nll_backward(0),
        "nll_loss_backward.default",
        F32 * 11 + I64 * 11,
        F32 * 11 * 7,
    ),
    # -- arguments that are read in part
    "nll_loss": (
        lambda: F.nll_loss(LOGITS, PICKS),
        "nll_loss_forward.default",
        F32 * 11 + I64 * 11,
        F32 * 2,
    ),
    "nll_loss with class weights": (
        lambda: F.nll_loss(LOGITS, PICKS, ones(7)),
        "nll_loss_forward.default",
        F32 * (11 + 7) + I64 * 11,
        F32 * 2,
    ),
    "nll_loss of images": (
        lambda: aten.nll_loss2d_forward(X4, longs(2, 5, 7), None, 0, -100),
        "nll_loss2d_forward.default",
        (F32 + I64) * 2 * 5 * 7,
        F32 * (2 * 5 * 7 + 1),
    ),
    "grouped product of fewer rows than matrices": (
        lambda: F.grouped_mm(ones(2, 4), ones(5, 4, 8), offs=ends(0, 1, 1, 1, 2)),
        "_grouped_mm.default",
        F32 * 2 * (4 + 4 * 8) + I32 * 5,
        F32 * 2 * 8,
    ),
    "grouped product of more rows than matrices": (
        lambda: F.grouped_mm(ones(7, 4), ones(5, 4, 8), offs=ends(0, 1, 4, 4, 7)),
        "_grouped_mm.default",
        F32 * (7 * 4 + 5 * 4 * 8) + I32 * 5,
        F32 * 7 * 8,
    ),
    "grouped product of fewer columns than matrices": (
        lambda: F.grouped_mm(ones(5, 3, 4), ones(4, 4)[:, :2], offs=ends(0, 1, 1, 1, 2)),
        "_grouped_mm.default",
        F32 * 2 * (3 * 4 + 4) + I32 * 5,
        F32 * 3 * 2,
    ),
    "index_select": (
        lambda: TABLE.index_select(0, PICKS),
        "index_select.default",
        I64 * 11 + F32 * 11 * 3,
        F32 * 11 * 3,
    ),
    "index_select of more than there is": (
        lambda: ones(2, 3).index_select(0, PICKS),
        "index_select.default",
        I64 * 11 + F32 * 2 * 3,
        F32 * 11 * 3,
    ),
    "embedding of more than there is": (
        lambda: F.embedding(PICKS, ones(2, 3)),
        "embedding.default",
        I64 * 11 + F32 * 2 * 3,
        F32 * 11 * 3,
    ),
    "gather of more than there is": (
        lambda: ones(2, 3).gather(0, longs(11, 3)),
        "gather.default",
        I64 * 11 * 3 + F32 * 2 * 3,
        F32 * 11 * 3,
    ),
    "gather with an expanded index": (
        lambda: TABLE.gather(0, longs(11, 1).expand(11, 3)),
        "gather.default",
        I64 * 11 + F32 * 11 * 3,
        F32 * 11 * 3,
    ),
    "index of more than there is": (
        lambda: ones(2, 3)[PICKS],
        "index.Tensor",
        I64 * 11 + F32 * 2 * 3,
        F32 * 11 * 3,
    ),
    "take of more than there is": (
        lambda: ones(2, 3).take(PICKS),
        "take.default",
        I64 * 11 + F32 * 2 * 3,
        F32 * 11,
    ),
    "embedding_bag of more than there is": (
        lambda: aten._embedding_bag_forward_only(ones(2, 3), PICKS, longs(1)),
        "_embedding_bag_forward_only.default",
        I64 * (11 + 1) + F32 * 2 * 3,
        F32 * 3 + I64 * 2,  # the sum; the size and a maximum's place of the one bag
    ),
    "masked_select": (
        lambda: LINE.masked_select(MASK),
        "masked_select.default",
        5 + F32 * 3,
        F32 * 3,
    ),
    # -- positions touched
    "scatter_add in place": (
        lambda: ones(100, 5).scatter_add_(0, longs(3, 5), A),
        "scatter_add_.default",
        I64 * 15 + F32 * 2 * 15,
        F32 * 15,
    ),
    "scatter_add at more positions than there are": (
        lambda: ones(2, 3).scatter_add_(0, longs(11, 3), ones(11, 3)),
        "scatter_add_.default",
        I64 * 33 + F32 * (33 + 6),
        F32 * 6,
    ),
    "scatter_add with an expanded index": (
        lambda: ones(2, 3).scatter_add_(0, longs(11, 1).expand(11, 3), ones(11, 3)),
        "scatter_add_.default",
        I64 * 11 + F32 * (33 + 6),
        F32 * 6,
    ),
    "scatter_add of a part of the source": (
        lambda: ones(100, 5).scatter_add_(0, longs(3, 5), ones(7, 5)),
        "scatter_add_.default",
        I64 * 15 + F32 * 2 * 15,
        F32 * 15,
    ),
    "scatter_add to a new tensor": (
        lambda: ones(2, 3).scatter_add(0, longs(11, 1).expand(11, 3), ones(11, 3)),
        "scatter_add.default",
        I64 * 11 + F32 * (33 + 6),
        F32 * 6,
    ),
    "scatter in place": (
        lambda: ones(2, 3).scatter_(0, longs(11, 3), ones(11, 3)),
        "scatter_.src",
        I64 * 33 + F32 * 33,
        F32 * 6,
    ),
    "scatter to a new tensor": (
        lambda: ones(100, 5).scatter(0, longs(3, 5), A),
        "scatter.src",
        I64 * 15 + F32 * (15 + 500 - 15),
        F32 * 500,
    ),
    "scatter to a new tensor at more positions than there are": (
        lambda: ones(2, 3).scatter(0, longs(11, 3), 7.0),
        "scatter.value",
        I64 * 33,
        F32 * 6,
    ),
    "scatter to an expanded tensor": (  # 15 of 35 positions: another one has each of 5 elements
        lambda: LINE.expand(7, 5).scatter(0, longs(3, 5), 7.0),
        "scatter.value",
        I64 * 15 + F32 * 5,
        F32 * 35,
    ),
    "index_copy to a new tensor": (
        lambda: ones(100, 5).index_copy(0, longs(3), A),
        "index_copy.default",
        I64 * 3 + F32 * (15 + 500 - 15),
        F32 * 500,
    ),
    "scatter_reduce in place without self": (
        lambda: ones(100, 5).scatter_reduce_(0, longs(3, 5), A, "amax", include_self=False),
        "scatter_reduce_.two",
        I64 * 15 + F32 * 15,
        F32 * 15,
    ),
    "scatter_reduce": (
        lambda: ones(2, 3).scatter_reduce_(0, longs(11, 1).expand(11, 3), ones(11, 3), "amax"),
        "scatter_reduce_.two",
        I64 * 11 + F32 * (33 + 6),
        F32 * 6,
    ),
    "index_add": (
        lambda: ones(2, 3).index_add_(0, PICKS, ones(11, 3)),
        "index_add_.default",
        I64 * 11 + F32 * (33 + 6),
        F32 * 6,
    ),
    "index_put": (
        lambda: aten.index_put_(ones(2, 3), [PICKS], ones(11, 3), True),
        "index_put_.default",
        I64 * 11 + F32 * (33 + 6),
        F32 * 6,
    ),
    # -- gradients that are asked for
    "convolution backward": (
        lambda: conv_backward(True, True, True),
        "convolution_backward.default",
        F32 * (GRAD_SIZE + X_SIZE + W_SIZE),
        F32 * (X_SIZE + W_SIZE + 5),
    ),
    "convolution backward to the input": (
        lambda: conv_backward(True, False, False),
        "convolution_backward.default",
        F32 * (GRAD_SIZE + W_SIZE),
        F32 * X_SIZE,
    ),
    "convolution backward to the weight": (
        lambda: conv_backward(False, True, False),
        "convolution_backward.default",
        F32 * (GRAD_SIZE + X_SIZE),
        F32 * W_SIZE,
    ),
    "convolution backward to the bias": (
        lambda: conv_backward(False, False, True),
        "convolution_backward.default",
        F32 * GRAD_SIZE,
        F32 * 5,
    ),
    "layer_norm backward": (
        lambda: layer_norm_backward(True, True, True),
        "native_layer_norm_backward.default",
        F32 * (15 + 15 + 3 + 3 + 5),
        F32 * (15 + 5 + 5),
    ),
    "layer_norm backward to the weight": (
        lambda: layer_norm_backward(False, True, False),
        "native_layer_norm_backward.default",
        F32 * (15 + 15 + 3 + 3),
        F32 * 5,
    ),
    "layer_norm backward to the bias": (
        lambda: layer_norm_backward(False, False, True),
        "native_layer_norm_backward.default",
        F32 * 15,
        F32 * 5,
    ),
    "group_norm backward": (
        lambda: group_norm_backward(True, True, True),
        "native_group_norm_backward.default",
        F32 * (210 + 210 + 2 + 2 + 3),
        F32 * (210 + 3 + 3),
    ),
    "group_norm backward to the weight": (
        lambda: group_norm_backward(False, True, False),
        "native_group_norm_backward.default",
        F32 * (210 + 210 + 2 + 2),
        F32 * 3,
    ),
    "batch_norm backward in training": (
        lambda: batch_norm_backward(True, True, True, True),
        "native_batch_norm_backward.default",
        F32 * (2 * N4 + 3 + 3 + 3),
        F32 * (N4 + 3 + 3),
    ),
    "batch_norm backward in evaluation": (
        lambda: batch_norm_backward(False, True, True, True),
        "native_batch_norm_backward.default",
        F32 * (2 * N4 + 3 + 3 + 3),
        F32 * (N4 + 3 + 3),
    ),
    "batch_norm backward in evaluation to the input": (
        lambda: batch_norm_backward(False, True, False, False),
        "native_batch_norm_backward.default",
        F32 * (N4 + 3 + 3),
        F32 * N4,
    ),
    # -- factors of 0
    "addmm": (lambda: torch.addmm(M, L, R), "addmm.default", F32 * (21 + 15 + 35), F32 * 21),
    "addmm with beta 0": (
        lambda: torch.addmm(M, L, R, beta=0),
        "addmm.default",
        F32 * (15 + 35),
        F32 * 21,
    ),
    "addmm in place with beta 0": (
        lambda: ones(3, 7).addmm_(L, R, beta=0),
        "addmm_.default",
        F32 * (15 + 35),
        F32 * 21,
    ),
    "baddbmm with beta 0": (
        lambda: torch.baddbmm(ones(2, 3, 7), ones(2, 3, 5), ones(2, 5, 7), beta=0),
        "baddbmm.default",
        F32 * 2 * (15 + 35),
        F32 * 2 * 21,
    ),
    "addmv with beta 0": (
        lambda: torch.addmv(ones(3), L, ones(5), beta=0),
        "addmv.default",
        F32 * (15 + 5),
        F32 * 3,
    ),
    # -- empty results, as of an expert without tokens
    "mm without rows": (lambda: ones(0, 5) @ R, "mm.default", 0, 0),
    "bmm without items": (lambda: torch.bmm(ones(0, 3, 5), ones(0, 5, 7)), "bmm.default", 0, 0),
    "addmm without rows": (lambda: torch.addmm(ones(7), ones(0, 5), R), "addmm.default", 0, 0),
    "addmm without rows and with beta 0": (
        lambda: torch.addmm(ones(7), ones(0, 5), R, beta=0),
        "addmm.default",
        0,
        0,
    ),
    # -- copies of a part
    # rows of 5 keep 1 + 2 + 3 elements below the diagonal, 5 + 4 + 3 above it
    "tril": (lambda: A.tril(), "tril.default", F32 * 6, F32 * 15),
    "triu": (lambda: A.triu(), "triu.default", F32 * 12, F32 * 15),
    "tril of a batch, above": (
        lambda: ones(2, 3, 5).tril(1),
        "tril.default",
        F32 * 2 * (2 + 3 + 4),
        F32 * 2 * 15,
    ),
    "triu far below": (lambda: A.triu(-7), "triu.default", F32 * 15, F32 * 15),
    "triu far above": (lambda: A.triu(7), "triu.default", 0, F32 * 15),
    "tril in place": (lambda: ones(3, 5).tril_(), "tril_.default", 0, F32 * 9),
    "triu in place": (lambda: ones(3, 5).triu_(1), "triu_.default", 0, F32 * (1 + 2 + 3)),
    "select_copy": (
        lambda: torch.select_copy(A, 0, 1),
        "select_copy.int",
        F32 * 5,
        F32 * 5,
    ),
    "slice_copy": (
        lambda: torch.slice_copy(A, 0, 1, 3),
        "slice_copy.Tensor",
        F32 * 2 * 5,
        F32 * 2 * 5,
    ),
    "slice_copy into a tensor": (
        lambda: torch.slice_copy(A, 0, 1, 3, out=ones(2, 5)),
        "slice_copy.Tensor_out",
        F32 * 2 * 5,
        F32 * 2 * 5,
    ),
    "split_copy into tensors": (
        lambda: torch.split_copy(A, 2, out=[ones(2, 5), ones(1, 5)]),
        "split_copy.Tensor_out",
        F32 * 3 * 5,
        F32 * 3 * 5,
    ),
    "narrow_copy": (
        lambda: torch.narrow_copy(A, 1, 1, 2),
        "narrow_copy.default",
        F32 * 3 * 2,
        F32 * 3 * 2,
    ),
    "diagonal_copy": (lambda: torch.diagonal_copy(A), "diagonal_copy.default", F32 * 3, F32 * 3),
    "expand_copy": (
        lambda: torch.expand_copy(LINE, [3, 5]),
        "expand_copy.default",
        F32 * 5,
        F32 * 15,
    ),
    "select_scatter": (
        lambda: torch.select_scatter(A, LINE, 0, 1),
        "select_scatter.default",
        F32 * (2 * 5 + 5),
        F32 * 15,
    ),
    "cropping": (
        lambda: F.pad(A, (-2, 0)),
        "constant_pad_nd.default",
        F32 * 3 * 3,
        F32 * 3 * 3,
    ),
    "cropping and padding": (
        lambda: F.pad(A, (-2, 4, 0, -1)),
        "constant_pad_nd.default",
        F32 * 2 * 3,
        F32 * 2 * 7,
    ),
    "padding": (lambda: F.pad(A, (1, 1)), "constant_pad_nd.default", F32 * 15, F32 * 3 * 7),
    # -- written in place
    "batch_norm in training": (
        lambda: batch_norm(True),
        "native_batch_norm.default",
        F32 * (N4 + 4 * 3),
        F32 * (N4 + 2 * 3 + 2 * 3),
    ),
    "batch_norm in evaluation": (
        lambda: batch_norm(False),
        "native_batch_norm.default",
        F32 * (N4 + 4 * 3),
        F32 * N4,
    ),
    "rrelu in training": (
        lambda: aten.rrelu_with_noise(A, ones(3, 5), 0.1, 0.3, True),
        "rrelu_with_noise.default",
        F32 * 15,
        F32 * 2 * 15,
    ),
    "rrelu in evaluation": (
        lambda: aten.rrelu_with_noise(A, ones(3, 5), 0.1, 0.3, False),
        "rrelu_with_noise.default",
        F32 * 15,
        F32 * 15,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_a_call_are_those_of_each_element_touched_once(case: str) -> None:
    call, op, read, written = CASES[case]
    cost = profile_of(call).by_operator()[f"aten.{op}"].cost
    assert cost is not None
    assert (cost.bytes_read, cost.bytes_written) == (read, written)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("train", [True, False])
def test_input_whose_gradient_batch_norm_was_not_asked_for_has_none(
    train: bool, device: str
) -> None:
    """The kernel of the meta device returns one."""
    layer = nn.BatchNorm1d(3, device=device).train(train)
    x = ones(2, 3, 35).to(device)
    cost = profile_of(lambda: layer(x).backward(x)).by_operator()
    backward = cost["aten.native_batch_norm_backward.default"].cost
    assert backward is not None
    assert backward.bytes_written == F32 * (3 + 3)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bytes_of_calls_that_differ_only_in_memory_are_those_of_each_call(device: str) -> None:
    """The same shapes: separate, repeated, expanded, shifted, and in the other order."""
    a, b, line, long = (ones(*size).to(device) for size in ((3, 5), (3, 5), (5,), (6, 5)))
    wide = line.expand(3, 5)
    calls: list[tuple[Callable[[], Any], int]] = [
        (lambda: a + b, 30),
        (lambda: a + a, 15),
        (lambda: a + wide, 20),
        (lambda: wide + a, 20),
        (lambda: wide + wide, 5),
        (lambda: a + b[:, :1].expand(3, 5), 18),
        (lambda: a + b.view(5, 3).t(), 30),
        (lambda: a + a.view(5, 3).t(), 15),
        (lambda: a + a.detach(), 15),
        (lambda: b.detach() + b.view(3, 5), 15),
        (lambda: long[:3] + long[1:4], 20),
        (lambda: long[1:4] + long[:3], 20),
        (lambda: long[:3] + long[2:5], 25),
        (lambda: long[:3] + long[3:6], 30),
        (lambda: long.as_strided((3, 5), (3, 1)) + a, 11 + 15),
        (lambda: long.as_strided((3, 5), (4, 1)) + a, 13 + 15),
    ]
    for order in (calls, calls[::-1]):
        profile = profile_of(lambda: [call() for call, _ in order for _ in range(2)])  # noqa: B023
        cost = profile.by_operator()["aten.add.Tensor"].cost
        assert cost is not None
        assert cost.bytes_read == 2 * F32 * sum(read for _, read in calls)


# -- packed weights: one byte (half precision: two) per element, a float32 bias ---------------

quantized = torch.ops.quantized
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def quint8(*shape: int) -> Tensor:
    return torch.quantize_per_tensor(ones(*shape), 0.1, 0, torch.quint8)


def packed_linear(bias: Tensor | None) -> Any:
    weight = torch.quantize_per_tensor(ones(7, 5), 0.1, 0, torch.qint8)
    return quantized.linear_prepack(weight, bias)


def packed_conv() -> Any:
    weight = torch.quantize_per_tensor(ones(5, 3, 2, 4), 0.1, 0, torch.qint8)
    return quantized.conv2d_prepack(weight, ones(5), [1, 1], [0, 0], [1, 1], 1)


def packed_table(dtype: torch.dtype) -> Any:
    scales, zeros = torch.full((11,), 0.1), torch.zeros(11)
    table = torch.quantize_per_channel(ones(11, 8), scales, zeros, 0, dtype)
    return quantized.embedding_bag_prepack(table)


def dynamic_layer(layer: nn.Module, *size: int, dtype: torch.dtype = torch.qint8) -> Any:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), {type(layer)}, dtype=dtype)
    return model(ones(*size))


PACKED: dict[str, tuple[Callable[[], Any], str, int, int]] = {
    # call, what it computes in, bytes read, bytes written
    "linear": (
        lambda: quantized.linear(quint8(3, 5), packed_linear(ones(7)), 0.1, 0),
        "quint8",
        3 * 5 + 7 * 5 + F32 * 7,
        3 * 7,
    ),
    "linear without a bias": (
        lambda: quantized.linear(quint8(3, 5), packed_linear(None), 0.1, 0),
        "quint8",
        3 * 5 + 7 * 5,
        3 * 7,
    ),
    "linear_dynamic": (
        lambda: quantized.linear_dynamic(ones(3, 5), packed_linear(ones(7))),
        "int8",
        F32 * 3 * 5 + 7 * 5 + F32 * 7,
        F32 * 3 * 7,
    ),
    "linear_dynamic_fp16": (
        lambda: quantized.linear_dynamic_fp16(
            ones(3, 5), quantized.linear_prepack_fp16(ones(7, 5), ones(7))
        ),
        "float32",
        F32 * 3 * 5 + 2 * 7 * 5 + F32 * 7,
        F32 * 3 * 7,
    ),
    "quantized_lstm": (
        lambda: dynamic_layer(nn.LSTM(3, 5, num_layers=2, bidirectional=True), 7, 2, 3),
        "int8",
        # input, one tensor of zeros as both states of 2 layers and 2 directions, weights of each,
        # two biases of each
        F32 * 7 * 2 * 3
        + F32 * 4 * 2 * 5
        + 2 * 4 * 5 * (3 + 5)
        + 2 * 4 * 5 * (2 * 5 + 5)
        + F32 * 2 * 4 * 4 * 5,
        F32 * (7 * 2 * 2 * 5 + 2 * 4 * 2 * 5),
    ),
    "quantized_gru": (
        lambda: dynamic_layer(nn.GRU(3, 5), 7, 2, 3),
        "int8",
        F32 * (7 * 2 * 3 + 2 * 5) + 3 * 5 * (3 + 5) + F32 * 2 * 3 * 5,
        F32 * (7 * 2 * 5 + 2 * 5),
    ),
    "quantized_gru in float16": (
        lambda: dynamic_layer(nn.GRU(3, 5), 7, 2, 3, dtype=torch.float16),
        "float32",
        F32 * (7 * 2 * 3 + 2 * 5) + 2 * 3 * 5 * (3 + 5) + F32 * 2 * 3 * 5,
        F32 * (7 * 2 * 5 + 2 * 5),
    ),
    "quantized_lstm_cell_dynamic": (
        lambda: dynamic_layer(nn.LSTMCell(3, 5), 2, 3),
        "int8",
        F32 * (2 * 3 + 2 * 5) + 4 * 5 * (3 + 5) + F32 * 2 * 4 * 5,
        F32 * 2 * 2 * 5,
    ),
    "quantized_gru_cell_dynamic in float16": (
        lambda: dynamic_layer(nn.GRUCell(3, 5), 2, 3, dtype=torch.float16),
        "float32",
        F32 * (2 * 3 + 2 * 5) + 2 * 3 * 5 * (3 + 5) + F32 * 2 * 3 * 5,
        F32 * 2 * 5,
    ),
    "quantized_rnn_tanh_cell_dynamic": (
        lambda: dynamic_layer(nn.RNNCell(3, 5), 2, 3),
        "int8",
        F32 * (2 * 3 + 2 * 5) + 5 * (3 + 5) + F32 * 2 * 5,
        F32 * 2 * 5,
    ),
    # 3 rows of 8 numbers, each row with a float32 scale and offset
    "embedding_byte": (
        lambda: quantized.embedding_byte(packed_table(torch.quint8), longs(3)),
        "float32",
        I64 * 3 + 3 * (8 + 2 * F32),
        F32 * 3 * 8,
    ),
    # with float16 ones
    "embedding_4bit": (
        lambda: quantized.embedding_4bit(packed_table(torch.quint4x2), longs(3)),
        "float32",
        I64 * 3 + 3 * (8 // 2 + 2 * 2),
        F32 * 3 * 8,
    ),
    "embedding_byte of more than there is": (
        lambda: quantized.embedding_byte(packed_table(torch.quint8), longs(13)),
        "float32",
        I64 * 13 + 11 * (8 + 2 * F32),
        F32 * 13 * 8,
    ),
    "embedding_bag_byte": (
        lambda: quantized.embedding_bag_byte(packed_table(torch.quint8), longs(5), longs(2)),
        "float32",
        I64 * (5 + 2) + 5 * (8 + 2 * F32),
        F32 * 2 * 8,
    ),
    "embedding_bag_2bit_rowwise_offsets": (
        lambda: quantized.embedding_bag_2bit_rowwise_offsets(
            quantized.embedding_bag_2bit_prepack(ones(11, 8)), longs(5), longs(2)
        ),
        "float32",
        I64 * (5 + 2) + 5 * (8 // 4 + 2 * 2),
        F32 * 2 * 8,
    ),
    "conv2d": (
        lambda: quantized.conv2d(quint8(2, 3, 8, 9), packed_conv(), 0.1, 0),
        "quint8",
        X_SIZE + W_SIZE + F32 * 5,
        GRAD_SIZE,
    ),
    "conv2d_dynamic": (
        lambda: quantized.conv2d_dynamic(ones(2, 3, 8, 9), packed_conv()),
        "int8",
        F32 * X_SIZE + W_SIZE + F32 * 5,
        F32 * GRAD_SIZE,
    ),
}


@pytest.mark.parametrize("case", PACKED)
def test_bytes_of_a_quantised_layer_include_its_packed_weight(case: str) -> None:
    call, dtype, read, written = PACKED[case]
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("needs a packing engine")
    name = case.split()[0]
    (op,) = [op for op in profile_of(call).op_totals() if op.op.split(".")[1] == name]
    assert op.cost is not None
    assert op.dtype == dtype
    assert (op.cost.bytes_read, op.cost.bytes_written) == (read, written)


def test_peak_of_every_quantised_dtype_is_that_of_int8() -> None:
    machine = next(m for m in MACHINES.values() if m.peak("int8"))
    for dtype in ("quint8", "qint8", "uint8"):
        assert machine.peak(dtype) == machine.peak("int8")
