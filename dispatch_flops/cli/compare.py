"""The command ``diff``: what changed between two saved profiles."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dispatch_flops.analysis.diff import Change, diff
from dispatch_flops.analysis.figures import Figures, Key
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.cli.arguments import (
    DEPTH_HELP,
    Commands,
    add_command,
    add_phase_option,
    add_table_options,
    natural,
    table_style,
)
from dispatch_flops.cli.exit_codes import CHECK_FAILED, OK
from dispatch_flops.cli.output import emit
from dispatch_flops.cli.show import load_profile
from dispatch_flops.profile import OUTSIDE, Profile
from dispatch_flops.renderers.run_facts import inputs_text, mode_text
from dispatch_flops.renderers.text import Align, Style, at_least, code, table
from dispatch_flops.units import (
    Number,
    bytes_text,
    change_text,
    count_text,
    params_text,
    seconds_text,
)

_EPILOG = """\
Modules are matched by name, operators by overload. Only those with a changed count are listed.
A latency is shown if one was measured; a different latency alone is not a change.

examples:
  dispatch-flops diff before.json after.json
  dispatch-flops diff small.json large.json --all --depth 2 --format markdown
  dispatch-flops diff expected.json now.json --exit-code    # exits with 1 if a count changed
"""


def add_diff(commands: Commands) -> None:
    parser = add_command(commands, "diff", "compare two saved profiles", _EPILOG)
    parser.add_argument("before", metavar="BEFORE", help="the earlier profile, saved as JSON")
    parser.add_argument("after", metavar="AFTER", help="the later profile, saved as JSON")
    parser.add_argument(
        "--all", action="store_true", help="also list modules and operators without a change"
    )
    parser.add_argument("--depth", type=natural, metavar="N", help=DEPTH_HELP)
    add_table_options(parser, "table", "markdown")
    parser.add_argument(
        "--exit-code", action="store_true", help="exit with 1 if a count changed, else with 0"
    )
    add_phase_option(parser)
    parser.set_defaults(run=run_diff)


def run_diff(options: Namespace) -> int:
    before, after = load_profile(options.before), load_profile(options.after)
    compared = diff(before, after, options.phase)
    style = table_style(options.format)
    modules = compared.modules if options.all else compared.changed_modules()
    operators = compared.operators if options.all else compared.changed_operators()
    if options.depth is not None:
        modules = [change for change in modules if _depth(change.name) <= options.depth]
    memory = _memory_change(before, after)
    parts = [
        *_run_differences(before, after),
        *memory,
        _table("", [compared.total], _COLUMNS, style),
    ]
    if modules:
        parts.append(_table("Module", modules, _COLUMNS, style))
    if operators:
        parts.append(_table("Operator", operators, [_CALLS, *_COLUMNS[1:]], style))
    has_changed = bool(compared.changed_modules() or compared.changed_operators())
    if not has_changed:
        parts.append("No count changed.")
    emit("\n\n".join(parts), options.output)
    return CHECK_FAILED if has_changed and options.exit_code else OK


def _memory_change(before: Profile, after: Profile) -> Iterator[str]:
    """Yield a sentence on the peaks of memory, if both runs followed it."""
    if before.memory is not None and after.memory is not None:
        first, second = before.memory.peak_bytes, after.memory.peak_bytes
        texts = [
            at_least(bytes_text(memory.peak_bytes), memory.is_lower_bound)
            for memory in (before.memory, after.memory)
        ]
        change = f", then {texts[1]} ({change_text(first, second)})" if first != second else ""
        yield f"Peak memory: {texts[0]}{change}."


def _run_differences(before: Profile, after: Profile) -> Iterator[str]:
    """Yield a sentence for each setting of the runs that makes their counts incomparable."""
    for setting, value_of in (
        ("phases", lambda profile: " + ".join(phases_of(profile)) or "none"),
        ("device", lambda profile: profile.run.device),
        ("causal attention", lambda profile: profile.run.causal),
        ("FLOPs", lambda profile: profile.run.flops),
        ("operators of tensor subclasses", lambda profile: profile.run.subclass),
        ("target of attention without data", lambda profile: profile.run.target),
    ):
        first, second = value_of(before), value_of(after)
        if first != second:
            yield f"The runs differ in {setting}: {first}, then {second}."
    one, other = before.run, after.run
    if None not in (one.inputs, other.inputs) and one.inputs != other.inputs:
        yield f"The runs differ in inputs: {inputs_text(one)}, then {inputs_text(other)}."
    if None not in (one.grad_mode, other.grad_mode) and mode_text(one) != mode_text(other):
        yield f"The runs differ in mode: {mode_text(one)}, then {mode_text(other)}."


@dataclass(frozen=True, slots=True)
class _Column:
    """Column of a figure: its values before and after a change, and their text."""

    title: str
    values: Callable[[Change], tuple[Number | None, Number | None]]
    text: Callable[[Number | None], str]

    def cell(self, change: Change) -> str:
        before, after = self.values(change)
        a, b = change.before, change.after
        first = at_least(self.text(before), a is not None and a.lower_bound)
        second = at_least(self.text(after), b is not None and b.lower_bound)
        if a is None:
            return f"new: {second}"
        if b is None:
            return f"gone: {first}"
        if before == after and first == second:
            return first
        if first == second:  # they differ only in digits that rounding hides
            first, second = f"{before:,}", f"{after:,}"
        return f"{first} -> {second} ({change_text(before, after)})"


def _figure_column(title: str, key: Key, text: Callable[[Number | None], str]) -> _Column:
    def values(change: Change) -> tuple[Number | None, Number | None]:
        return _value(change.before, key), _value(change.after, key)

    return _Column(title, values, text)


def _value(figures: Figures | None, key: Key) -> Number | None:
    return None if figures is None else figures.value(key)


_COLUMNS = [
    _figure_column("Params", "params", lambda n: params_text(None if n is None else int(n))),
    _figure_column("MACs", "macs", count_text),
    _figure_column("FLOPs", "flops", count_text),
    _figure_column("Bytes", "bytes", bytes_text),
    _figure_column("Latency", "latency", seconds_text),
]
_RIGHT: list[Align] = ["right"] * len(_COLUMNS)
_CALLS = _Column("Calls", lambda change: (change.calls_before, change.calls_after), count_text)


def _table(title: str, changes: Sequence[Change], columns: Sequence[_Column], style: Style) -> str:
    is_timed = any(
        _value(side, "latency") is not None for c in changes for side in (c.before, c.after)
    )
    shown = [column for column in columns if is_timed or column.title != "Latency"]
    rows = [
        [_row_name(change, title, style), *(column.cell(change) for column in shown)]
        for change in changes
    ]
    header = [title, *(column.title for column in shown)]
    return table(header, rows, ["left", *_RIGHT[: len(shown)]], style)


def _row_name(change: Change, title: str, style: Style) -> str:
    if change.name:
        return code(change.name, style)
    return "(model)" if title else "everything"


def _depth(fqn: str) -> int:
    return fqn.count(".") + 1 if fqn and not fqn.startswith(OUTSIDE) else 0
