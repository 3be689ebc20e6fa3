"""Sequences and windows in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.profiling import profile_of


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda: torch.arange(7.0), 0),
        (lambda: torch.linspace(0, 1, 7), 5 * 7),
        (lambda: torch.linspace(0, 1, 1), 0),
        (lambda: torch.linspace(0, 9, 7, dtype=torch.int64), 0),
        (lambda: torch.logspace(0, 1, 7), 6 * 7),
        # a comparison of i with N/2, two products of 6, two sums of 2; then a power of 17
        (lambda: torch.linspace(0, 1j, 7), (1 + 2 * 6 + 2 * 2) * 7),
        (lambda: torch.logspace(0, 1j, 7), (1 + 2 * 6 + 2 * 2 + 17) * 7),
        (lambda: torch.hann_window(7), 4 * (7 + 1)),
        (lambda: torch.hann_window(7, periodic=False), 4 * 7),
        (lambda: torch.hann_window(1), 0),
        (lambda: torch.hamming_window(7), 4 * (7 + 1)),
        (lambda: torch.hamming_window(7, False, 0.5, 0.5), 4 * 7),
        (lambda: torch.blackman_window(7, periodic=False), 9 * 7),
        (lambda: torch.bartlett_window(7, periodic=False), 7 + 2 * 3),
        (lambda: torch.bartlett_window(7), 8 + 2 * 4),
        (lambda: torch.kaiser_window(7, periodic=False), 8 * 7),
    ],
)
def test_sequence_or_window_matches_closed_form(fn: Any, expected: int) -> None:
    assert profile_of(fn, strict=True).total().flops == expected
