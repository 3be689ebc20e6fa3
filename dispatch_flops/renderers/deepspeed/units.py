"""Numbers with units as DeepSpeed's flops profiler writes them.

Names, arguments and rounding are those of ``deepspeed.profiling.flops_profiler.profiler``.
``None`` means "not known" and is written ``n/a``. Prefixes are powers of 1000.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from dispatch_flops.units import DEFAULT_PRECISION, NOT_AVAILABLE, Number, exceeds_float

_MAGNITUDES: Final = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1, "m": 1e-3, "u": 1e-6}


def number_to_string(
    num: Number | None, units: str | None = None, precision: int = DEFAULT_PRECISION
) -> str:
    """Return ``866_076_672`` as ``"866.08 M"``; without a prefix, the text ends in a space.

    units: the prefix, such as ``"M"``; by default the largest that leaves a number of at least 1.
    precision: decimals.
    """
    if num is None:
        return NOT_AVAILABLE
    if units is None:
        units = _prefix(num)
    if exceeds_float(num):
        size = Decimal(num) / Decimal(_MAGNITUDES.get(units, 1))
        return f"{size.normalize():.6g} {units}"
    return f"{round(num / _MAGNITUDES.get(units, 1), precision):g} {units}"


def macs_to_string(
    macs: Number | None, units: str | None = None, precision: int = DEFAULT_PRECISION
) -> str:
    """Return ``426_516_480`` as ``"426.52 MMACs"``."""
    return _with_unit(macs, "MACs", units, precision)


def flops_to_string(
    flops: Number | None, units: str | None = None, precision: int = DEFAULT_PRECISION
) -> str:
    """Return the rate ``4e9`` as ``"4 GFLOPS"``."""
    return _with_unit(flops, "FLOPS", units, precision)


def params_to_string(
    params_num: Number | None, units: str | None = None, precision: int = DEFAULT_PRECISION
) -> str:
    """Return ``61_706`` as ``"61.71 K"``; billions are ``B``, in ``units`` too."""
    giga = units.replace("B", "G") if units else units
    return number_to_string(params_num, giga, precision).replace("G", "B").strip()


def duration_to_string(
    duration: float | None, units: str | None = None, precision: int = DEFAULT_PRECISION
) -> str:
    """Return the seconds ``0.21668`` as ``"216.68 ms"``."""
    return _with_unit(duration, "s", units, precision)


def _with_unit(value: Number | None, unit: str, prefix: str | None, precision: int) -> str:
    return NOT_AVAILABLE if value is None else number_to_string(value, prefix, precision) + unit


def _prefix(num: Number) -> str:
    """Return the prefix of the number before it is rounded: 999,999 is ``1000 K``."""
    if num == 0:
        return ""
    return next((prefix for prefix, size in _MAGNITUDES.items() if num >= size), "u")
