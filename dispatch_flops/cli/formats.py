"""Formats that a profile can be shown in, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.errors import TargetError
from dispatch_flops.profile import Profile
from dispatch_flops.renderers import chrome_trace, collapsed, csv, deepspeed, html, json, table
from dispatch_flops.renderers.text import Style

DEFAULT = "deepspeed"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How a profile is shown; each format uses the settings that apply to it.

    depth: levels of submodules, ``None`` for all.
    machine: the machine whose peak rates the run is compared with.
    """

    depth: int | None = None
    top: int = 1
    detailed: bool = True
    fold: bool = False
    machine: Machine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Format of a profile. A file name that ends with ``suffix`` selects it."""

    help: str
    render: Callable[[Profile, View], str]
    suffix: str = ""


def _deepspeed(profile: Profile, view: View) -> str:
    return deepspeed.render(
        profile,
        profile_step=profile.run.step,
        module_depth=-1 if view.depth is None else view.depth,
        top_modules=view.top,
        detailed=view.detailed,
        fold=view.fold,
    )


def _tables(style: Style) -> Callable[[Profile, View], str]:
    def render(profile: Profile, view: View) -> str:
        depth = None if view.depth is None else view.depth + 1
        parts = [
            table.render(profile, depth=depth, style=style),
            table.operator_table(profile, style=style),
        ]
        if profile.is_lower_bound:
            parts.append(table.uncounted_table(profile, style=style))
        return "\n\n".join(parts)

    return render


def _html(profile: Profile, view: View) -> str:
    try:
        return html.render(profile, machine=view.machine)
    except ImportError as error:
        raise TargetError(
            f"the HTML report needs {error.name}: pip install 'dispatch-flops[report]'"
        ) from None


FORMATS: dict[str, Format] = {
    "deepspeed": Format(help="DeepSpeed's report, with a table of operators", render=_deepspeed),
    "table": Format(help="tables of modules and operators", render=_tables("plain")),
    "markdown": Format(
        help="the same tables in Markdown", render=_tables("markdown"), suffix=".md"
    ),
    "json": Format(
        help="the whole profile, as show, diff and check read it",
        render=lambda p, _: json.render(p),
        suffix=".json",
    ),
    "csv": Format(help="one row per module", render=lambda p, _: csv.modules(p), suffix=".csv"),
    "csv-operators": Format(
        help="one row per module and operator", render=lambda p, _: csv.operators(p)
    ),
    "collapsed": Format(
        help="stacks for flame graphs, weighted by FLOPs",
        render=lambda p, _: collapsed.render(p),
        suffix=".collapsed",
    ),
    "trace": Format(
        help="a timeline for Perfetto",
        render=lambda p, _: chrome_trace.render(p),
        suffix=".trace.json",
    ),
    "html": Format(help="an interactive page for the browser", render=_html, suffix=".html"),
}


def choose_format(name: str | None, output: str | None) -> Format:
    """Return the format named, else the one of the file's suffix, else the default."""
    if name is not None:
        return FORMATS[name]
    filename = "" if output is None else Path(output).name.lower()
    fitting = [
        entry for entry in FORMATS.values() if entry.suffix and filename.endswith(entry.suffix)
    ]
    return max(fitting, key=lambda entry: len(entry.suffix), default=FORMATS[DEFAULT])
