"""DeepSpeed's own number formats."""

from __future__ import annotations

import pytest

from dispatch_flops.renderers.deepspeed import units


@pytest.mark.parametrize(
    ("number", "text"),
    [
        # printed by DeepSpeed 0.19.8
        (866_076_672, "866.08 M"),
        (61_706, "61.71 K"),
        (850, "850 "),
        (0, "0 "),
        (4_000_000_000, "4 G"),
        (999_999, "1000 K"),  # the prefix is chosen before rounding
        (5e12, "5 T"),
        (0.21668, "216.68 m"),
        (0.0000627, "62.7 u"),
        (1e-9, "0 u"),
    ],
)
def test_number_to_string_rounds_as_deepspeed_prints(number: float, text: str) -> None:
    assert units.number_to_string(number) == text


def test_to_string_functions_append_their_unit() -> None:
    assert units.macs_to_string(426_516_480) == "426.52 MMACs"
    assert units.macs_to_string(0) == "0 MACs"
    assert units.flops_to_string(3.997e9) == "4 GFLOPS"
    assert units.flops_to_string(0) == "0 FLOPS"
    assert units.params_to_string(61_706) == "61.71 K"
    assert units.params_to_string(850) == "850"
    assert units.params_to_string(1_300_000_000) == "1.3 B"
    assert units.duration_to_string(0.21668) == "216.68 ms"
    assert units.duration_to_string(0.0000627) == "62.7 us"
    assert units.duration_to_string(3) == "3 s"


def test_to_string_functions_take_prefix_and_precision() -> None:
    assert units.number_to_string(61_706, "M", 4) == "0.0617 M"
    assert units.number_to_string(61_706, units="K", precision=0) == "62 K"
    assert units.number_to_string(7, "") == "7 "
    assert units.params_to_string(61_706_000, units="B", precision=3) == "0.062 B"
    assert units.macs_to_string(5_000, units="M", precision=3) == "0.005 MMACs"


@pytest.mark.parametrize("name", [name for name in dir(units) if name.endswith("_to_string")])
def test_to_string_of_none_is_not_available(name: str) -> None:
    assert getattr(units, name)(None) == "n/a"
