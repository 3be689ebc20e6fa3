"""Fourier transforms: butterflies counted one by one, and products of rows."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from dispatch_flops.operators.formulas.fft import transform
from tests.helpers.profiling import profile_of


class Butterflies:
    """The radix-2 transform, counting complex products (6 FLOPs) and sums (2 FLOPs)."""

    def __init__(self) -> None:
        self.flops = 0

    def run(self, x: list[complex]) -> list[complex]:
        if len(x) == 1:
            return x
        even, odd = self.run(x[::2]), self.run(x[1::2])
        out = [0j] * len(x)
        for k in range(len(x) // 2):
            twisted = cmath.exp(-2j * cmath.pi * k / len(x)) * odd[k]
            out[k], out[k + len(x) // 2] = even[k] + twisted, even[k] - twisted
            self.flops += 6 + 2 + 2
        return out


def fft_flops(fn: object, *args: object) -> int:
    total = profile_of(fn, *args).total()  # type: ignore[arg-type]
    assert total.macs == 0
    return total.flops


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_transform_matches_radix_two_butterflies(n: int) -> None:
    x = torch.randn(n, dtype=torch.complex64)
    counted = Butterflies()
    values = torch.tensor(counted.run(x.tolist()))
    assert torch.allclose(values, torch.fft.fft(x), atol=1e-4)
    assert fft_flops(torch.fft.fft, x) == counted.flops


def test_transform_counts_rows_of_each_dimension() -> None:
    x = torch.zeros(3, 4, 8, dtype=torch.complex64)
    along_8, along_4 = 5 * 8 * 3, 5 * 4 * 2
    assert fft_flops(torch.fft.fft, x) == 3 * 4 * along_8
    assert fft_flops(torch.fft.fft2, x) == 3 * (4 * along_8 + 8 * along_4)


def test_transform_of_reals_is_half_both_ways() -> None:
    x = torch.zeros(3, 4, 8)
    real, other = 5 * 8 * 3 // 2, 5 * 4 * 2
    assert fft_flops(torch.fft.rfft, x) == 3 * 4 * real
    assert fft_flops(torch.fft.rfft2, x) == 3 * (4 * real + 5 * other)  # 8//2 + 1 columns left
    spectrum = torch.zeros(3, 4, 5, dtype=torch.complex64)
    scaled = 3 * 4 * 8  # "backward" normalisation divides the real result by n
    assert fft_flops(lambda: torch.fft.irfft2(spectrum, s=(4, 8))) == (
        3 * (4 * real + 5 * other) + scaled
    )


def test_transform_with_normalisation_scales_each_real_number() -> None:
    x = torch.zeros(3, 8, dtype=torch.complex64)
    plain = 3 * 5 * 8 * 3
    assert fft_flops(lambda: torch.fft.fft(x, norm="ortho")) == plain + 2 * 3 * 8
    assert fft_flops(torch.fft.ifft, x) == plain + 2 * 3 * 8
    half = 3 * (8 // 2 + 1)
    assert fft_flops(lambda: torch.fft.rfft(x.real, norm="ortho")) == plain // 2 + 2 * half


@pytest.mark.parametrize("n", [3, 5, 7, 12, 1000])
def test_transform_of_other_lengths_is_rounded_per_row(n: int) -> None:
    exact = 5 * n * math.log2(n)
    assert abs(transform(n) - exact) <= 0.5
    assert abs(transform(n, halves=1) - exact / 2) <= 0.5
    assert fft_flops(torch.fft.fft, torch.zeros(7, n, dtype=torch.complex64)) == 7 * transform(n)


def test_stft_is_a_window_and_real_transforms() -> None:
    x, window = torch.zeros(32), torch.ones(8)
    frames = (32 - 8) // 4 + 1
    counted = fft_flops(
        lambda: torch.stft(x, 8, 4, window=window, center=False, return_complex=True)
    )
    assert counted == frames * (8 + 5 * 8 * 3 // 2)


def test_transform_backward_is_one_transform() -> None:
    x = torch.zeros(8, dtype=torch.complex64, requires_grad=True)
    profile = profile_of(lambda: torch.fft.fft(x).backward(torch.zeros(8, dtype=torch.complex64)))
    assert profile.total("forward").flops == 5 * 8 * 3
    assert profile.total("backward").flops == 5 * 8 * 3


def test_transform_on_meta_counts_as_on_cpu() -> None:
    x = torch.zeros(3, 8, device="meta", dtype=torch.complex64)
    assert fft_flops(torch.fft.fft, x) == 3 * 5 * 8 * 3
