"""``diff`` and ``check``: what changed between two profiles, and whether limits are kept."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dispatch_flops.analysis.diff import Change, diff
from dispatch_flops.analysis.figures import Figures, Key
from dispatch_flops.analysis.latency import latency_of, phase_seconds
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.cli.arguments import Commands, add_command, add_phase_option, natural
from dispatch_flops.cli.output import FAILED, OK, emit
from dispatch_flops.cli.show import load
from dispatch_flops.errors import TargetError
from dispatch_flops.profile import OUTSIDE, Profile
from dispatch_flops.profile.cost import Phase
from dispatch_flops.renderers.text import Align, Style, at_least, code, table
from dispatch_flops.units import (
    Number,
    bytes_text,
    change_text,
    count_text,
    flops_text,
    macs_text,
    params_text,
    parse_count,
    seconds_text,
)

_DIFF_EPILOG = """\
Modules are matched by name, operators by overload. Only what differs in a count is listed;
latencies, which never repeat exactly, are shown where both profiles have them.

examples:
  dispatch-flops diff before.json after.json
  dispatch-flops diff small.json large.json --all --depth 2 --format markdown
  dispatch-flops diff expected.json now.json --exit-code    # 1 if any count changed
"""

_CHECK_EPILOG = """\
Limits are of the whole run: the model and what ran beside it, in all phases that were profiled.
A total that is only a lower bound, because an operator in it has no known cost, keeps no limit
unless --allow-uncounted is given.

examples:
  dispatch-flops check profile.json --max-macs 4.2G --max-params 30M
  dispatch-flops check profile.json --max-latency 5ms --max-flops 8.4e9 --phase forward
"""


def add_commands(commands: Commands) -> None:
    parser = add_command(commands, "diff", "what changed from one profile to another", _DIFF_EPILOG)
    parser.add_argument("before", metavar="BEFORE", help="a profile saved as JSON")
    parser.add_argument("after", metavar="AFTER", help="another")
    parser.add_argument("--all", action="store_true", help="list what did not change, too")
    parser.add_argument(
        "--depth", type=natural, metavar="N", help="levels of modules below the model"
    )
    parser.add_argument("--format", choices=("table", "markdown"), default="table")
    parser.add_argument("--output", metavar="FILE", help="write to a file instead of stdout")
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 if a count changed")
    add_phase_option(parser)
    parser.set_defaults(run=run_diff)

    parser = add_command(commands, "check", "hold a saved profile to limits", _CHECK_EPILOG)
    parser.add_argument("file", metavar="FILE", help="a profile saved as JSON; - reads stdin")
    for name, entry in _LIMITS.items():
        parser.add_argument(f"--max-{name}", metavar="N", help=entry.help)
    parser.add_argument(
        "--allow-uncounted", action="store_true", help="take lower bounds for the whole"
    )
    add_phase_option(parser)
    parser.set_defaults(run=run_check)


# -- diff -----------------------------------------------------------------------------------------


def run_diff(options: Namespace) -> int:
    before, after = load(options.before), load(options.after)
    compared = diff(before, after, options.phase)
    style: Style = "markdown" if options.format == "markdown" else "plain"
    modules = compared.modules if options.all else compared.changed_modules()
    operators = compared.operators if options.all else compared.changed_operators()
    if options.depth is not None:
        modules = [change for change in modules if _depth(change.name) <= options.depth]
    parts = [*_unlike(before, after), _table("", [compared.total], _COLUMNS, style)]
    if modules:
        parts.append(_table("Module", modules, _COLUMNS, style))
    if operators:
        parts.append(_table("Operator", operators, [_CALLS, *_COLUMNS[1:]], style))
    changed = bool(compared.changed_modules() or compared.changed_operators())
    if not changed:
        parts.append("No count changed.")
    emit("\n\n".join(parts), options.output)
    return FAILED if changed and options.exit_code else OK


def _unlike(before: Profile, after: Profile) -> Iterator[str]:
    """How the two runs differ in what they are runs of."""
    for what, of in (
        ("phases", lambda profile: " + ".join(phases_of(profile)) or "none"),
        ("device", lambda profile: profile.run.device),
        ("attention", lambda profile: f"causal {profile.run.causal}"),
    ):
        if of(before) != of(after):
            yield f"These are not alike: {what} {of(before)}, then {of(after)}."


@dataclass(frozen=True, slots=True)
class _Column:
    """A figure of a change: its value before and after, and how it is written."""

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
        if first == second:  # alike when rounded
            first, second = f"{before:,}", f"{after:,}"
        return f"{first} -> {second} ({change_text(before, after)})"


def _figure(title: str, key: Key, text: Callable[[Number | None], str]) -> _Column:
    def values(change: Change) -> tuple[Number | None, Number | None]:
        return _value(change.before, key), _value(change.after, key)

    return _Column(title, values, text)


def _value(figures: Figures | None, key: Key) -> Number | None:
    return None if figures is None else figures.value(key)


_COLUMNS = [
    _figure("Params", "params", lambda n: params_text(None if n is None else int(n))),
    _figure("MACs", "macs", count_text),
    _figure("FLOPs", "flops", count_text),
    _figure("Bytes", "bytes", bytes_text),
    _figure("Latency", "latency", seconds_text),
]
_RIGHT: list[Align] = ["right"] * len(_COLUMNS)
_CALLS = _Column("Calls", lambda change: (change.calls_before, change.calls_after), count_text)


def _table(title: str, changes: Sequence[Change], columns: Sequence[_Column], style: Style) -> str:
    timed = any(
        _value(side, "latency") is not None for c in changes for side in (c.before, c.after)
    )
    shown = [column for column in columns if timed or column.title != "Latency"]
    rows = [
        [_name(change, title, style), *(column.cell(change) for column in shown)]
        for change in changes
    ]
    header = [title, *(column.title for column in shown)]
    return table(header, rows, ["left", *_RIGHT[: len(shown)]], style)


def _name(change: Change, title: str, style: Style) -> str:
    if change.name:
        return code(change.name, style)
    return "(model)" if title else "everything"


def _depth(fqn: str) -> int:
    return fqn.count(".") + 1 if fqn and not fqn.startswith(OUTSIDE) else 0


# -- check ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """value: of a profile in a phase (None: all). countable: operators are its parts."""

    help: str
    label: str
    value: Callable[[Profile, Phase | None], Number | None]
    parse: Callable[[str], Number]
    text: Callable[[Number | None], str]
    countable: bool = True


def seconds(text: str) -> float:
    """``"5ms" -> 0.005``; also ``1.5s``, ``300us``, ``0.2``. Raises ValueError else."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(s|ms|us|ns|)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no time: write 5ms, 300us or 1.5s")
    return float(match[1]) * {"s": 1.0, "": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[match[2]]


def _latency(profile: Profile, phase: Phase | None) -> float | None:
    measured = phase_seconds(profile).get(phase or "forward")
    return latency_of(profile.root, phase or "forward") if measured is None else measured


_LIMITS = {
    "macs": _Limit(
        help="multiply-accumulates, such as 4.2G",
        label="MACs",
        value=lambda profile, phase: profile.total(phase).macs,
        parse=parse_count,
        text=macs_text,
    ),
    "flops": _Limit(
        help="floating-point operations, such as 8.4G or 8.4e9",
        label="FLOPs",
        value=lambda profile, phase: profile.total(phase).flops,
        parse=parse_count,
        text=flops_text,
    ),
    "bytes": _Limit(
        help="bytes read and written, such as 1.5G",
        label="bytes",
        value=lambda profile, phase: profile.total(phase).bytes_total,
        parse=parse_count,
        text=bytes_text,
    ),
    "params": _Limit(
        help="parameters, such as 30M",
        label="params",
        value=lambda profile, _: profile.total_params,
        parse=parse_count,
        text=lambda n: params_text(None if n is None else int(n)),
        countable=False,
    ),
    "latency": _Limit(
        help="latency of the forward pass (with --phase: of that phase), such as 5ms",
        label="latency",
        value=_latency,
        parse=seconds,
        text=seconds_text,
        countable=False,
    ),
}


def run_check(options: Namespace) -> int:
    limits: dict[str, Number] = {}
    for name, entry in _LIMITS.items():
        text = getattr(options, f"max_{name}")
        if text is not None:
            try:
                limits[name] = entry.parse(text)
            except ValueError as error:
                raise TargetError(f"--max-{name}: {error}") from None
    if not limits:
        raise TargetError(f"check needs a limit: --max-{', --max-'.join(_LIMITS)}")
    profile = load(options.file)
    violated = list(violations(profile, limits, options.phase, options.allow_uncounted))
    kept = f"within {'the limit' if len(limits) == 1 else 'all limits'}: {', '.join(limits)}"
    emit("\n".join(violated) if violated else kept)
    return FAILED if violated else OK


def violations(
    profile: Profile, limits: dict[str, Number], phase: Phase | None, allow_uncounted: bool
) -> Iterator[str]:
    """One line per limit that the profile exceeds, or is not known to keep."""
    uncounted = sorted(
        {op.op for op in profile.op_totals() if op.uncounted and phase in (None, op.phase)}
    )
    for name, limit in limits.items():
        entry = _LIMITS[name]
        value = entry.value(profile, phase)
        most = f"the limit of {entry.text(limit)}{_exact(limit)}"
        bound = entry.countable and bool(uncounted)
        if value is None:
            yield f"{entry.label}: not measured in this profile, so not known to keep {most}"
        elif value > limit:
            known = at_least(entry.text(value), bound)
            yield f"{entry.label}: {known}{_exact(value)} exceed {most}"
        elif bound and not allow_uncounted:
            yield (
                f"{entry.label}: >= {entry.text(value)} may exceed {most}: no cost is known for "
                f"{', '.join(uncounted)}"
            )


def _exact(value: Number) -> str:
    return f" ({value:,})" if isinstance(value, int) and value >= 1000 else ""
