"""Figures for papers, as the bytes of a PNG, SVG or PDF file.

Nothing is displayed, and matplotlib's global state is not touched. Names are plain text, never TeX
or mathtext.
"""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

from dispatch_flops.analysis.efficiency import machine_of
from dispatch_flops.analysis.figures import COSTS, Key
from dispatch_flops.analysis.figures import top_modules as heaviest
from dispatch_flops.analysis.folding import fold
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.roofline_points import roofline_data
from dispatch_flops.analysis.scaling import exponent
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import ModuleNode, Profile
from dispatch_flops.profile.cost import Phase
from dispatch_flops.renderers._extras import require
from dispatch_flops.renderers.text import one_line
from dispatch_flops.units import (
    bytes_text,
    count_text,
    exceeds_float,
    flops_per_s_text,
    params_text,
    percent_text,
    seconds_text,
)

__all__ = ["roofline", "scaling", "top_modules"]

Format = Literal["png", "svg", "pdf"]

WIDTH = 6.4  # inches, the text width of most two-column papers
DPI = 200
_BLUE, _ORANGE, GREY = "#3b76af", "#d0812f", "#5b6570"
_LONGEST_NAME = 48
_AXES: dict[Key, str] = {
    "flops": "FLOPs",
    "macs": "MACs",
    "params": "Parameters",
    "bytes": "Bytes",
    "latency": "Seconds",
}


def top_modules(
    profile: Profile,
    *,
    k: int = 15,
    by: Key = "flops",
    phase: Phase | None = None,
    folded: bool = True,
    format: Format = "svg",
) -> bytes:
    """Draw a bar for each of the ``k`` modules with the most of an exclusive figure.

    by: the figure. phase: the only phase shown; None adds up all phases.
    folded: whether a run of identical numbered modules is one bar, with their sum.
    format: "svg" (the default), "png" or "pdf".

    Raises ImportError where matplotlib is not installed.

        Path("modules.svg").write_bytes(plots.top_modules(profile, k=10))
    """
    if folded:
        profile = dataclasses.replace(profile, root=fold(profile.root))
    paths = _paths(profile.root)
    ranked = heaviest(profile, by, k, phase)
    values = [figures.value(by) or 0 for _, figures in ranked]
    total = {
        "flops": profile.total(phase).flops,
        "macs": profile.total(phase).macs,
        "bytes": profile.total(phase).bytes_total,
        "params": profile.total_params,
    }.get(by)
    figure, axes = _figure(height=0.9 + 0.26 * max(len(ranked), 1))
    unit = _unit(values)
    lengths = [float(value) if unit == 1 else float(value // unit) for value in values]
    bars = axes.barh(range(len(ranked)), lengths, color=_BLUE)
    names = [_short(paths[node.fqn] or node.class_name) for node, _ in ranked]
    axes.set_yticks(range(len(ranked)), names, fontsize=8, parse_math=False)
    axes.bar_label(bars, [_bar_text(v, by, total) for v in values], padding=3, fontsize=7.5)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    is_bound = by in COSTS and any(figures.lower_bound for _, figures in ranked)
    mark = "≥ " if is_bound else ""
    axes.set_xlabel(f"{mark}{_AXES[by]}{f', {phase}' if phase else ''}", fontsize=9)
    axes.xaxis.set_major_formatter(
        lambda value, _: count_text(int(value) * unit if unit > 1 else value)
    )
    return saved(figure, format)


def roofline(profile: Profile, machine: Machine | None = None, *, format: Format = "svg") -> bytes:
    """Draw modules and operators below the machine's roofs; unmeasured ones are hollow.

    machine: None takes the profile's device. format: "svg" (the default), "png" or "pdf".

    Raises ConfigError if neither ``machine`` nor the profile's device gives a bandwidth, and
    ImportError where matplotlib is not installed.

    Example::

        svg = plots.roofline(profile, MACHINES["NVIDIA H200"])
        Path("roofline.svg").write_bytes(svg)
    """
    data = roofline_data(profile, machine_of(profile, machine))
    if data is None:
        raise ConfigError(
            "no peak and bandwidth are known for this profile's device: pass machine=Machine(...)"
        )
    figure, axes = _figure(height=4.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _roofs(axes, data)
    for key, marker, colour in (("modules", "o", _BLUE), ("operators", "D", _ORANGE)):
        _scatter(axes, data[key], key.capitalize(), marker, colour)
    axes.set_xlabel("Arithmetic intensity (FLOPs per byte)", fontsize=9)
    is_bound = any(point["lower_bound"] for point in (*data["modules"], *data["operators"]))
    axes.set_ylabel(f"{'≥ ' if is_bound else ''}FLOP/s", fontsize=9)
    axes.grid(visible=True, which="major", color="#e3e6ea", linewidth=0.6)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7.5, frameon=False, loc="lower right")
    axes.set_title(one_line(data["machine"]), fontsize=10, parse_math=False)
    return saved(figure, format)


def scaling(
    sizes: Sequence[float],
    counts: Mapping[str, Sequence[float]],
    *,
    size_name: str = "size",
    count_name: str = "FLOPs",
    format: Format = "svg",
) -> bytes:
    """Draw counts over a size on logarithmic axes, each curve with its k of count ~ size^k.

    sizes: positive numbers, at least two of them distinct.
    counts: ``{curve: positive counts, one per size}``.
    size_name, count_name: titles of the axes. format: "svg" (the default), "png" or "pdf".

    Raises ConfigError if sizes or counts are not like that, and ImportError where matplotlib is
    not installed.

    Example::

        svg = plots.scaling([64, 128, 256], {"attention": [1, 4, 16]}, size_name="seq")
        Path("scaling.svg").write_bytes(svg)
    """
    figure, axes = _figure(height=3.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for name, values in counts.items():
        k = exponent(sizes, values)
        (line,) = axes.plot(sizes, [float(v) for v in values], marker="o", markersize=4)
        line.set_label(f"{one_line(name)}: {size_name}^{k:.2f}")
    axes.set_xlabel(one_line(size_name), fontsize=9, parse_math=False)
    axes.set_ylabel(one_line(count_name), fontsize=9, parse_math=False)
    axes.set_xticks(sorted(set(sizes)), [f"{size:g}" for size in sorted(set(sizes))])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.grid(visible=True, color="#e3e6ea", linewidth=0.6)
    for text in axes.legend(fontsize=8, frameon=False).get_texts():
        text.set_parse_math(False)
    return saved(figure, format)


# -- parts --------------------------------------------------------------------------------------


def _roofs(axes: Any, data: Mapping[str, Any]) -> None:
    bandwidth, peaks = data["bytes_per_s"], data["peaks"]
    spots = [point["intensity"] for point in (*data["modules"], *data["operators"])]
    spots += [peak / bandwidth for peak in peaks.values()]
    low, high = min(spots, default=0.1) / 3, max(spots, default=10.0) * 3
    styles = ("-", "--", ":", "-.")
    for index, (dtype, peak) in enumerate(peaks.items()):
        xs, ys = (low, peak / bandwidth, high), (low * bandwidth, peak, peak)
        label = f"{dtype}, {flops_per_s_text(peak)}"
        axes.plot(xs, ys, styles[index % 4], color=GREY, linewidth=1.4, label=label)


def _scatter(
    axes: Any, points: Sequence[Mapping[str, Any]], label: str, marker: str, colour: str
) -> None:
    timed = [p for p in points if p["achieved"] is not None]
    untimed = [p for p in points if p["achieved"] is None and p["attainable"] is not None]
    style = {"marker": marker, "s": 22, "edgecolors": colour, "linewidths": 0.9}
    if timed:
        xs, ys = [p["intensity"] for p in timed], [p["achieved"] for p in timed]
        axes.scatter(xs, ys, facecolors=colour, alpha=0.8, label=label, **style)
    if untimed:
        xs, ys = [p["intensity"] for p in untimed], [p["attainable"] for p in untimed]
        axes.scatter(xs, ys, facecolors="none", label=f"{label}, not measured", **style)


def _unit(values: Iterable[int | float]) -> int:
    """Return 1, or the power of ten that brings counts into the range of a float."""
    largest = max(values, default=0)
    return 10 ** (Decimal(largest).adjusted() - 9) if exceeds_float(largest) else 1


def _bar_text(value: float, by: Key, total: int | None) -> str:
    texts = {"params": params_text, "bytes": bytes_text, "latency": seconds_text}
    text: str = texts.get(by, count_text)(value)  # type: ignore[arg-type]
    return text if total is None else f"{text} ({percent_text(value, total)})"


def _paths(root: ModuleNode) -> dict[str, str]:
    """Return ``{fqn: path}``; the path of a folded node names all of its modules."""
    paths: dict[str, str] = {root.fqn: ""}
    for node in root.walk():
        above = paths[node.fqn]
        paths |= {c.fqn: f"{above}.{c.name}" if above else c.name for c in node.children}
    return paths


def _short(name: str) -> str:
    text = one_line(name)
    return text if len(text) <= _LONGEST_NAME else f"…{text[1 - _LONGEST_NAME :]}"


# -- matplotlib ---------------------------------------------------------------------------------


def _figure(height: float) -> tuple[Any, Any]:
    matplotlib_figure = require("matplotlib.figure", extra="plots", purpose="a plot")
    figure = matplotlib_figure.Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8)
    return figure, axes


def saved(figure: Any, format: Format) -> bytes:
    """Return the file's bytes, without dates and random ids: equal profiles give equal files."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    dateless = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    if not isinstance(format, str) or format not in dateless:
        raise ConfigError(f'format={format!r:.60}: choose "svg", "png" or "pdf"')
    with rc_context({"svg.hashsalt": "dispatch_flops"}), warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format=format, metadata=dateless[format])
    return buffer.getvalue()
