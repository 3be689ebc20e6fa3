"""The plot of a sweep: figures over one size, with a curve for each combination of the others."""

from __future__ import annotations

import math
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dispatch_flops.cli.output import check_writable, write_file
from dispatch_flops.cli.sweep_machine import MachinePoint
from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.renderers import plots, scaling_panels
from dispatch_flops.renderers.scaling_panels import Panel
from dispatch_flops.units import bytes_text

Sizes = Mapping[str, Any]

_FORMATS = ("png", "svg", "pdf")
_MAX_CURVES = 12  # as many as a legend can hold


def add_plot_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="plot FLOPs over the size with the most values, and what --machine allows there, as "
        ".png, .svg or .pdf (needs the extra plots)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlot:
    """Plot of a sweep, checked before anything is profiled and written afterwards.

    axis: the size along x. xs: its value at each point of the sweep.
    curves: the name of the curve that each point belongs to.
    """

    path: Path
    axis: str
    xs: tuple[float, ...]
    curves: tuple[str, ...]

    @classmethod
    def of_grid(cls, grid: Sequence[Sizes], path: str) -> SweepPlot:
        """Return the plot of a full grid; raises TargetError if it cannot be drawn."""
        if Path(path).suffix.lower()[1:] not in _FORMATS:
            raise TargetError(f"--plot {path} has an unknown suffix; use .png, .svg or .pdf")
        check_writable(Path(path))
        _require_matplotlib()
        values = {name: {sizes[name] for sizes in grid} for name in numeric_names(grid)}
        axis = max(values, key=lambda name: len(values[name]), default="")
        if len(values.get(axis, ())) < 2 or min(values[axis]) <= 0:
            raise TargetError(
                "--plot needs a size with two or more positive values; add one with --set, such as "
                "seq=128..4096"
            )
        curves = [sizes_text({k: v for k, v in s.items() if k != axis}) or "FLOPs" for s in grid]
        if (count := len(set(curves))) > _MAX_CURVES:
            raise TargetError(f"--plot would draw {count} curves; sweep at most {_MAX_CURVES}")
        xs = tuple(sizes[axis] for sizes in grid)
        return cls(path=Path(path), axis=axis, xs=xs, curves=tuple(curves))

    def write(
        self,
        flops: Sequence[int],
        *,
        is_lower_bound: bool,
        points: Sequence[MachinePoint] = (),
    ) -> None:
        """Draw the plot and write the file.

        flops: a value for each point of the grid. points: what a machine allows there, if asked.
        """
        label = "≥ FLOPs" if is_lower_bound else "FLOPs"
        counts = self._curves(flops)
        format = cast(plots.Format, self.path.suffix.lower()[1:])
        xs = sorted(set(self.xs))
        try:
            if points:
                panels = [Panel(name=label, curves=counts), *self._panels(points)]
                content = scaling_panels.render(xs, panels, size_name=self.axis, format=format)
            else:
                content = plots.scaling(
                    xs, counts, size_name=self.axis, count_name=label, format=format
                )
        except ConfigError as error:
            raise TargetError(f"--plot: {error}") from None
        write_file(self.path, content)

    def _curves(self, values: Sequence[float]) -> dict[str, list[float]]:
        """Return ``{curve: values in the order of the axis}``."""
        points = sorted(zip(self.curves, self.xs, values, strict=True), key=lambda point: point[1])
        return {
            curve: [value for name, _, value in points if name == curve]
            for curve in dict.fromkeys(self.curves)
        }

    def _panels(self, points: Sequence[MachinePoint]) -> list[Panel]:
        """Return a panel for each figure of the machine that is known at some point."""
        machine = points[0].machine
        seconds = [point.bounds.least_s for point in points]
        rates = [point.attainable_flops_per_s for point in points]
        ceilings = [point.bounds.mfu_ceiling[0] for point in points]
        peaks = [point.peak_bytes for point in points]
        capacity = machine.memory_bytes
        limit = None if capacity is None else (f"{bytes_text(capacity)} of memory", capacity)
        panels = [
            Panel(name="least seconds", curves=self._known(seconds)),
            Panel(name="attainable FLOP/s", curves=self._known(rates), is_logarithmic=False),
            Panel(name="MFU ceiling", curves=self._known(ceilings), is_logarithmic=False),
            Panel(name="bytes at the peak", curves=self._known(peaks), limit=limit),
        ]
        return [panel for panel in panels if panel.has_values]

    def _known(self, values: Sequence[float | None]) -> dict[str, list[float]]:
        """Return the curves with NaN, which is not drawn, for each unknown value."""
        return self._curves([math.nan if value is None else value for value in values])


def numeric_names(grid: Sequence[Sizes]) -> list[str]:
    """Return the names whose values are numbers at every point."""
    return [name for name in grid[0] if all(_is_number(sizes[name]) for sizes in grid)]


def sizes_text(sizes: Sizes) -> str:
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise TargetError(
            "--plot needs matplotlib; run pip install 'dispatch-flops[plots]'"
        ) from None
