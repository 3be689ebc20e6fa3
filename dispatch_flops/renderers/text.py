"""Text that the formats share: names on one line, rules, lower-bound marks and tables."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal

import tabulate

from dispatch_flops.units import NOT_AVAILABLE

Style = Literal["plain", "markdown"]
Align = Literal["left", "right"]

RULE = "-" * 78
_GAP = 2  # spaces between the columns of tabulate's "simple" format

# Control characters could drive a terminal; lone surrogates cannot be encoded.
_UNPRINTABLE = frozenset({"Cc", "Cs"})


def one_line(text: str) -> str:
    """Return the text without line breaks and control characters, and with single spaces."""
    if text.isprintable() and "  " not in text:
        return text.strip()
    visible = (" " if unicodedata.category(c) in _UNPRINTABLE else c for c in text)
    return " ".join("".join(visible).split())


def heading(title: str, dashes: int) -> str:
    """Return the title between two runs of dashes."""
    return f"{'-' * dashes} {title} {'-' * dashes}"


def at_least(text: str, is_lower_bound: bool) -> str:
    """Return the number, marked with ``>=`` if it is only a lower bound."""
    return f">= {text}" if is_lower_bound and text != NOT_AVAILABLE else text


def about(text: str, is_inexact: bool) -> str:
    """Return the latency, marked with ``~`` if it may be off by more than 10 %."""
    return f"~{text}" if is_inexact and text != NOT_AVAILABLE else text


def first_names(names: Sequence[str], most: int = 6) -> str:
    """List the first names: ``("a", "b", "c"), 2 -> "a, b and 1 more"``."""
    more = len(names) - most
    listed = ", ".join(names[:most])
    return f"{listed} and {more} more" if more > 0 else listed


def shortened(text: str, room: int) -> str:
    """Return the text in at most ``room`` characters; one that is cut ends with "…"."""
    return text if len(text) <= room else f"{text[: room - 1]}…"


def column_width(heading: str, cells: Iterable[str]) -> int:
    """Return the characters that a column of ``table`` takes, with the gap before the next."""
    return max(len(heading) + tabulate.MIN_PADDING, *map(len, cells), 0) + _GAP


def wrapped(line: str, width: int | None, indent: int = 2) -> str:
    """Return the line, broken between words at ``width``; its further lines are indented."""
    if width is None:
        return line
    return textwrap.fill(
        line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def code(text: str, style: Style) -> str:
    """Return a name on one line; in Markdown as code, so that none of it is markup."""
    name = one_line(text)
    if style == "plain":
        return name
    return f"`{name.replace('`', chr(39)).replace('|', chr(92) + '|')}`" if name else ""


def alignment(columns: int, *, left: int = 1) -> list[Align]:
    """Return the alignment of columns: the first ``left`` hold text, the others numbers."""
    return ["left" if column < left else "right" for column in range(columns)]


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], align: Sequence[Align], style: Style
) -> str:
    """Return the cells in aligned columns, each cell exactly as given."""
    text = tabulate.tabulate(
        rows,
        headers=header,
        tablefmt="pipe" if style == "markdown" else "simple",
        colalign=align,
        headersalign=align,
        disable_numparse=True,
        preserve_whitespace=True,
    )
    return str(text)
