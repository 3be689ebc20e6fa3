"""The command ``ops``: the operators that have a cost, and those that do not."""

from __future__ import annotations

import fnmatch
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dispatch_flops.cli.arguments import Commands, add_command, add_table_options
from dispatch_flops.cli.exit_codes import OK
from dispatch_flops.cli.formats import table_style
from dispatch_flops.cli.output import csv_text, emit, page
from dispatch_flops.errors import TargetError
from dispatch_flops.renderers.text import Style, code, table
from dispatch_flops.units import percent_text

if TYPE_CHECKING:
    from dispatch_flops.operators.registry import Rule

_EPILOG = """\
Kinds of cost:
  formula    computed from the arguments of a call
  pointwise  a fixed number of operations per output element
  reduction  operations per input element, such as n - m for a sum of n to m elements
  free       0 by declaration, with the reason
In-place and out= variants cost the same as the operator itself.
A table cuts long costs; Markdown and CSV show them in full. On a terminal, a long list is shown
through $PAGER.

examples:
  dispatch-flops ops mm
  dispatch-flops ops 'aten.conv*' --format markdown
  dispatch-flops ops --coverage
"""
_HEADER = ("Operator", "Kind", "Cost", "Source")
_COST = re.compile(r"((?:MACs|FLOPs): .*?)(?=\s*Source:|$)")
_SOURCE = re.compile(r"Source: (.*?)\.?$")
_MAX_WIDTH = 72
_FORMULAS = "dispatch_flops.operators.formulas."

Row = tuple[str, str, str, str]


def add_ops(commands: Commands) -> None:
    parser = add_command(commands, "ops", "list the operators that have a cost", _EPILOG)
    parser.add_argument(
        "filter",
        nargs="?",
        metavar="TEXT",
        help="list only operators whose name contains TEXT or matches a pattern such as aten.conv*",
    )
    parser.add_argument(
        "--filter", dest="filter_option", metavar="TEXT", help="the same as TEXT alone"
    )
    add_table_options(parser, "table", "markdown", "csv")
    parser.add_argument(
        "--markdown",
        dest="format",
        action="store_const",
        const="markdown",
        help="the same as --format markdown",
    )
    parser.add_argument(
        "--coverage",
        action="store_true",
        help="show how many aten operators have a cost, and list those that do not",
    )
    parser.set_defaults(run=run_ops)


def run_ops(options: Namespace) -> int:
    if options.filter is not None and options.filter_option is not None:
        raise TargetError("TEXT and --filter are both given; give one of them")
    pattern = options.filter if options.filter_option is None else options.filter_option
    style = table_style(options.format)
    if options.coverage:
        if options.format == "csv":
            raise TargetError(
                "--format csv is not available with --coverage; use table or markdown"
            )
        text = _coverage_text(pattern, style)
    else:
        rows = list(rows_of(pattern))
        if not rows:
            raise TargetError(f"no operator matches {pattern!r}; omit the text to list all")
        text = csv_text(_HEADER, rows) if options.format == "csv" else _table(rows, style)
    if options.output is None:
        page(text)
    else:
        emit(text, options.output)
    return OK


def rows_of(pattern: str | None = None) -> Iterator[Row]:
    """Yield operator, kind, cost and source of every rule whose operator matches the pattern."""
    from dispatch_flops.operators import (
        formulas,  # noqa: F401  (fills the registry)
        registry,
    )

    for name, rule in registry.rules().items():
        if _matches(name, pattern):
            yield name, rule.kind, cost_of(rule), _source_of(rule)


def cost_of(rule: Rule) -> str:
    """Return the cost in words: the rule's note, else the MACs and FLOPs of the docstring, else all
    of it but the source.
    """
    if rule.note:
        return rule.note
    doc = _doc(rule)
    found = _COST.search(doc)
    return found[1].strip() if found else doc.partition("Source: ")[0].strip().removesuffix(".")


def _source_of(rule: Rule) -> str:
    """Return the source that the docstring cites, else the module of the formula."""
    found = _SOURCE.search(_doc(rule))
    if found:
        return found[1]
    if not rule.builtin:
        return "registered by the user"
    module = rule.formula.__module__
    return module.removeprefix("dispatch_flops.operators.") if module.startswith(_FORMULAS) else ""


def _doc(rule: Rule) -> str:
    return " ".join((rule.formula.__doc__ or "").split())


def _matches(name: str, pattern: str | None) -> bool:
    if pattern is None:
        return True
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern in name


def _table(rows: Sequence[Row], style: Style) -> str:
    cells = [
        [code(name, style), kind, *(_cell(text, style) for text in rest)]
        for name, kind, *rest in rows
    ]
    return table(_HEADER, cells, ["left"] * len(_HEADER), style)


def _cell(text: str, style: Style) -> str:
    """Return the text of a cell, cut to a readable width in a plain table."""
    if style == "markdown":
        return text.replace("|", "\\|")
    return text if len(text) <= _MAX_WIDTH else f"{text[: _MAX_WIDTH - 3]}..."


# -- coverage -------------------------------------------------------------------------------------


def coverage() -> tuple[dict[str, list[str]], int]:
    """Return aten's overloads by kind, and the number of all of them.

    Overloads without a cost have the kind "none". Composite overloads have no kind: torch
    decomposes them before they are counted.
    """
    import torch

    from dispatch_flops import _torch
    from dispatch_flops.operators import (
        formulas,  # noqa: F401  (fills the registry)
        registry,
    )
    from dispatch_flops.operators.composites import is_composite

    found: dict[str, list[str]] = {}
    names = [name for name in _torch.all_operator_names() if name.startswith("aten::")]
    for name in sorted(names):
        base, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is None or is_composite(op):
            continue
        rule = registry.lookup(op)
        found.setdefault(rule.kind if rule else "none", []).append(str(op))
    return found, len(names)


def _coverage_text(pattern: str | None, style: Style) -> str:
    found, total = coverage()
    counts = Counter({kind: len(ops) for kind, ops in found.items()})
    listed = counts.total()
    kinds = ("formula", "pointwise", "reduction", "free", "none")
    rows = [[kind, str(counts[kind]), percent_text(counts[kind], listed)] for kind in kinds]
    parts = [
        f"aten has {total} overloads; {total - listed} are composite: torch decomposes them into "
        f"the other {listed} before they are counted.",
        table(["Kind", "Overloads", "Share"], rows, ("left", "right", "right"), style),
    ]
    missing = [op for op in found.get("none", []) if _matches(op, pattern)]
    if missing:
        bullet = "- " if style == "markdown" else ""
        names = "\n".join(f"{bullet}{code(op, style)}" for op in missing)
        parts.append(f"Without a cost ({len(missing)}):\n{names}")
    return "\n\n".join(parts)
