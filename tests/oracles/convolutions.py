"""Definitions of convolution and transposed convolution, tap by tap.

x is (N, Cin, *S) or unbatched (Cin, *S); stride, padding, dilation have one entry per
spatial dimension. The whole window is counted, even over padding: padding is part of the input
(and of its gradient, which is cropped afterwards).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.oracles.counting import ZERO, Array, Number, dot, fill


def convolution(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
    groups: int = 1,
) -> Array:
    """y[n,o,p] = sum over c of o's group and taps t of x[n,c, p*stride + t*dilation] w[o,c,t]."""
    kernel = weight.shape[2:]
    if x.ndim == len(kernel) + 1:
        y = convolution(
            x[None], weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups
        )
        return y[0]
    x = pad(
        x,
        [_around(padding, k, d, i) for i, (k, d) in enumerate(zip(kernel, dilation, strict=True))],
    )
    outs, per_group = weight.shape[0], weight.shape[1]
    size = [
        (s - d * (k - 1) - 1) // step + 1
        for s, k, d, step in zip(x.shape[2:], kernel, dilation, stride, strict=True)
    ]

    def cell(n: int, o: int, *place: int) -> Any:
        first = (o // (outs // groups)) * per_group
        total = dot(
            (x[(n, first + c, *_at(place, tap, stride, dilation))], weight[(o, c, *tap)])
            for c in range(per_group)
            for tap in np.ndindex(*kernel)
        )
        return total if bias is None else total + bias[o]

    return fill((x.shape[0], outs, *size), cell)


def transposed_convolution(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
) -> Array:
    """Every x[n,c,p] w[c,o,t] is added to y[n,o, p*stride + t*dilation]; then the padding is
    cut off, except for ``output_padding`` rows."""
    kernel = weight.shape[2:]
    if x.ndim == len(kernel) + 1:
        return transposed_convolution(
            x[None],
            weight,
            bias,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            dilation=dilation,
            groups=groups,
        )[0]
    ins, outs = x.shape[1], weight.shape[1]
    full = [
        (s - 1) * step + d * (k - 1) + 1 + extra
        for s, k, d, step, extra in zip(
            x.shape[2:], kernel, dilation, stride, output_padding, strict=True
        )
    ]
    y = fill((x.shape[0], outs * groups, *full), lambda *_: ZERO)
    for n, c, *place in np.ndindex(*x.shape):
        group = c // (ins // groups)
        for o, *tap in np.ndindex(*weight.shape[1:]):
            target = (n, group * outs + o, *_at(place, tap, stride, dilation))
            y[target] = y[target].fma(x[(n, c, *place)], weight[(c, o, *tap)])
    y = y[(..., *(slice(p, f - p) for p, f in zip(padding, full, strict=True)))]
    return y if bias is None else fill(y.shape, lambda *i: y[i] + bias[i[1]])


def pad(x: Array, around: Sequence[tuple[int, int]]) -> Array:
    """Pad x with zeros, ``(before, after)`` per spatial dimension."""
    first = x.reshape(-1)[0] if x.size else ZERO
    zero = Number(0.0, first.counts, first.needs)
    shape = [s + a + b for s, (a, b) in zip(x.shape[2:], around, strict=True)]
    out = fill((*x.shape[:2], *shape), lambda *_: zero)
    out[(..., *(slice(a, a + s) for s, (a, _) in zip(x.shape[2:], around, strict=True)))] = x
    return out


def _at(
    place: Sequence[int], tap: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    return [p * s + t * d for p, t, s, d in zip(place, tap, stride, dilation, strict=True)]


def _around(padding: Sequence[int] | str, k: int, d: int, dim: int) -> tuple[int, int]:
    if padding == "valid":
        return 0, 0
    if padding == "same":
        total = d * (k - 1)
        return total // 2, total - total // 2
    return int(padding[dim]), int(padding[dim])
