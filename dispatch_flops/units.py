"""Format numbers with units, and parse them.

A count names what is counted (``GFLOPs``, ``GMACs``); a rate has a slash (``TFLOP/s``). ``None``
means "not known" and is written ``n/a``. Prefixes are powers of 1000, for bytes too.
DeepSpeed's own number formats are in ``renderers.deepspeed.units``.
"""

from __future__ import annotations

import math
import re
import sys
from decimal import Decimal
from typing import Final

NOT_AVAILABLE: Final = "n/a"
DEFAULT_PRECISION: Final = 2

Number = int | float

_LARGE: Final = ("", "K", "M", "G", "T", "P", "E", "Z", "Y")
_SMALL: Final = ("", "m", "u", "n")
_TOO_LONG: Final = 1e21  # to write out


# -- numbers to text ----------------------------------------------------------------------------


def count_text(count: Number | None) -> str:
    """Format a count: ``61706 -> "61.71 K"``, ``5 -> "5"``."""
    return NOT_AVAILABLE if count is None else _scaled(count).rstrip()


def params_text(params: Number | None) -> str:
    """Format parameters, in billions instead of giga: ``1_300_000_000 -> "1.3 B"``."""
    return count_text(params).replace("G", "B")


def macs_text(macs: Number | None) -> str:
    """Format multiply-accumulates: ``4_089_184_256 -> "4.09 GMACs"``."""
    return NOT_AVAILABLE if macs is None else f"{_scaled(macs)}MACs"


def flops_text(flops: Number | None) -> str:
    """Format a count of FLOPs: ``1_200_000_000 -> "1.2 GFLOPs"``."""
    return NOT_AVAILABLE if flops is None else f"{_scaled(flops)}FLOPs"


def flops_per_s_text(flops_per_s: float | None) -> str:
    """Format a rate: ``4.1e12 -> "4.1 TFLOP/s"``."""
    return NOT_AVAILABLE if flops_per_s is None else f"{_scaled(flops_per_s)}FLOP/s"


def bytes_text(n_bytes: Number | None) -> str:
    """Format bytes: ``1_500_000 -> "1.5 MB"``."""
    return NOT_AVAILABLE if n_bytes is None else f"{_scaled(n_bytes)}B"


def seconds_text(seconds: float | None) -> str:
    """Format seconds: ``0.21668 -> "216.68 ms"``."""
    return NOT_AVAILABLE if seconds is None else f"{_scaled(seconds)}s"


def fraction_text(fraction: float | None) -> str:
    """Format a fraction: ``0.8215 -> "82.15%"``; one that only rounds to 0 is ``<0.01%``."""
    if fraction is None:
        return NOT_AVAILABLE
    return f"{number_text(100 * fraction)}%"


def percent_text(part: Number | None, whole: Number | None) -> str:
    """Format a share: ``(1, 3) -> "33.33%"``; ``n/a`` if the whole is 0 or unknown."""
    return fraction_text(ratio(part, whole))


def change_text(before: Number | None, after: Number | None) -> str:
    """Format a change: ``(200, 250) -> "+25%"``; ``n/a`` if unknown or from 0."""
    if before is not None and before == after:
        return "0%"
    change = ratio(None if before is None or after is None else after - before, before)
    if change is None:
        return NOT_AVAILABLE
    return f"{'+' if change > 0 else '-'}{fraction_text(abs(change))}"


def number_text(value: float | None) -> str:
    """Format with at most two decimals: ``6134.2749 -> "6134.27"``; ``<0.01`` if not quite 0."""
    if value is None:
        return NOT_AVAILABLE
    text = _rounded(value)
    return "<0.01" if text == "0" and value > 0 else text


def calls_text(calls: int | None) -> str:
    """Format a number of calls: ``1 -> "1 call"``, ``3 -> "3 calls"``."""
    if calls is None:
        return NOT_AVAILABLE
    return f"{calls} call{'' if calls == 1 else 's'}"


def times_text(count: int | None) -> str:
    """Say how often: ``1 -> "once"``, ``3 -> "3 times"``."""
    if count is None:
        return NOT_AVAILABLE
    return "once" if count == 1 else f"{count} times"


def ratio(part: Number | None, whole: Number | None) -> float | None:
    """Return ``part / whole``; None if a side is unknown, ``whole`` is 0, or it exceeds a float."""
    if part is None or not whole:
        return None
    try:
        value = part / whole
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def mean(total: int, count: int) -> Number:
    """Return ``total / count``; an int where it is whole, and where it exceeds a float."""
    whole, rest = divmod(total, count)
    return total / count if rest and not exceeds_float(whole) else whole


def exceeds_float(value: Number) -> bool:
    """Return whether a number is too large to be a float."""
    return abs(value) > sys.float_info.max


def _rounded(value: Number) -> str:
    if abs(value) >= _TOO_LONG:
        return f"{value:.{DEFAULT_PRECISION}e}"
    text = f"{value:.{DEFAULT_PRECISION}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _scaled(value: Number) -> str:
    """Format with the prefix that leaves 1 to 999 before the point: ``"1.2 G"``."""
    if exceeds_float(value):
        return f"{Decimal(value) / 1000 ** (len(_LARGE) - 1):.2e} {_LARGE[-1]}"
    size, step = abs(float(value)), 0
    while round(size, DEFAULT_PRECISION) >= 1000 and step < len(_LARGE) - 1:
        size, step = size / 1000, step + 1
    while size > 0 and round(size, DEFAULT_PRECISION) < 1 and step > 1 - len(_SMALL):
        size, step = size * 1000, step - 1
    sign = "-" if value < 0 else ""
    return f"{sign}{number_text(size)} {_LARGE[step] if step >= 0 else _SMALL[-step]}"


# -- text to numbers ----------------------------------------------------------------------------

_SIZE = re.compile(
    r"\s*(?P<number>(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d+)?(?:e\+?(?P<power>\d+))?|\.\d+)\s*"
    r"(?P<prefix>[kmgbtpezy]?)\s*(?:macs?|flops?|params?|parameters|b|bytes)?\s*",
    re.IGNORECASE,
)
_POWERS: Final = {
    **{prefix.lower(): 3 * step for step, prefix in enumerate(_LARGE)},
    "b": 9,  # billion
}


def parse_count(text: str) -> int:
    """Parse a count: ``"4.2G" -> 4_200_000_000``; also ``1e9``, ``1_000``, ``426.52 MMACs``.

    The result is exact: no float is involved. Raises ValueError if the text is not a whole count.
    """
    match = _SIZE.fullmatch(text)
    if match is None or len(text) > 40 or len(match["power"] or "") > 2:
        raise ValueError(f"{text!r} is not a count; write a number such as 4200000, 4.2M or 1.5e9")
    digits = match["number"].replace("_", "").replace(",", "")
    size = Decimal(digits) * Decimal(10) ** _POWERS[match["prefix"].lower()]
    if size != int(size):
        raise ValueError(f"{text!r} is not a whole number")
    return int(size)
