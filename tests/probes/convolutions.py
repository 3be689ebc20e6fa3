"""Convolutions: x[2,6,8,9], weight[10,6,3,2] gives [2,10,6,8], unless stated otherwise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import conv2d as conv2d_bound_early
from torch import nn

from tests.probes.probe import layer, of, op

X, W = (2, 6, 8, 9), (10, 6, 3, 2)
PLAIN = (2, 10, 6, 8, 6, 3, 2)

PROBES = (
    op("F.conv2d", lambda x, w: F.conv2d(x, w), of(X, W), PLAIN),
    op("F.conv2d(input=, weight=)", lambda x, w: F.conv2d(input=x, weight=w), of(X, W), PLAIN),
    op("torch.conv2d, bound before", conv2d_bound_early, of(X, W), PLAIN),
    layer(
        "nn.Conv2d",
        lambda: nn.Conv2d(6, 10, (3, 2)),
        of(X),
        PLAIN,
        note="the bias is not a MAC: one addition for each output",
    ),
    op(
        "F.conv2d, unbatched",
        lambda x, w: F.conv2d(x, w),
        of(X[1:], W),
        (10, 6, 8, 6, 3, 2),
    ),
    op(
        "F.conv2d(padding=[1, 2])",
        lambda x, w: F.conv2d(x, w, padding=[1, 2]),
        of(X, W),
        (2, 10, 8, 12, 6, 3, 2),
    ),
    op(
        "F.conv2d(stride=[2, 1])",
        lambda x, w: F.conv2d(x, w, stride=[2, 1]),
        of(X, W),
        (2, 10, 3, 8, 6, 3, 2),
    ),
    op(
        "F.conv2d(dilation=(2, 3))",
        lambda x, w: F.conv2d(x, w, dilation=(2, 3)),
        of(X, W),
        (2, 10, 4, 6, 6, 3, 2),
    ),
    op(
        "F.conv2d(padding='same'), even kernel",
        lambda x, w: F.conv2d(x, w, padding="same"),
        of(X, (10, 6, 3, 4)),
        (2, 10, 8, 9, 6, 3, 4),
        note="the output is as large as the input, 8·9: the peer derives a smaller one",
    ),
    op(
        "F.conv2d(groups=2)",
        lambda x, w: F.conv2d(x, w, groups=2),
        of(X, (10, 3, 3, 2)),
        (2, 10, 6, 8, 3, 3, 2),
    ),
    op(
        "F.conv2d, depthwise",
        lambda x, w: F.conv2d(x, w, groups=6),
        of(X, (6, 1, 3, 2)),
        (2, 6, 6, 8, 1, 3, 2),
    ),
    op("F.conv1d", lambda x, w: F.conv1d(x, w), of((2, 6, 9), (10, 6, 4)), (2, 10, 6, 6, 4)),
    op(
        "F.conv3d",
        lambda x, w: F.conv3d(x, w),
        of((2, 3, 5, 8, 9), (7, 3, 2, 3, 4)),
        (2, 7, 4, 6, 6, 3, 2, 3, 4),
    ),
    op(
        "torch.conv_tbc",
        lambda x, w, b: torch.conv_tbc(x, w, b),
        of((9, 2, 6), (4, 6, 10), (10,)),
        (6, 2, 10, 4, 6),
    ),
    op(
        "F.conv_transpose2d(stride=2)",
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        of(X, (6, 10, 3, 2)),
        (2, 6, 8, 9, 10, 3, 2),
        note="each input element meets every tap once: the input's size counts, not the output's",
    ),
    op(
        "F.conv_transpose2d(groups=2)",
        lambda x, w: F.conv_transpose2d(x, w, groups=2),
        of(X, (6, 5, 3, 2)),
        (2, 6, 8, 9, 5, 3, 2),
        note="each input element meets the taps of its own group alone",
    ),
    layer(
        "nn.ConvTranspose1d",
        lambda: nn.ConvTranspose1d(6, 10, 4, stride=3, bias=False),
        of((2, 6, 9)),
        (2, 6, 9, 10, 4),
        note="the input's size counts, not the output's",
    ),
    op(
        "F.unfold, torch.matmul",
        lambda x, w: torch.matmul(w.flatten(1), F.unfold(x, (3, 2))),
        of(X, W),
        PLAIN,
        note="one weight for both items: 2 products, the peer's formula has the left's batch",
    ),
)
