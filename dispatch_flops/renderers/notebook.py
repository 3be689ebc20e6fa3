"""HTML for notebooks: the totals and a small table of the modules, without scripts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

from dispatch_flops.analysis.efficiency import machine_of
from dispatch_flops.analysis.figures import Figures, inclusive, walk_with_depth
from dispatch_flops.analysis.folding import fold
from dispatch_flops.analysis.headline import headline
from dispatch_flops.analysis.latency import inexact_latencies
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.profile import ModuleNode, Profile
from dispatch_flops.renderers.explanations import OF_WHAT_WAS_COUNTED
from dispatch_flops.renderers.overview.headline_lines import phases_text
from dispatch_flops.renderers.run_facts import run_facts
from dispatch_flops.renderers.text import about, at_least, first_names, one_line
from dispatch_flops.renderers.view import View
from dispatch_flops.units import (
    NOT_AVAILABLE,
    bytes_text,
    calls_text,
    count_text,
    flops_text,
    fraction_text,
    macs_text,
    params_text,
    percent_text,
    seconds_text,
)

__all__ = ["render", "render_module"]

_COLUMNS = ("Module", "Class", "Params", "MACs", "FLOPs", "Share", "Bytes", "Forward")
_TEXT_COLUMNS = 2
_CELL = "padding:2px 10px;text-align:{align};white-space:nowrap"
_TABLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"
_MOST_ROWS = 100
_VIEW = View(depth=4, fold=True)


def render(profile: Profile, view: View | None = None) -> str:
    """Return the totals and the first 100 modules, all phases together.

    Colours and fonts are the notebook's.

    view: ``depth``, ``fold`` and ``machine``; the default is ``View(depth=4, fold=True)``.

    Example::

        # What a notebook shows for ``profile`` itself, cut at two levels.
        page = notebook.render(profile, View(depth=2, fold=True))
    """
    view = view or _VIEW
    root = fold(profile.root) if view.fold else profile.root
    figures = inclusive(root) | inclusive(profile.outside)
    outside = profile.outside
    trees = [root, *([outside] if outside.is_lower_bound or outside.total().flops else [])]
    levels = ((node, level) for tree in trees for node, level in walk_with_depth(tree))
    nodes = [pair for pair in levels if view.depth is None or pair[1] <= view.depth]
    whole = profile.total().flops
    inexact = inexact_latencies(root, profile.timing)
    rows = [
        _row(node, level, figures[node.fqn], whole, is_inexact=node.fqn in inexact)
        for node, level in nodes[:_MOST_ROWS]
    ]
    if len(nodes) > _MOST_ROWS:
        rows.append([f"… {len(nodes) - _MOST_ROWS} more", *[""] * (len(_COLUMNS) - 1)])
    tree_table = table_html(_COLUMNS, rows, text_columns=_TEXT_COLUMNS)
    return f"<div>{''.join(_summary(profile, view.machine))}{tree_table}</div>"


def render_module(node: ModuleNode, view: View | None = None) -> str:
    """Return one module and those below it, as a whole model.

    Example::

        page = notebook.render_module(profile.node("0"))
    """
    return render(Profile(root=node), view)


def table_html(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1
) -> str:
    """Return a table; its first ``text_columns`` columns are text, the others numbers."""
    body = "".join(_cells("td", row, text_columns) for row in rows)
    return (
        f'<table style="{_TABLE}"><thead>{_cells("th", header, text_columns)}</thead>'
        f"<tbody>{body}</tbody></table>"
    )


def _summary(profile: Profile, machine: Machine | None) -> Iterator[str]:
    machine = machine_of(profile, machine)
    top = headline(profile, machine)
    bound = top.lower_bound
    numbers = [
        f"{params_text(top.params)} params",
        at_least(macs_text(top.macs), bound),
        at_least(flops_text(top.hardware_flops), bound),
        at_least(bytes_text(top.bytes_total), bound),
    ]
    if top.seconds is not None:
        seconds = about(seconds_text(top.seconds), top.seconds_are_inexact)
        numbers.append(f"{seconds} ({top.seconds_of})")
    if top.mfu is not None:
        numbers.append(f"MFU {at_least(fraction_text(top.mfu), top.mfu_is_lower_bound)}")
    elif machine is not None:
        numbers.append(f"MFU {NOT_AVAILABLE} of {machine.name}: {top.why_no_mfu}")
    name = _escaped(profile.root.class_name)
    phases = phases_text(profile)
    yield f"<p><b>{name}</b>: {_escaped(' · '.join(numbers))}"
    yield f"<br/>FLOPs: {_escaped(phases)}</p>" if phases else "</p>"
    facts = "<br/>".join(f"{label}: {html.escape(text)}" for label, text in run_facts(profile.run))
    if facts:
        yield f"<p>{facts}</p>"
    if bound:
        calls = [f"{op} ({calls_text(n)})" for op, n in profile.uncounted_ops().items()]
        listed = _escaped(first_names(calls, 10))
        why = f"no cost is known for {listed}; {OF_WHAT_WAS_COUNTED}"
        yield f"<p><b>Lower bound</b>: {why}</p>"


def _row(
    node: ModuleNode, level: int, figures: Figures, whole: int, *, is_inexact: bool
) -> list[str]:
    bound = figures.lower_bound
    return [
        "\u2003" * level + one_line(node.name or node.class_name),
        one_line(node.class_name),
        params_text(figures.params),
        at_least(count_text(figures.cost.macs), bound),
        at_least(count_text(figures.cost.flops), bound),
        percent_text(figures.cost.flops, whole),
        at_least(bytes_text(figures.cost.bytes_total), bound),
        "" if figures.latency_s is None else about(seconds_text(figures.latency_s), is_inexact),
    ]


def _cells(tag: str, texts: Sequence[str], text_columns: int) -> str:
    aligns = ["left" if i < text_columns else "right" for i in range(len(texts))]
    cells = (
        f'<{tag} style="{_CELL.format(align=align)}">{html.escape(text)}</{tag}>'
        for text, align in zip(texts, aligns, strict=True)
    )
    return f"<tr>{''.join(cells)}</tr>"


def _escaped(text: str) -> str:
    return html.escape(one_line(text))
