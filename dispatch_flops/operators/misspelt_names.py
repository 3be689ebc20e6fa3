"""Warn of operators that are registered by a name which their library does not have."""

from __future__ import annotations

import difflib
import functools
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from dispatch_flops import _torch
from dispatch_flops.operators.operator_keys import find_loaded
from dispatch_flops.operators.program_lines import stacklevel_of_program

_LEAST_LIKENESS = 0.75


def warn_of_misspelt(keys: Iterable[Any], what: str = "formula") -> None:
    """Warn of each name that its library lacks, with the nearest name if there is a similar one.

    what: that is registered, "formula" or "workspace".

    A library that is not loaded may define it later.
    """
    for name in keys:
        if not isinstance(name, str) or find_loaded(name) is not None:
            continue
        library, _, own = name.partition("::")
        known = _names_by_library(_torch.libraries_loaded()).get(library)
        if known and f"{own}_" not in known:  # the formula applies to that in-place operator
            warnings.warn(
                f"no operator is named {name!r}{_suggestion(library, own, known)} The {what} "
                "applies only if an operator of that name is defined later",
                stacklevel=stacklevel_of_program(),
            )


def _suggestion(library: str, own: str, known: set[str]) -> str:
    names = known if "." in own else {full.partition(".")[0] for full in known}
    found = difflib.get_close_matches(own, sorted(names), n=1, cutoff=_LEAST_LIKENESS)
    return f"; did you mean '{library}::{found[0]}'?" if found else f" in the library {library!r}."


@functools.lru_cache(maxsize=1)
def _names_by_library(_loaded: Hashable) -> Mapping[str, set[str]]:
    """Return the names of all operators, without their library's. Listing them takes time."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for full in _torch.all_operator_names():
        library, _, own = full.partition("::")
        names[library].add(own)
    return names
