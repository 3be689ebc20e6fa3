"""Modules and operators as pandas data frames, with the columns of the CSV files.

Counts are ``Int64``, pandas' nullable integer. A column with a count that does not fit in 64 bits
holds exact Python ints as objects. Seconds are floats.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dispatch_flops.profile import Profile
from dispatch_flops.renderers._extras import require
from dispatch_flops.renderers.csv import OPERATOR_COLUMNS, Row, module_rows, operator_rows

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["modules", "operators"]

_TEXTS = frozenset({"fqn", "class_name", "extra_repr", "op", "phase", "kind", "dtype", "error"})


def modules(profile: Profile) -> pd.DataFrame:
    """Return a row per module, and a last one for what ran outside the model.

    Raises ImportError where pandas is not installed.

    Example::

        frame = dataframe.modules(profile)
        print(frame.nlargest(5, "own_macs")[["fqn", "own_macs"]])
    """
    return _frame(module_rows(profile))


def operators(profile: Profile) -> pd.DataFrame:
    """Return a row per operator, module, phase and dtype.

    Raises ImportError where pandas is not installed.

    Example::

        frame = dataframe.operators(profile)
        print(frame.groupby(["phase", "op"])["flops"].sum())
    """
    return _frame(operator_rows(profile), OPERATOR_COLUMNS)


def _frame(rows: Iterable[Row], names: Iterable[str] = ()) -> pd.DataFrame:
    pandas = require("pandas", extra="pandas", purpose="data frames")
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
