"""Tables of what changed between two profiles: in all, by module and by operator."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dispatch_flops.analysis.diff import Change, Diff
from dispatch_flops.analysis.figures import COSTS, Figures, Key
from dispatch_flops.profile import OUTSIDE
from dispatch_flops.renderers.notebook import table_html
from dispatch_flops.renderers.text import Style, alignment, at_least, code, table
from dispatch_flops.renderers.view import View
from dispatch_flops.units import (
    Number,
    bytes_text,
    change_text,
    count_text,
    params_text,
    seconds_text,
)

_SAME = "No count changed."
Cells = tuple[list[str], list[list[str]]]


def render(
    compared: Diff, view: View | None = None, *, is_all: bool = False, has_latency: bool = True
) -> str:
    """Return the conventions that differ, the totals, and modules and operators with a change.

    print(diff_table.render(diff(before, after), View(depth=2)))

    view: ``depth`` of modules, ``style`` of the tables, and ``top``: how many modules and operators
        are listed, the largest changes of FLOPs; None lists all, in their order.
    is_all: also list modules and operators without a change.
    has_latency: also show latencies, where they were measured.
    """
    view = view or View()
    parts = list(compared.differences)
    parts += [
        table(header, rows, alignment(len(header)), view.style)
        for header, rows in _tables(compared, view, is_all, has_latency)
    ]
    parts += _left_out(compared, view, is_all)
    return "\n\n".join(parts if compared.has_changed else [*parts, _SAME])


def render_html(compared: Diff) -> str:
    """Return the same tables for a notebook."""
    parts = [f"<p>{html.escape(text)}</p>" for text in compared.differences]
    parts += [table_html(*cells) for cells in _tables(compared, View())]
    return "".join(parts if compared.has_changed else [*parts, f"<p>{_SAME}</p>"])


def _tables(
    compared: Diff, view: View, is_all: bool = False, has_latency: bool = True
) -> Iterator[Cells]:
    modules, operators = (_largest(found, view.top) for found in _found(compared, view, is_all))
    calls = [_CALLS] if any(map(_differs_in_calls, modules)) else []
    timed_phase = (compared.phase or "forward").capitalize()
    for title, changes, columns, seconds in (
        ("", [compared.total], _FIGURES, timed_phase),
        ("Module", modules, [*calls, *_FIGURES], timed_phase),
        ("Operator", operators, [_CALLS, *_COSTS], "Time"),
    ):
        if has_latency and _is_timed(changes):
            columns = [*columns, _figure_column(seconds, "latency", seconds_text)]
        if changes:
            yield _cells(title, changes, columns, view.style)


def _is_timed(changes: Sequence[Change]) -> bool:
    sides = (side for change in changes for side in (change.before, change.after))
    return any(_value(side, "latency") is not None for side in sides)


def _differs_in_calls(change: Change) -> bool:
    """Return True for a module that both profiles have, and that ran more often in one."""
    is_in_both = change.before is not None and change.after is not None
    return is_in_both and change.calls_before != change.calls_after


def _left_out(compared: Diff, view: View, is_all: bool) -> Iterator[str]:
    """Yield a sentence on the modules and operators that ``view.top`` leaves out."""
    counts = zip(_found(compared, view, is_all), ("modules", "operators"), strict=True)
    more = [
        f"{len(found) - view.top} {name}"
        for found, name in counts
        if view.top is not None and len(found) > view.top
    ]
    if more:
        yield f"The largest changes are listed; those of {' and '.join(more)} are left out."


def _found(compared: Diff, view: View, is_all: bool) -> tuple[Sequence[Change], Sequence[Change]]:
    """Return the modules and the operators that are asked for."""
    modules = compared.modules if is_all else compared.changed_modules()
    operators = compared.operators if is_all else compared.changed_operators()
    if view.depth is not None:
        modules = [change for change in modules if _depth(change.name) <= view.depth]
    return modules, operators


def _largest(changes: Sequence[Change], top: int | None) -> Sequence[Change]:
    """Return the changes in their order, or the largest ones if there are more than ``top``."""
    if top is None or len(changes) <= top:
        return changes
    return sorted(changes, key=_size, reverse=True)[:top]


def _size(change: Change) -> tuple[float, ...]:
    """Return by how much the FLOPs differ, then the bytes and the parameters."""
    keys: tuple[Key, ...] = ("flops", "bytes", "params")
    return tuple(
        abs((_value(change.after, key) or 0) - (_value(change.before, key) or 0)) for key in keys
    )


@dataclass(frozen=True, slots=True)
class _Column:
    """Column of a figure: its values before and after a change, and their text.

    is_cost: whether operators without a known cost make it a lower bound.
    """

    title: str
    values: Callable[[Change], tuple[Number | None, Number | None]]
    text: Callable[[Number | None], str]
    is_cost: bool = True

    def cell(self, change: Change) -> str:
        before, after = self.values(change)
        text = self.text
        if isinstance(before, int) and before != after and text(before) == text(after):
            text = "{:,}".format  # they differ only in digits that rounding hides
        first = self._marked(text(before), change.before)
        second = self._marked(text(after), change.after)
        if change.before is None:
            return f"new: {second}"
        if change.after is None:
            return f"gone: {first}"
        if before == after and first == second:
            return first
        return f"{first} -> {second} ({change_text(before, after)})"

    def _marked(self, text: str, figures: Figures | None) -> str:
        return at_least(text, self.is_cost and figures is not None and figures.lower_bound)


def _figure_column(title: str, key: Key, text: Callable[[Number | None], str]) -> _Column:
    def values(change: Change) -> tuple[Number | None, Number | None]:
        return _value(change.before, key), _value(change.after, key)

    return _Column(title, values, text, is_cost=key in COSTS)


def _value(figures: Figures | None, key: Key) -> Number | None:
    return None if figures is None else figures.value(key)


_COSTS = [
    _figure_column("MACs", "macs", count_text),
    _figure_column("FLOPs", "flops", count_text),
    _figure_column("Bytes", "bytes", bytes_text),
]
_FIGURES = [_figure_column("Params", "params", params_text), *_COSTS]
_CALLS = _Column(
    "Calls", lambda change: (change.calls_before, change.calls_after), count_text, is_cost=False
)


def _cells(
    title: str, changes: Sequence[Change], columns: Sequence[_Column], style: Style
) -> Cells:
    rows = [
        [_row_name(change, title, style), *(column.cell(change) for column in columns)]
        for change in changes
    ]
    return [title, *(column.title for column in columns)], rows


def _row_name(change: Change, title: str, style: Style) -> str:
    if change.name:
        return code(change.name, style)
    return "(model)" if title else "everything"


def _depth(fqn: str) -> int:
    return fqn.count(".") + 1 if fqn and not fqn.startswith(OUTSIDE) else 0
