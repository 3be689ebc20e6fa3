"""The command ``sweep``: profile a model at many sizes, and show how its cost grows."""

from __future__ import annotations

import itertools
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatch_flops.analysis.latency import inexact_phases, latency_of
from dispatch_flops.analysis.scaling import Exponent, exponents
from dispatch_flops.cli.arguments import (
    TARGET_HELP,
    Commands,
    add_command,
    add_machine_option,
    add_model_options,
    add_set_option,
    add_table_options,
    add_target_argument,
    machine_named,
    parse_assignments,
    parse_value,
)
from dispatch_flops.cli.exit_codes import OK
from dispatch_flops.cli.formats import table_style
from dispatch_flops.cli.output import csv_text, emit, print_progress, progress_bar
from dispatch_flops.cli.run import measure
from dispatch_flops.cli.sweep_machine import (
    MachineColumn,
    MachinePoint,
    columns_for,
    machine_point,
    note_on,
)
from dispatch_flops.cli.sweep_plot import SweepPlot, add_plot_option, numeric_names, sizes_text
from dispatch_flops.errors import DispatchFlopsError, TargetError
from dispatch_flops.profile import Profile
from dispatch_flops.renderers.memory_table import marked_bytes
from dispatch_flops.renderers.text import Style, about, at_least, code, table
from dispatch_flops.units import bytes_text, count_text, number_text, params_text, seconds_text

SWEEP_FORMATS = ("table", "markdown", "csv")

_EPILOG = f"""\
{TARGET_HELP}
Values are a list (batch=1,2,4) or a range that doubles (seq=128..4096 is 128, 256, ..., 4096).
Every combination of values is profiled. A name is a size in --input-shape or a keyword argument
of a factory; hf: targets accept batch and seq, timm: targets batch. With --device meta, a sweep
needs no memory and little time. If a point fails or is interrupted, those before it are shown.

examples:
  dispatch-flops sweep model.py:make --input-shape batch,seq:int64 --set batch=1,8 seq=128..4096
  dispatch-flops sweep hf:config.json --set seq=128..8192 --device meta --plot scaling.svg
  dispatch-flops sweep model.py:make --input-shape 8,3,32,32 --set width=64,128,256 --format csv
  dispatch-flops sweep hf:config.json --set seq=128..1024 --backward --memory --device meta
  dispatch-flops sweep hf:config.json --set batch=1..64 --device meta --machine H100 --plot p.svg
"""
_MAX_POINTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One point of a sweep: its sizes, its profile and, with --machine, what that allows."""

    sizes: Mapping[str, Any]
    profile: Profile
    point: MachinePoint | None = None


def add_sweep(commands: Commands) -> None:
    parser = add_command(commands, "sweep", "profile a model at many sizes", _EPILOG)
    add_target_argument(parser)
    add_set_option(parser, "values to sweep: batch=1,2,4,8 or seq=128..4096", "--sweep")
    add_model_options(parser)
    add_table_options(parser, *SWEEP_FORMATS)
    add_plot_option(parser)
    add_machine_option(
        parser,
        "show the least time, attainable rate and MFU ceiling on a machine, in the plot as well: a "
        "name such as H100, measure for this machine, or the path of a JSON file",
    )
    parser.set_defaults(run=run_sweep)


def run_sweep(options: Namespace) -> int:
    if options.memory == "timeline":
        raise TargetError("--memory-timeline has no effect on a sweep; use --memory")
    grid = points(parse_assignments(options.set))
    plot = None if options.plot is None else SweepPlot.of_grid(grid, options.plot)
    machine = machine_named(options.machine, options.device)
    rows: list[Row] = []
    try:
        with progress_bar(len(grid)) as advance:
            for sizes in grid:
                advance(sizes_text(sizes))
                profile = measure(options, sizes)
                point = None if machine is None else machine_point(profile, machine)
                rows.append(Row(sizes=sizes, profile=profile, point=point))
    except (DispatchFlopsError, KeyboardInterrupt):
        if rows:
            print_progress(f"the sweep ended early: {len(rows)} of {len(grid)} points are shown")
            _show(rows, options)
        raise
    _show(rows, options)
    if plot is not None:
        is_lower_bound = any(row.profile.is_lower_bound for row in rows)
        plot.write(
            [row.profile.total().flops for row in rows],
            is_lower_bound=is_lower_bound,
            points=[row.point for row in rows if row.point is not None],
        )
    return OK


def _show(rows: Sequence[Row], options: Namespace) -> None:
    if options.format == "csv":
        text = _csv(rows)
    else:
        style = table_style(options.format)
        parts = [_table(rows, style), _scaling_table(rows, style)]
        if rows[0].point is not None:
            is_bound = any(row.profile.is_lower_bound for row in rows)
            parts.append(note_on(rows[0].point.machine, is_lower_bound=is_bound))
        text = "\n\n".join(part for part in parts if part)
    emit(text, options.output)


def points(swept: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return every combination of the values; the last name changes fastest."""
    if not swept:
        raise TargetError("no sizes are given; add --set, such as --set seq=128..4096")
    columns = {name: parse_values(name, text) for name, text in swept.items()}
    grid = [
        dict(zip(columns, chosen, strict=True)) for chosen in itertools.product(*columns.values())
    ]
    if len(grid) > _MAX_POINTS:
        raise TargetError(f"--set gives {len(grid)} combinations; give at most {_MAX_POINTS}")
    return grid


def parse_values(name: str, text: str) -> list[Any]:
    """Parse ``"1,2,8..32"`` as ``[1, 2, 8, 16, 32]``.

    Raises TargetError for an empty value or a range that is not one of sizes.
    """
    found: list[Any] = []
    for part in text.split(","):
        low, dots, high = part.partition("..")
        if not dots:
            found.append(parse_value(part))
            continue
        if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
            raise TargetError(
                f"--set {name}={part} is not a range of sizes; write two sizes of at least 1, the "
                "smaller first, such as 128..4096"
            )
        size = int(low)
        while size <= int(high):
            found.append(size)
            size *= 2
    if "" in found:
        raise TargetError(f"--set {name}={text} has an empty value; write values such as 1,2,4")
    return list({repr(value): value for value in found}.values())  # 1 is not True


def _table(rows: Sequence[Row], style: Style) -> str:
    is_timed = any(latency_of(row.profile.root) is not None for row in rows)
    has_peaks = any(row.profile.memory is not None for row in rows)
    added = _machine_columns(rows)
    header = [
        *rows[0].sizes,
        "Params",
        "MACs",
        "FLOPs",
        "Bytes",
        *(["Peak memory"] if has_peaks else []),
        *(["Forward"] if is_timed else []),
        *(column.heading for column in added),
    ]
    cells = []
    for row in rows:
        total, is_lower_bound = row.profile.total(), row.profile.is_lower_bound
        memory = row.profile.memory
        line = [
            *(code(str(value), style) for value in row.sizes.values()),
            params_text(row.profile.total_params),
            at_least(count_text(total.macs), is_lower_bound),
            at_least(count_text(total.flops), is_lower_bound),
            at_least(bytes_text(total.bytes_total), is_lower_bound),
        ]
        if has_peaks:
            line.append("" if memory is None else marked_bytes(memory.peak_bytes, memory))
        if is_timed:
            latency = seconds_text(latency_of(row.profile.root))
            line.append(about(latency, "forward" in inexact_phases(row.profile)))
        if row.point is not None:
            line += [column.text(column.value(row.point)) for column in added]
        cells.append(line)
    return table(header, cells, ["right"] * len(header), style)


def _machine_columns(rows: Sequence[Row]) -> tuple[MachineColumn, ...]:
    """Return the columns of --machine; none without it."""
    return () if rows[0].point is None else columns_for([row.profile for row in rows])


def _peaks(rows: Sequence[Row]) -> list[int]:
    """Return the peak of memory of each row, in bytes; 0 where it was not followed."""
    return [row.profile.memory.peak_bytes if row.profile.memory else 0 for row in rows]


def _peak_label(rows: Sequence[Row]) -> str:
    """Return the name of the peak, marked as its values are if one of them is not exact."""
    followed = [row.profile.memory for row in rows if row.profile.memory is not None]
    if any(memory.is_approximate for memory in followed):
        return "~ peak memory"
    return at_least("peak memory", any(memory.is_lower_bound for memory in followed))


def _scaling_table(rows: Sequence[Row], style: Style) -> str:
    """Return how counts and the peak of memory grow with each size; "" if none can be fitted.

    ``>=`` marks an exponent of lower bounds.
    """
    rows = _whole_grid(rows)
    names = numeric_names([row.sizes for row in rows])
    grid = [{name: row.sizes[name] for name in names} for row in rows]
    totals = [row.profile.total() for row in rows]
    is_bound = any(row.profile.is_lower_bound for row in rows)
    counts = {
        at_least("FLOPs", is_bound): [cost.flops for cost in totals],
        at_least("MACs", is_bound): [cost.macs for cost in totals],
        at_least("bytes", is_bound): [cost.bytes_total for cost in totals],
        _peak_label(rows): _peaks(rows),
    }
    cells = [
        _scaling_row(label, exponent)
        for label, numbers in counts.items()
        for exponent in exponents(grid, numbers)
    ]
    header = ["Fitted", "from", "to", "at the upper end"]
    return table(header, cells, ["left", "right", "right", "left"], style) if cells else ""


def _whole_grid(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows of a sweep up to the last one that completes a grid of their sizes.

    A sweep that ended early has no full grid, and exponents of one size would mix in the others.
    """
    values: list[set[str]] = [set() for _ in rows[0].sizes]
    complete = 0
    for count, row in enumerate(rows, start=1):
        for known, value in zip(values, row.sizes.values(), strict=True):
            known.add(repr(value))
        if count == math.prod(map(len, values)):
            complete = count
    return rows[:complete]


def _scaling_row(label: str, exponent: Exponent) -> list[str]:
    return [
        f"{label} ~ {exponent.name}^{number_text(exponent.overall)}",
        number_text(exponent.smallest),
        number_text(exponent.largest),
        f"{exponent.name}^{number_text(exponent.last)}",
    ]


def _csv(rows: Sequence[Row]) -> str:
    figures = ["params", "macs", "flops", "bytes", "latency_s", "lower_bound"]
    if any(row.profile.memory is not None for row in rows):
        figures.append("peak_bytes")
    added = _machine_columns(rows)
    names = [*rows[0].sizes, *figures, *(column.name for column in added)]
    return csv_text(names, (_csv_row(row, added) for row in rows))


def _csv_row(row: Row, added: Sequence[MachineColumn]) -> list[Any]:
    total = row.profile.total()
    return [
        *row.sizes.values(),
        row.profile.total_params,
        total.macs,
        total.flops,
        total.bytes_total,
        latency_of(row.profile.root),
        int(row.profile.is_lower_bound),
        *([] if row.profile.memory is None else [row.profile.memory.peak_bytes]),
        *(_plain(column.value(row.point)) for column in added if row.point is not None),
    ]


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value
