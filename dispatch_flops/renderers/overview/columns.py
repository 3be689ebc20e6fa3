"""Columns of the module tree, and how they fit the width of a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from dispatch_flops.analysis.communication import inclusive_communication
from dispatch_flops.analysis.figures import Figures, tree_figures
from dispatch_flops.analysis.latency import inexact_latencies
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import ModuleNode, Profile
from dispatch_flops.profile.cost import PHASES, Phase, in_order
from dispatch_flops.renderers.overview.fitting import TextColumn, fitted_table
from dispatch_flops.renderers.overview.rows import Row, output_text
from dispatch_flops.renderers.text import Align, Style, about, at_least, one_line
from dispatch_flops.units import (
    bytes_text,
    count_text,
    flops_per_s_text,
    mean,
    params_text,
    ratio,
    seconds_text,
)

_BAR = 6  # characters of a share of 100 %
FULL, EIGHTHS = "█", "▏▎▍▌▋▊▉"
_LEAST_LABEL = 28
_DEFAULT = ("output", "params", "macs", "flops", "share", "comm", "latency")
_DROPPED_FIRST = ("output", "macs", "params", "share")


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, the text of a row's cell, and its alignment. "" is an empty cell."""

    heading: str
    cell: Callable[[Row], str]
    align: Align = "right"


def tree_table(
    profile: Profile,
    rows: Sequence[Row],
    *,
    columns: Sequence[str] | None = None,
    width: int | None = None,
    style: Style = "plain",
) -> str:
    """Return the rows as a table.

    columns: names of columns, in their order; None for those that hold something.
    width: characters of a line; None for no limit. A table that is wider loses columns that were
        not asked for, least important first, and then the ends of its labels.

    Raises ConfigError for an unknown column.
    """
    known = _columns(profile)
    for name in columns or ():
        if name not in known:
            raise ConfigError(f"{name!r:.60} is not a column; choose from {', '.join(known)}")
    chosen = {
        name: TextColumn(known[name].heading, list(map(known[name].cell, rows)), known[name].align)
        for name in (_DEFAULT if columns is None else columns)
    }
    if columns is None:
        chosen = {name: column for name, column in chosen.items() if any(column.cells)}
    return fitted_table(
        TextColumn("Module", list(map(_label, rows)), "left"),
        chosen,
        width=width,
        style=style,
        dropped_first=_DROPPED_FIRST if columns is None else (),
        least_label=_LEAST_LABEL,
    )


def column_names() -> tuple[str, ...]:
    """Return the names of the columns that every profile has; that of a phase not run is empty."""
    return tuple(_columns(Profile(root=ModuleNode(fqn="", class_name=""))))


def _columns(profile: Profile) -> dict[str, Column]:
    whole = profile.total().flops
    inexact = inexact_latencies(profile.root, profile.timing)

    def latency(row: Row) -> str:
        seconds = row.figures.latency_s
        is_inexact = not inexact.isdisjoint(row.fqns)
        return "" if seconds is None else about(seconds_text(seconds), is_inexact)

    @cache
    def figures_in(phase: Phase) -> dict[str, Figures]:
        return tree_figures(profile.root, phase)

    def rate(row: Row) -> str:
        forward = figures_in("forward")[row.node.fqn]
        per_s = ratio(forward.cost.flops * row.figures.modules, row.figures.latency_s)
        return "" if per_s is None else _cost(per_s, forward, flops_per_s_text)

    def flops_in(phase: Phase) -> Column:
        def cell(row: Row) -> str:
            part = figures_in(phase)[row.node.fqn]
            return _cost(part.cost.flops * row.figures.modules, part)

        return Column(f"{phase} FLOPs", cell)

    def share(row: Row) -> str:
        part = ratio(row.figures.cost.flops, whole)
        return f"{_percent(part):>4} {_bar(part)}" if part else ""

    sent = inclusive_communication(profile)

    def payload(row: Row) -> str:
        known = [sent[fqn].payload_bytes for fqn in row.fqns if fqn in sent]
        return bytes_text(mean(sum(known), row.copies)) if known else ""

    phases = {
        f"{phase}_flops": flops_in(phase) for phase in in_order((*PHASES, *phases_of(profile)))
    }
    return {
        "output": Column("Output", output_text, "left"),
        "params": Column("Params", lambda row: _unless_0(row.figures.params, params_text)),
        "macs": Column("MACs", lambda row: _cost(row.figures.cost.macs, row.figures)),
        "flops": Column("FLOPs", lambda row: _cost(row.figures.cost.flops, row.figures)),
        **phases,
        "share": Column("Share", share, "left"),
        "bytes": Column(
            "Bytes", lambda row: _cost(row.figures.cost.bytes_total, row.figures, bytes_text)
        ),
        "comm": Column("Payload", payload),
        "latency": Column("Forward", latency),
        "rate": Column("Forward rate", rate),
        "calls": Column("Calls", lambda row: _unless_0(row.calls, str)),
    }


def _label(row: Row) -> str:
    label = one_line(row.label)
    text = label if row.level == 0 and not row.is_run else f"{label} ({one_line(row.class_name)})"
    return "  " * row.level + text


def _cost(count: float, of: Figures, text: Callable[[float], str] = count_text) -> str:
    """Return a cost, "" for a true 0; a lower bound is shown even if it is 0."""
    return at_least(text(count), of.lower_bound) if count or of.lower_bound else ""


def _unless_0(value: int, text: Callable[[int], str]) -> str:
    return text(value) if value else ""


def _percent(share: float) -> str:
    """Return a share in whole percent; "<1%" for one that would be 0."""
    return f"{round(100 * share)}%" if share >= 0.005 else "<1%"


def _bar(share: float) -> str:
    eighths = round(8 * _BAR * min(share, 1.0))
    whole, part = divmod(eighths, 8)
    return FULL * whole + EIGHTHS[part - 1 : part]
