"""Columns of plans of generation."""

from __future__ import annotations

import pytest

from dispatch_flops.renderers.plan_texts import range_text


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        ((0.32283, 0.53041), "0.323 to 0.53"),
        ((0.25, 0.25), "0.25"),
        ((0.5, 1500.0), "0.5 to 1.5 K"),
        ((0.0, 1.0), "0 to 1"),
        ((1.0, None), "n/a"),
    ],
)
def test_rates_below_1_have_no_prefix(rates: tuple[float | None, float | None], text: str) -> None:
    assert range_text(rates) == text
