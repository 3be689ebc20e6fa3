"""``ops``: which operators have a cost, what it is, and which have none."""

from __future__ import annotations

import csv
import fnmatch
import io
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dispatch_flops.cli.arguments import Commands, add_command
from dispatch_flops.cli.output import OK, emit
from dispatch_flops.errors import TargetError
from dispatch_flops.renderers.text import Style, code, table
from dispatch_flops.units import percent_text

if TYPE_CHECKING:
    from dispatch_flops.operators.registry import Rule

_EPILOG = """\
Kinds: formula (a function of the call's shapes), pointwise and reduction (so much per element),
free (0 by declaration, with the reason). In-place and out= variants cost what the operator does.

examples:
  dispatch-flops ops --filter attention
  dispatch-flops ops --filter 'aten.conv*' --format markdown
  dispatch-flops ops --coverage

Long costs are cut in a table; Markdown and CSV have them whole.
"""
_HEADER = ("Operator", "Kind", "Cost", "Source")
_COST = re.compile(r"((?:MACs|FLOPs): .*?)(?=\s*Source:|$)")
_SOURCE = re.compile(r"Source: (.*?)\.?$")
_WIDEST = 72
_FORMULAS = "dispatch_flops.operators.formulas."

Row = tuple[str, str, str, str]


def add_commands(commands: Commands) -> None:
    parser = add_command(commands, "ops", "list the operators that have a cost", _EPILOG)
    parser.add_argument(
        "--filter", metavar="TEXT", help="only operators whose name holds it, or fits the pattern"
    )
    parser.add_argument("--format", choices=("table", "markdown", "csv"), default="table")
    parser.add_argument(
        "--markdown", dest="format", action="store_const", const="markdown", help="as Markdown"
    )
    parser.add_argument("--output", metavar="FILE", help="write to a file instead of stdout")
    parser.add_argument(
        "--coverage",
        action="store_true",
        help="how many of aten's operators have a cost, and which have none",
    )
    parser.set_defaults(run=run_ops)


def run_ops(options: Namespace) -> int:
    style: Style = "markdown" if options.format == "markdown" else "plain"
    if options.coverage:
        if options.format == "csv":
            raise TargetError("--coverage is shown as table or markdown")
        text = _coverage_text(options.filter, style)
    else:
        rows = list(rows_of(options.filter))
        if not rows:
            raise TargetError(f"no operator fits --filter {options.filter!r}")
        text = _csv(rows) if options.format == "csv" else _table(rows, style)
    emit(text, options.output)
    return OK


def rows_of(pattern: str | None = None) -> Iterator[Row]:
    """Operator, kind, cost and source of every rule that fits the pattern."""
    from dispatch_flops.operators import (
        formulas,  # noqa: F401  (fills the registry)
        registry,
    )

    for name, rule in registry.rules().items():
        if _fits(name, pattern):
            yield name, rule.kind, cost_of(rule), _source_of(rule)


def cost_of(rule: Rule) -> str:
    """In words: the table's note, else the docstring's MACs and FLOPs, else its first sentence."""
    if rule.note:
        return rule.note
    doc = _doc(rule)
    found = _COST.search(doc)
    return found[1].strip() if found else doc.partition(". ")[0].removesuffix(".")


def _source_of(rule: Rule) -> str:
    """Where the cost comes from, as its docstring says; else the file that it stands in."""
    found = _SOURCE.search(_doc(rule))
    if found:
        return found[1]
    if not rule.builtin:
        return "registered by the user"
    module = rule.formula.__module__
    return module.removeprefix("dispatch_flops.operators.") if module.startswith(_FORMULAS) else ""


def _doc(rule: Rule) -> str:
    return " ".join((rule.formula.__doc__ or "").split())


def _fits(name: str, pattern: str | None) -> bool:
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
    """The text, whole in Markdown; in a terminal as much as leaves a line readable."""
    if style == "markdown":
        return text.replace("|", "\\|")
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _csv(rows: Sequence[Row]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([_HEADER, *rows])
    return buffer.getvalue()


# -- coverage -------------------------------------------------------------------------------------


def coverage() -> tuple[dict[str, list[str]], int]:
    """``{kind: overloads of aten}``, kind "none" for those without a cost; how many it holds all.

    Composite overloads are no kind: torch takes them apart before they are counted.
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
    found, everything = coverage()
    counts = Counter({kind: len(ops) for kind, ops in found.items()})
    whole = counts.total()
    kinds = ("formula", "pointwise", "reduction", "free", "none")
    rows = [[kind, str(counts[kind]), percent_text(counts[kind], whole)] for kind in kinds]
    parts = [
        f"aten has {everything} overloads; {everything - whole} are composite: torch takes them "
        f"apart into the other {whole} before they are counted.",
        table(["Kind", "Overloads", "Share"], rows, ("left", "right", "right"), style),
    ]
    missing = [op for op in found.get("none", []) if _fits(op, pattern)]
    if missing:
        listed = "\n".join(
            code(op, style) if style == "plain" else f"- {code(op, style)}" for op in missing
        )
        parts.append(f"Without a cost ({len(missing)}):\n{listed}")
    return "\n\n".join(parts)
