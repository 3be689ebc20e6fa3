"""Forward and backward: every contraction, and one more product per needed gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.probes.attention import SCORES, K, Q
from tests.probes.convolutions import PLAIN, W, X
from tests.probes.probe import layer, of, op

OWN_PHASE = "recomputation does not belong to the model's work: it is a separate phase"


def _frozen() -> nn.Module:
    return nn.Linear(5, 7).requires_grad_(False)


def _recomputed(a: torch.Tensor, b: torch.Tensor) -> Any:
    return checkpoint(lambda a, b: torch.mm(a, b).sin(), a, b, use_reentrant=False)


def _grad(*shapes: tuple[int, ...]) -> Any:
    return of(*shapes, grad=True)


PROBES = (
    op(
        "torch.mm",
        lambda a, b: torch.mm(a, b),
        _grad((3, 5), (5, 7)),
        (3, 3, 5, 7),
        backward=True,
    ),
    op(
        "torch.mv",
        lambda a, b: torch.mv(a, b),
        _grad((3, 5), (5,)),
        (2, 3, 5),
        backward=True,
        note="the matrix's gradient is an outer product, no MACs; the vector's is 3·5",
    ),
    op(
        "torch.bmm",
        lambda a, b: torch.bmm(a, b),
        _grad((11, 3, 5), (11, 5, 7)),
        (3, 11, 3, 5, 7),
        backward=True,
    ),
    op(
        "torch.addbmm",
        lambda c, a, b: torch.addbmm(c, a, b),
        _grad((3, 7), (11, 3, 5), (11, 5, 7)),
        (3, 11, 3, 5, 7),
        backward=True,
        note="the backward is by bmm, which torch counts; the forward it has no formula for",
    ),
    op(
        "torch.einsum",
        lambda a, b: torch.einsum("ij,jk->ik", a, b),
        _grad((3, 5), (5, 7)),
        (3, 3, 5, 7),
        backward=True,
    ),
    layer(
        "nn.Linear, frozen",
        _frozen,
        _grad((3, 5)),
        (2, 3, 5, 7),
        backward=True,
        note="one gradient is needed, x's: 2 products; calflops assumes 3",
    ),
    layer(
        "nn.Linear, first layer",
        lambda: nn.Linear(5, 7),
        of((3, 5)),
        (2, 3, 5, 7),
        backward=True,
        note="one gradient is needed, the weight's: 2 products; calflops assumes 3",
    ),
    op(
        "F.conv2d",
        lambda x, w: F.conv2d(x, w),
        _grad(X, W),
        (3, *PLAIN),
        backward=True,
    ),
    op(
        "F.conv2d, depthwise",
        lambda x, w: F.conv2d(x, w, groups=6),
        _grad(X, (6, 1, 3, 2)),
        (3, 2, 6, 6, 8, 3, 2),
        backward=True,
        note="each gradient is one more, with any groups: torch forgets the groups in one",
    ),
    op(
        "F.conv_transpose2d(stride=2, groups=2)",
        lambda x, w: F.conv_transpose2d(x, w, stride=2, groups=2),
        _grad(X, (6, 5, 3, 2)),
        (3, 2, 6, 8, 9, 5, 3, 2),
        backward=True,
        note="each gradient is one more: torch forgets the groups in one, calflops misjudges the "
        "forward",
    ),
    op(
        "F.sdpa",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        _grad(Q, K, K),
        (6, *SCORES),
        backward=True,
        note=OWN_PHASE,
    ),
    layer(
        "nn.LSTM",
        lambda: nn.LSTM(5, 7),
        _grad((3, 2, 5)),
        (3, 3, 2, 4 * 7, 5 + 7),
        backward=True,
    ),
    op(
        "F.bilinear",
        lambda x, y, w: F.bilinear(x, y, w),
        _grad((2, 3), (2, 5), (7, 3, 5)),
        (2, 7, 3, 5),  # Σ_i x·w for each of 7 outputs
        (2, 7, 5),  # Σ_j of that and y
        (2, 2, 7, 3, 5),  # to x: gradient·w spread over i and j, then Σ_j with y
        (2, 7, 3),  # to w: x·gradient spread over i
        (2, 7, 3, 5),  # and Σ over the batch with y
        (2, 7, 3, 5),  # to y: Σ_i x·w
        (2, 7, 5),  # and Σ over outputs with the gradient
        backward=True,
    ),
    op(
        "checkpoint of torch.mm",
        _recomputed,
        _grad((3, 5), (5, 7)),
        (3, 3, 5, 7),
        backward=True,
        note=OWN_PHASE,
    ),
)
