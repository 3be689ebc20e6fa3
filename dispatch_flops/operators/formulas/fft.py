"""Discrete Fourier transforms.

A complex transform of length n costs 5 n log2 n FLOPs: the radix-2 algorithm of Cooley and
Tukey makes log2 n passes of n/2 butterflies, each one complex product (6 FLOPs) and two
complex sums (2 each): 10 * n/2 * log2 n. A transform from or to real numbers costs half of
that, because half of the spectrum is the conjugate of the other. (Van Loan, Computational
Frameworks for the Fast Fourier Transform, sections 1.2 and 4.3.) As in every FFT benchmark, the
same count, rounded to the nearest integer per transform, is used for lengths that are not a power
of two.

No MACs: a fast Fourier transform is not computed as a contraction. ``stft``, ``istft`` and all of
``torch.fft`` reduce to the three operators below.

Letters: n length of one transform, rows how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.profile.cost import OpCost, flops

Tensor = torch.Tensor

FLOPS_PER_POINT_AND_PASS = 5


@register_flops(ops("_fft_c2c"))
def fft_c2c(
    self: Tensor, dim: Sequence[int], normalization: int, *_: Any, out: Tensor, **__: Any
) -> OpCost:
    """Complex to complex over the dimensions ``dim``.

    FLOPs: 5 n log2 n for each row of each dimension, + 2 per element (scaling by a real).
    """
    return flops(complex_passes(self.shape, dim) + scaling(2 * self.numel(), normalization))


@register_flops(ops("_fft_r2c"))
def fft_r2c(
    self: Tensor, dim: Sequence[int], normalization: int, *_: Any, out: Tensor, **__: Any
) -> OpCost:
    """Real to complex: the last of ``dim`` is the real one, the others are complex.

    FLOPs: 2.5 n log2 n for each real row; the others run on half a spectrum, n//2 + 1 long;
    + 2 per element of that half (scaling). Filling a two-sided result with conjugates is free.
    """
    half = halved(self.shape, dim[-1])
    return flops(
        real_pass(self.shape, dim[-1])
        + complex_passes(half, dim[:-1])
        + scaling(2 * prod(half), normalization)
    )


@register_flops(ops("_fft_c2r"))
def fft_c2r(
    self: Tensor, dim: Sequence[int], normalization: int, *_: Any, out: Tensor, **__: Any
) -> OpCost:
    """Complex (half a spectrum) to real: ``_fft_r2c`` backwards, the real dimension last.

    FLOPs: as ``_fft_r2c`` for the same real shape; scaling is 1 per real element.
    """
    half = halved(out.shape, dim[-1])
    return flops(
        complex_passes(half, dim[:-1])
        + real_pass(out.shape, dim[-1])
        + scaling(out.numel(), normalization)
    )


@register_flops(ops("fft_fftfreq", "fft_rfftfreq"))
def fft_freq(*_args: Any, out: Tensor, **_: Any) -> OpCost:
    """One product per element: an integer times 1/(n·d)."""
    return flops(out.numel())


def complex_passes(shape: Sequence[int], dims: Sequence[int]) -> int:
    """FLOPs of complex transforms along each of ``dims`` in turn."""
    return sum(rows(shape, dim) * transform(shape[dim]) for dim in dims)


def real_pass(shape: Sequence[int], dim: int) -> int:
    """FLOPs of transforms between real numbers of this shape and half a spectrum."""
    return rows(shape, dim) * transform(shape[dim], halves=1)


def transform(n: int, halves: int = 2) -> int:
    """FLOPs of one transform: both halves for complex, one for real numbers."""
    return round(halves * FLOPS_PER_POINT_AND_PASS * n * math.log2(n) / 2) if n > 1 else 0


def rows(shape: Sequence[int], dim: int) -> int:
    """Number of transforms along ``dim``."""
    return prod(shape) // shape[dim] if shape[dim] else 0


def halved(shape: Sequence[int], dim: int) -> list[int]:
    """The shape of the half spectrum of real numbers of this shape."""
    half = list(shape)
    half[dim] = half[dim] // 2 + 1
    return half


def scaling(real_numbers: int, normalization: int) -> int:
    """FLOPs of the factor 1/n or 1/sqrt(n); normalisation mode 0 has none."""
    return real_numbers if normalization else 0
