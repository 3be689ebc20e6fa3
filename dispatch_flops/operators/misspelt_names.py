"""Warn of operators that are registered by a name which their library does not have."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable
from typing import Any

from dispatch_flops import _torch

_LEAST_LIKENESS = 0.75  # a library that is still being loaded may define less similar names later


def warn_of_misspelt(keys: Iterable[Any]) -> None:
    """Warn of each name that its library lacks while it has a similar one.

    A string among the keys is the name of an operator that is not defined. A library that is not
    loaded may define it later.
    """
    for name in keys:
        if isinstance(name, str) and (nearest := _nearest(name)) is not None:
            warnings.warn(
                f"no operator is named {name!r}; did you mean {nearest!r}? The formula applies "
                "only if an operator of that name is defined later",
                stacklevel=4,
            )


def _nearest(name: str) -> str | None:
    library, _, own = name.partition("::")
    parts = (full.partition("::") for full in _torch.all_operator_names())
    known = {known for of, _, known in parts if of == library}
    if "." not in own:
        known = {full.partition(".")[0] for full in known}
    found = difflib.get_close_matches(own, sorted(known), n=1, cutoff=_LEAST_LIKENESS)
    return f"{library}::{found[0]}" if found else None
