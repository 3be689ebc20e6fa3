"""Kernels that conjugate lazily return what they do without the counter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from dispatch_flops import FlopCounterMode
from tests.helpers.allocator import allocations

ROWS, COLUMNS = 13, 7


def signal() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, COLUMNS, dtype=torch.complex128, generator=generator)


@pytest.mark.parametrize("transform", [torch.fft.hfft, torch.fft.hfft2, torch.fft.hfftn])
def test_hermitian_transforms_in_inference_mode_are_those_without_a_counter(
    transform: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = signal()
    expected = transform(x)
    with torch.inference_mode(), FlopCounterMode(display=False, memory=True):
        torch.testing.assert_close(transform(x), expected)


def test_pseudoinverse_of_complex_numbers_solves_its_equations() -> None:
    x = signal()
    with FlopCounterMode(display=False):
        inverse = torch.linalg.pinv(x)
    torch.testing.assert_close(x @ inverse @ x, x)


def test_peak_has_the_conjugate_of_a_transform_in_inference_mode() -> None:
    x = signal()
    with torch.inference_mode():
        truth = max(accumulate(allocations(lambda: torch.fft.hfft2(x))))
        with FlopCounterMode(display=False, memory=True) as counter:
            x.detach()  # is met, and counts as there before
            torch.fft.hfft2(x)
    memory = counter.profile.memory
    assert memory is not None
    assert memory.peak_bytes == x.nbytes + truth
