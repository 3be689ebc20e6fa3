"""Modules and operators as pandas data frames: the columns of the CSV files, with types.

Counts are ``Int64``, pandas' integer that knows "unknown"; what does not fit in 64 bits stays
an exact Python int in a column of objects. Seconds are floats.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from dispatch_flops.renderers import csv as rows
from dispatch_flops.tree import Profile

if TYPE_CHECKING:
    import pandas as pd

_TEXTS = frozenset({"fqn", "class_name", "extra_repr", "op", "phase", "kind"})
_TEXTS_OR_NONE = frozenset({"dtype", "error"})


def modules(profile: Profile) -> pd.DataFrame:
    """One row per module, what ran outside the model last."""
    return _frame(rows.modules(profile))


def operators(profile: Profile) -> pd.DataFrame:
    """One row per operator, module, phase and dtype."""
    return _frame(rows.operators(profile))


def _frame(text: str) -> pd.DataFrame:
    pandas = _pandas()
    header, *lines = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    columns = {name: [line[i] for line in lines] for i, name in enumerate(header)}
    return pandas.DataFrame({name: _typed(name, cells) for name, cells in columns.items()})


def _typed(name: str, cells: list[str]) -> Any:
    pandas = _pandas()
    if name in _TEXTS:
        return pandas.Series(cells, dtype=object)
    if name in _TEXTS_OR_NONE:
        return pandas.Series([cell or None for cell in cells], dtype=object)
    if name.endswith("_s"):
        return pandas.Series([float(cell) if cell else None for cell in cells], dtype="float64")
    if name == "lower_bound":
        return pandas.Series([cell == "1" for cell in cells], dtype=bool)
    counts = [int(cell) if cell else None for cell in cells]
    fits = all(count is None or -(2**63) <= count < 2**63 for count in counts)
    return pandas.Series(counts, dtype="Int64" if fits else object)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError("data frames need pandas: pip install pandas", name="pandas") from error
    return pandas
