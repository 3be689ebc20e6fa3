"""Formatting numbers with units, and parsing them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch_flops import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.count_text(61_706), "61.71 K"),
        (units.count_text(5), "5"),
        (units.count_text(999_999), "1 M"),  # never 1000 K
        (units.count_text(999_994), "999.99 K"),
        (units.count_text(-1_500), "-1.5 K"),
        (units.count_text(3 * 10**18), "3 E"),
        (units.params_text(1_300_000_000), "1.3 B"),
        (units.macs_text(4_089_184_256), "4.09 GMACs"),
        (units.macs_text(0), "0 MACs"),
        (units.flops_text(1_200_000_000), "1.2 GFLOPs"),
        (units.flops_per_s_text(4.1e12), "4.1 TFLOP/s"),
        (units.flops_text(314 * 10**21), "314 ZFLOPs"),
        (units.count_text(999_995 * 10**18), "1 Y"),
        (units.flops_per_s_text(5.737e168), "5.74e+144 YFLOP/s"),
        (units.number_text(-1.5e21), "-1.50e+21"),
        (units.bytes_text(1_500_000), "1.5 MB"),
        (units.seconds_text(0.21668), "216.68 ms"),
        (units.seconds_text(1.5e-8), "15 ns"),
        (units.seconds_text(0.0), "0 s"),
        (units.seconds_text(4e-12), "<0.01 ns"),  # not quite 0: 12 bytes at 3 TB/s
        (units.fraction_text(0.8215), "82.15%"),
        (units.fraction_text(1e-9), "<0.01%"),
        (units.fraction_text(0), "0%"),
        (units.percent_text(1, 3), "33.33%"),
        (units.percent_text(0, 3), "0%"),
        (units.percent_text(3, 3), "100%"),
        (units.percent_text(0, 0), "n/a"),
        (units.percent_text(None, 3), "n/a"),
        (units.change_text(200, 250), "+25%"),
        (units.change_text(8, 7), "-12.5%"),
        (units.change_text(5, 5), "0%"),
        (units.change_text(0, 0), "0%"),
        (units.change_text(0, 5), "n/a"),
        (units.number_text(6134.2749), "6134.27"),
        (units.number_text(-0.001), "0"),
    ],
)
def test_text_functions_format_with_prefix_and_unit(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    "name",
    [n for n in dir(units) if n.endswith("_text") and not n.startswith("_")],
)
def test_text_of_none_is_not_available(name: str) -> None:
    two = name in ("percent_text", "change_text")
    assert getattr(units, name)(*([None, None] if two else [None])) == "n/a"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4.2G", 4_200_000_000),
        ("30M", 30_000_000),
        ("30m", 30_000_000),
        ("7B", 7_000_000_000),
        ("1e9", 10**9),
        ("1.5e3K", 1_500_000),
        ("1_000", 1_000),
        ("61,706", 61_706),
        (" 426.51648 MMACs ", 426_516_480),
        ("1.2 GFLOPs", 1_200_000_000),
        (".5k", 500),
        ("0", 0),
        ("3.14 ZFLOPs", 314 * 10**19),
        ("2Y", 2 * 10**24),
        ("0.1e1", 1),
        ("9007199254740993", 2**53 + 1),  # more than a float holds
    ],
)
def test_parse_count_returns_the_exact_count(text: str, count: int) -> None:
    assert units.parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "many", "-5", "4.2", "1.0001K", "4 GB/s", "nan", "G", "1 2", "1,5G"]
)
def test_parse_count_of_other_text_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not a "):
        units.parse_count(text)


@given(st.integers(0, 10**26))
def test_count_text_is_within_half_a_digit_of_the_count(count: int) -> None:
    digits, _, prefix = units.count_text(count).partition(" ")
    power = {"": 0, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18, "Z": 21, "Y": 24}[prefix]
    assert abs(float(digits) * 10**power - count) <= 0.0051 * 10**power
    assert float(digits) < 1000


def test_small_change_is_not_formatted_as_0() -> None:
    assert units.change_text(1_000_000, 999_990) == "-<0.01%"
    assert units.change_text(999_990, 1_000_000) == "+<0.01%"
    assert units.change_text(200, 150) == "-25%"
    assert units.number_text(0.0047) == "<0.01"
    assert units.number_text(0.0) == "0"


@pytest.mark.parametrize(
    ("text", "count"),
    [("1.09 KB", 1090), ("1.5GB", 1_500_000_000), ("64 bytes", 64), ("7B", 7 * 10**9)],
)
def test_parse_count_accepts_bytes(text: str, count: int) -> None:
    assert units.parse_count(text) == count


@pytest.mark.parametrize("text", ["1e3000", "9" * 50, "1e-3", "-5"])
def test_parse_count_of_absurd_sizes_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not a "):
        units.parse_count(text)


def test_ratio_beyond_a_float_is_none() -> None:
    assert units.ratio(3, 4) == 0.75
    assert units.ratio(4, 2.0**-1074) is None  # would be infinite
    assert units.ratio(10**400, 3) is None
    assert units.ratio(float("nan"), 3) is None
    assert units.ratio(3, 0) is None
    assert units.ratio(None, 3) is None


def test_mean_is_exact_where_it_is_whole_and_beyond_a_float() -> None:
    assert (units.mean(7, 2), units.mean(2**60, 2)) == (3.5, 2**59)
    assert units.mean(3 * 10**400, 3) == 10**400
    assert units.mean(10**400, 3) == 10**400 // 3


def test_one_call_is_not_several() -> None:
    assert [units.calls_text(calls) for calls in (0, 1, 2)] == ["0 calls", "1 call", "2 calls"]
    assert [units.times_text(count) for count in (1, 2)] == ["once", "2 times"]
