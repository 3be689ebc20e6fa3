"""Formats that a profile can be shown in, by name."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dispatch_flops.errors import TargetError
from dispatch_flops.profile import Profile
from dispatch_flops.renderers import (
    View,
    chrome_trace,
    collapsed,
    communication,
    csv,
    deepspeed,
    html,
    memory_table,
    overview,
    table,
)
from dispatch_flops.renderers.text import Style
from dispatch_flops.renderers.view import Table

DEFAULT = "overview"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Format of a profile. A file name that ends with ``suffix`` selects it.

    options: those that select what is shown, and that it acts on.
    """

    help: str
    render: Callable[[Profile, View], str]
    suffix: str = ""
    options: tuple[str, ...] = ()


def _tables(style: Style) -> Callable[[Profile, View], str]:
    def render(profile: Profile, view: View) -> str:
        shown: list[Table] = ["modules", "operators"]
        if profile.is_lower_bound:
            shown.append("uncounted")
        if profile.communication:
            shown.append("communication")
        views = [dataclasses.replace(view, table=name, style=style) for name in shown]
        tables = [table.render(profile, each) for each in views]
        if profile.memory is not None:
            tables.append(memory_table.render(profile, dataclasses.replace(view, style=style)))
        return "\n\n".join(tables)

    return render


def _csv_operators(profile: Profile, view: View) -> str:
    return csv.render(profile, dataclasses.replace(view, table="operators"))


def _csv_communication(profile: Profile, view: View) -> str:
    return csv.render(profile, dataclasses.replace(view, table="communication"))


def _json(profile: Profile, view: View) -> str:
    return profile.to_json(indent=2)


FORMATS: dict[str, Format] = {
    "overview": Format(
        help="totals, a line per module, the top operators",
        render=overview.render,
        options=("depth", "top", "fold", "sort", "columns", "machine"),
    ),
    "deepspeed": Format(
        help="DeepSpeed's report, with a table of operators",
        render=deepspeed.render,
        options=("depth", "top", "fold", "detailed"),
    ),
    "table": Format(
        help="tables of modules and operators", render=_tables("plain"), options=("depth",)
    ),
    "markdown": Format(
        help="the same tables in Markdown",
        render=_tables("markdown"),
        suffix=".md",
        options=("depth",),
    ),
    "json": Format(
        help="the whole profile, as show, diff and check read it", render=_json, suffix=".json"
    ),
    "csv": Format(help="one row per module", render=csv.render, suffix=".csv"),
    "csv-operators": Format(help="one row per module and operator", render=_csv_operators),
    "comm": Format(
        help="what the rank sends and receives, by module and group", render=communication.render
    ),
    "csv-comm": Format(help="one row per module, phase, kind and group", render=_csv_communication),
    "memory": Format(
        help="the peak of memory, what it consists of, and memory by module",
        render=memory_table.render,
        options=("depth",),
    ),
    "collapsed": Format(
        help="stacks for flame graphs, weighted by FLOPs",
        render=collapsed.render,
        suffix=".collapsed",
    ),
    "trace": Format(
        help="a timeline for Perfetto", render=chrome_trace.render, suffix=".trace.json"
    ),
    "html": Format(
        help="an interactive page for the browser",
        render=html.render,
        suffix=".html",
        options=("machine",),
    ),
}


def choose_format(name: str | None, output: str | None) -> Format:
    """Return the format of a profile that is named, else that of the file's suffix."""
    suffixes = {entry.suffix: known for known, entry in FORMATS.items() if entry.suffix}
    return FORMATS[name or _format_of_suffix(output, suffixes, DEFAULT)]


_SUFFIXES = {".md": "markdown", ".csv": "csv", ".json": "json", ".html": "html"}


def format_named(options: Namespace, formats: Sequence[str]) -> str:
    """Return the value of --format, else the format of --output's suffix, else the first."""
    suffixes = {suffix: name for suffix, name in _SUFFIXES.items() if name in formats}
    named: str | None = options.format
    return named or _format_of_suffix(options.output, suffixes, formats[0])


def _format_of_suffix(output: str | None, suffixes: Mapping[str, str], default: str) -> str:
    """Return the format with the longest of the suffixes that the file's name ends with.

    The default is that of stdout, of files without a suffix, and of ".txt". Raises TargetError for
    another suffix, naming the known ones.
    """
    file = Path((output or "").lower())
    fitting = [suffix for suffix in suffixes if file.name.endswith(suffix)]
    if fitting:
        return suffixes[max(fitting, key=len)]
    if file.suffix not in ("", ".txt"):
        raise TargetError(
            f"--output {output}: the suffix {file.suffix} is unknown; use one of "
            f"{', '.join(('.txt', *suffixes))}, or add --format"
        )
    return default


def table_style(format: str) -> Style:
    """Return the style of tables for a value of --format."""
    return "markdown" if format == "markdown" else "plain"


def check_options(options: Namespace, *, but: Collection[str] = ()) -> None:
    """Raise TargetError for an option of what is shown that the format does not act on.

    but: options that have another effect, too.
    """
    chosen = choose_format(options.format, options.output)
    for name, option in _given(options):
        if name not in (*chosen.options, *but):
            fitting = [known for known, entry in FORMATS.items() if name in entry.options]
            shown = next(known for known, entry in FORMATS.items() if entry is chosen)
            raise TargetError(
                f"{option} has no effect on the format {shown}; omit it, or use --format "
                f"{' or '.join(fitting)}"
            )


def refuse_options(options: Namespace, *, of: str, but: Collection[str]) -> None:
    """Raise TargetError for an option of what is shown that has no effect on ``of``."""
    for name, option in _given(options):
        if name not in but:
            raise TargetError(f"{option} has no effect on {of}; omit it")


def _given(options: Namespace) -> Iterator[tuple[str, str]]:
    """Yield name and text of each option that selects what is shown of a profile."""
    for name in ("depth", "top", "fold", "sort", "columns", "machine"):
        value = getattr(options, name, None)
        if value is not None:
            yield name, f"--no-{name}" if value is False else f"--{name}"
    if not options.detailed:
        yield "detailed", "--no-detailed"
