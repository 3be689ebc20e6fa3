"""Several figures over one size, one below the other, as the bytes of a PNG, SVG or PDF file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatch_flops.analysis.scaling import exponent
from dispatch_flops.renderers._extras import require
from dispatch_flops.renderers.plots import DPI, GREY, WIDTH, Format, saved
from dispatch_flops.renderers.text import one_line

_HEIGHT = 2.3  # inches of a panel


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A figure over the size, with a curve for each combination of the other sizes.

    curves: ``{curve: a value for each size}``; NaN where unknown. limit: name and value of a
        level.
    is_logarithmic: False draws the values from 0.
    """

    name: str
    curves: Mapping[str, Sequence[float]]
    limit: tuple[str, float] | None = None
    is_logarithmic: bool = True

    @property
    def has_values(self) -> bool:
        """True if any value is known."""
        return any(not math.isnan(value) for values in self.curves.values() for value in values)


def render(
    sizes: Sequence[float], panels: Sequence[Panel], *, size_name: str, format: Format
) -> bytes:
    """Draw the panels below each other.

    sizes: positive numbers, at least two of them distinct. The first panel's legend names the
    curves, each with its k of value ~ size^k, as ``plots.scaling`` does.

    Raises ConfigError if the first panel's values are not positive, and ImportError where
    matplotlib is not installed.
    """
    matplotlib_figure = require("matplotlib.figure", extra="plots", purpose="a plot")
    height = 1.5 + _HEIGHT * len(panels)
    figure = matplotlib_figure.Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for index, (axes, panel) in enumerate(zip(rows, panels, strict=True)):
        _draw(axes, sizes, panel)
        if index == 0:
            _label(axes, sizes, panel, size_name)
    rows[-1].set_xlabel(one_line(size_name), fontsize=9, parse_math=False)
    rows[-1].set_xticks(sorted(set(sizes)), [f"{size:g}" for size in sorted(set(sizes))])
    return saved(figure, format)


def _draw(axes: Any, sizes: Sequence[float], panel: Panel) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8)
    axes.set_xscale("log")
    if panel.is_logarithmic:
        axes.set_yscale("log")
    for values in panel.curves.values():
        axes.plot(sizes, [float(value) for value in values], marker="o", markersize=4)
    if panel.limit is not None:
        name, level = panel.limit
        axes.axhline(level, color=GREY, linewidth=1.2, linestyle="--", label=one_line(name))
        _plain_legend(axes, [axes.lines[-1]])
    if not panel.is_logarithmic:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(one_line(panel.name), fontsize=9, parse_math=False)
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.grid(visible=True, color="#e3e6ea", linewidth=0.6)


def _label(axes: Any, sizes: Sequence[float], panel: Panel, size_name: str) -> None:
    lines = axes.lines[: len(panel.curves)]
    for line, (name, values) in zip(lines, panel.curves.items(), strict=True):
        line.set_label(f"{one_line(name)}: {size_name}^{exponent(sizes, values):.2f}")
    _plain_legend(axes, lines)


def _plain_legend(axes: Any, lines: Sequence[Any]) -> None:
    for text in axes.legend(handles=lines, fontsize=8, frameon=False).get_texts():
        text.set_parse_math(False)
