"""``sweep``: one model at many sizes, and how its cost grows with them."""

from __future__ import annotations

import csv
import io
import itertools
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatch_flops.analysis.latency import latency_of
from dispatch_flops.analysis.scaling import Exponent, exponents
from dispatch_flops.cli.arguments import (
    TARGETS,
    Commands,
    add_command,
    add_model_options,
    add_set_option,
    assignments,
    plain_value,
)
from dispatch_flops.cli.output import OK, emit, progress_bar
from dispatch_flops.cli.run import measure
from dispatch_flops.cli.sweep_plot import Figure, add_plot_option, numeric, sizes_text
from dispatch_flops.errors import TargetError
from dispatch_flops.profile import Profile
from dispatch_flops.renderers.text import Style, at_least, code, table
from dispatch_flops.units import bytes_text, count_text, number_text, params_text, seconds_text

_EPILOG = f"""\
{TARGETS}
Values are listed (1,2,4) or doubled through (128..4096 is 128, 256, ..., 4096); every
combination is profiled. Names stand in --input-shape, or are arguments of the factories; hf:
targets take batch and seq. On --device meta a sweep needs no memory and little time.

examples:
  dispatch-flops sweep model.py:make --input-shape batch,seq:int64 --set batch=1,8 seq=128..4096
  dispatch-flops sweep hf:config.json --set seq=128..8192 --device meta --plot scaling.svg
  dispatch-flops sweep model.py:make --input-shape 8,3,32,32 --set width=64,128,256 --format csv
"""
_FORMATS = ("table", "markdown", "csv")
_MOST_POINTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One point of the sweep: its sizes, and what it cost."""

    sizes: Mapping[str, Any]
    profile: Profile


def add_commands(commands: Commands) -> None:
    parser = add_command(commands, "sweep", "profile a model at many sizes", _EPILOG)
    parser.add_argument("target", metavar="TARGET", help="the model: see below")
    add_set_option(parser, "the values of a name: batch=1,2,4,8 or seq=128..4096", "--sweep")
    add_model_options(parser)
    parser.add_argument("--format", choices=_FORMATS, default=_FORMATS[0])
    parser.add_argument("--output", metavar="FILE", help="write to a file instead of stdout")
    add_plot_option(parser)
    parser.set_defaults(run=run_sweep)


def run_sweep(options: Namespace) -> int:
    grid = points(assignments(options.set))
    figure = None if options.plot is None else Figure.of(grid, options.plot)
    rows = []
    with progress_bar(len(grid)) as advance:
        for sizes in grid:
            advance(sizes_text(sizes))
            rows.append(Row(sizes=sizes, profile=measure(options, sizes)))
    if options.format == "csv":
        text = _csv(rows)
    else:
        style: Style = "markdown" if options.format == "markdown" else "plain"
        parts = [_table(rows, style), _scaling(rows, style)]
        text = "\n\n".join(part for part in parts if part)
    emit(text, options.output)
    if figure is not None:
        bound = any(row.profile.is_lower_bound for row in rows)
        figure.write([row.profile.total().flops for row in rows], lower_bound=bound)
    return OK


def run_for_profile(options: Namespace) -> int:
    """``profile --sweep``: what --set gives holds at every point."""
    if options.format not in (None, *_FORMATS):
        raise TargetError(f"--sweep gives --format {', '.join(_FORMATS)}: not {options.format}")
    changed = {"set": [*options.set, *options.sweep], "format": options.format or _FORMATS[0]}
    return run_sweep(Namespace(**{**vars(options), **changed}))


def points(swept: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every combination of the values, the last name changing fastest."""
    if not swept:
        raise TargetError("sweep needs sizes to go through: --set seq=128..4096")
    columns = {name: values(name, text) for name, text in swept.items()}
    grid = [
        dict(zip(columns, chosen, strict=True)) for chosen in itertools.product(*columns.values())
    ]
    if len(grid) > _MOST_POINTS:
        raise TargetError(f"--set: {len(grid)} combinations are too many")
    return grid


def values(name: str, text: str) -> list[Any]:
    """``"1,2,8..32" -> [1, 2, 8, 16, 32]``; raises TargetError where a range is none."""
    found: list[Any] = []
    for part in text.split(","):
        low, dots, high = part.partition("..")
        if not dots:
            found.append(plain_value(part))
            continue
        if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
            raise TargetError(
                f"--set {name}={part}: a range is two sizes from 1 on, the smaller first: 128..4096"
            )
        size = int(low)
        while size <= int(high):
            found.append(size)
            size *= 2
    if "" in found:
        raise TargetError(f"--set {name}={text}: a value is empty")
    return list(dict.fromkeys(found))


def _table(rows: Sequence[Row], style: Style) -> str:
    timed = any(latency_of(row.profile.root) is not None for row in rows)
    header = [
        *rows[0].sizes,
        "Params",
        "MACs",
        "FLOPs",
        "Bytes",
        *(["fwd latency"] if timed else []),
    ]
    cells = []
    for row in rows:
        total, bound = row.profile.total(), row.profile.is_lower_bound
        line = [
            *(code(str(value), style) for value in row.sizes.values()),
            params_text(row.profile.total_params),
            at_least(count_text(total.macs), bound),
            at_least(count_text(total.flops), bound),
            at_least(bytes_text(total.bytes_total), bound),
        ]
        cells.append([*line, seconds_text(latency_of(row.profile.root))] if timed else line)
    return table(header, cells, ["right"] * len(header), style)


def _scaling(rows: Sequence[Row], style: Style) -> str:
    """How FLOPs, MACs and bytes grow with each size that is a number; "" where nothing does."""
    sizes = numeric([row.sizes for row in rows])
    grid = [{name: row.sizes[name] for name in sizes} for row in rows]
    totals = [row.profile.total() for row in rows]
    counts = {
        "FLOPs": [cost.flops for cost in totals],
        "MACs": [cost.macs for cost in totals],
        "bytes": [cost.bytes_total for cost in totals],
    }
    cells = [
        _scaling_row(label, found)
        for label, numbers in counts.items()
        for found in exponents(grid, numbers)
    ]
    header = ["Fitted", "from", "to", "at the upper end"]
    return table(header, cells, ["left", "right", "right", "left"], style) if cells else ""


def _scaling_row(label: str, found: Exponent) -> list[str]:
    return [
        f"{label} ~ {found.name}^{number_text(found.overall)}",
        number_text(found.smallest),
        number_text(found.largest),
        f"{found.name}^{number_text(found.last)}",
    ]


def _csv(rows: Sequence[Row]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    counts = ["params", "macs", "flops", "bytes", "latency_s", "lower_bound"]
    writer.writerow([*rows[0].sizes, *counts])
    for row in rows:
        total = row.profile.total()
        writer.writerow(
            [
                *row.sizes.values(),
                row.profile.total_params,
                total.macs,
                total.flops,
                total.bytes_total,
                latency_of(row.profile.root),
                int(row.profile.is_lower_bound),
            ]
        )
    return buffer.getvalue()
