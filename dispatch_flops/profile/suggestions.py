"""What a user who misspelt a name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean x?`` for the known names that are like this one; "" for none."""
    close = difflib.get_close_matches(name, known, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""
