"""The package's own printout: headline, module tree, top operators and remarks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dispatch_flops.analysis.operators import OperatorRow, operator_rows
from dispatch_flops.profile import ModuleNode, Profile
from dispatch_flops.profile.cost import ZERO
from dispatch_flops.renderers.overview.columns import EIGHTHS, FULL, tree_table
from dispatch_flops.renderers.overview.fitting import TextColumn, fitted_table
from dispatch_flops.renderers.overview.headline_lines import LABEL, headline_lines
from dispatch_flops.renderers.overview.remarks import remarks
from dispatch_flops.renderers.overview.rows import module_rows
from dispatch_flops.renderers.terminal import BAR, BOLD, colored
from dispatch_flops.renderers.text import at_least, one_line, wrapped
from dispatch_flops.renderers.view import View
from dispatch_flops.units import bytes_text, count_text, fraction_text, seconds_text

__all__ = ["render", "render_module"]

DEPTH = 3
_OPERATORS = 5
_HEADINGS = ("Operator", "Calls", "MACs", "FLOPs", "% FLOPs", "Bytes", "Time")
_BARS = re.compile(f"[{FULL}{EIGHTHS}]+")
_LEAST_NAME = 24  # characters of an operator's name


def render(profile: Profile, view: View | None = None) -> str:
    """Return what the run was and cost, a line per module, the top operators and remarks.

    Identical siblings share a row, "layer.0-11 (12 x BertLayer)", with their sum; the row "each"
    below it has the figures of one. Empty cells are 0, and columns without a figure are omitted.
    ``>=`` marks lower bounds, ``~`` latencies that may be off by more than 10 %.

    view: ``depth`` (default 3), ``top`` operators (default 5), ``sort``, ``columns``, ``width``,
        ``fold``, ``style``, ``is_colored`` and ``machine``.

    Example::

        print(overview.render(profile, View(depth=2, sort="flops")))
    """
    view = view or View()
    rows = module_rows(
        profile.root,
        depth=DEPTH if view.depth is None else view.depth,
        sort=view.sort,
        fold=view.fold is not False,
    )
    tree = tree_table(
        profile,
        list(rows),
        columns=view.columns,
        width=view.width,
        style=view.style,
    )
    lines = (wrapped(line, view.width, LABEL) for line in headline_lines(profile, view.machine))
    title, *facts = lines
    parts = [
        "\n".join([colored(title, BOLD, view.is_colored), *facts]),
        _with_colored_bars(tree) if view.is_colored else tree,
        _operator_table(profile, view),
        "\n".join(wrapped(remark, view.width) for remark in remarks(profile)),
    ]
    return "\n\n".join(part for part in parts if part)


def render_module(node: ModuleNode, view: View | None = None) -> str:
    """Return the printout of one module and those below it, as of a whole model.

    Example::

        print(overview.render_module(profile.node("0")))
    """
    return render(Profile(root=node), view)


def _with_colored_bars(text: str) -> str:
    return _BARS.sub(lambda bar: colored(bar[0], BAR, True), text)


def _operator_table(profile: Profile, view: View) -> str:
    """Return the operators with the most FLOPs; "" if no operator has any."""
    most = _OPERATORS if view.top is None else view.top
    rows = [row for row in operator_rows(profile) if row.cost and row.cost.flops]
    if not rows[:most]:
        return ""
    cells = zip(*map(_operator_cells, rows[:most]), strict=True)
    columns = {
        heading: TextColumn(heading, column)
        for heading, column in zip(_HEADINGS, cells, strict=True)
        if any(column)
    }
    names = TextColumn("Operator", columns.pop("Operator").cells, "left")
    table = fitted_table(
        names,
        columns,
        width=view.width,
        style=view.style,
        dropped_first=("Bytes", "MACs", "Calls"),
        least_label=_LEAST_NAME,
    )
    return f"{table}\n{_rest(rows[most:])}".rstrip()


def _rest(rows: Sequence[OperatorRow]) -> str:
    """Return what the operators that the table leaves out amount to; "" if there are none."""
    if not rows:
        return ""
    share = fraction_text(sum(row.share or 0.0 for row in rows))
    return f"and {len(rows)} more operator{'' if len(rows) == 1 else 's'}, {share} of the FLOPs"


def _operator_cells(row: OperatorRow) -> tuple[str, ...]:
    cost, bound = row.cost or ZERO, bool(row.uncounted)
    return (
        one_line(row.op),
        str(row.calls),
        at_least(count_text(cost.macs), bound) if cost.macs else "",
        at_least(count_text(cost.flops), bound),
        fraction_text(row.share),
        at_least(bytes_text(cost.bytes_total), bound),
        "" if row.latency_s is None else seconds_text(row.latency_s),
    )
