"""Modules and operators as pandas data frames: the columns of the CSV files, with types.

Counts are ``Int64``, pandas' integer that knows "unknown"; what does not fit in 64 bits stays
an exact Python int in a column of objects. Seconds are floats.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dispatch_flops.profile import Profile
from dispatch_flops.renderers.csv import OPERATOR_COLUMNS, Row, module_rows, operator_rows

if TYPE_CHECKING:
    import pandas as pd

_TEXTS = frozenset({"fqn", "class_name", "extra_repr", "op", "phase", "kind", "dtype", "error"})


def modules(profile: Profile) -> pd.DataFrame:
    """One row per module, what ran outside the model last."""
    return _frame(module_rows(profile))


def operators(profile: Profile) -> pd.DataFrame:
    """One row per operator, module, phase and dtype."""
    return _frame(operator_rows(profile), OPERATOR_COLUMNS)


def _frame(rows: Iterable[Row], names: Iterable[str] = ()) -> pd.DataFrame:
    pandas = _pandas()
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    series = {name: pandas.Series(v, dtype=_dtype(name, v)) for name, v in columns.items()}
    return pandas.DataFrame(series)


def _dtype(name: str, values: list[Any]) -> Any:
    if name in _TEXTS:
        return object
    if name.endswith("_s"):
        return "float64"
    if name == "lower_bound":
        return bool
    fits = all(count is None or -(2**63) <= count < 2**63 for count in values)
    return "Int64" if fits else object


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError("data frames need pandas: pip install pandas", name="pandas") from error
    return pandas
