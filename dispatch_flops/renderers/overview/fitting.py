"""Tables that fit the width of a page."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dispatch_flops.renderers.text import Align, Style, column_width, shortened, table


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column of text below its heading."""

    heading: str
    cells: Sequence[str]
    align: Align = "right"

    @property
    def width(self) -> int:
        return column_width(self.heading, self.cells)


def fitted_table(
    labels: TextColumn,
    columns: dict[str, TextColumn],
    *,
    width: int | None,
    style: Style,
    dropped_first: Iterable[str],
    least_label: int,
) -> str:
    """Return a table of labels and named columns, in lines of at most ``width`` characters.

    A table that is wider loses the columns in ``dropped_first``, one after the other, and then
    the ends of its labels, of which ``least_label`` characters remain. ``width`` None: no limit.
    """
    columns, droppable = dict(columns), list(dropped_first)
    longest = max(map(len, labels.cells), default=0)

    def room() -> int:
        if width is None:
            return sys.maxsize
        return width - sum(column.width for column in columns.values())

    while room() < min(least_label, longest) and droppable:
        columns.pop(droppable.pop(0), None)
    cells = [shortened(label, max(room(), least_label)) for label in labels.cells]
    if style == "markdown":
        cells = [cell.replace("|", "\\|") for cell in cells]
    header = [labels.heading, *(column.heading for column in columns.values())]
    align = [labels.align, *(column.align for column in columns.values())]
    rows = list(zip(cells, *(column.cells for column in columns.values()), strict=True))
    return table(header, rows, align, style)
