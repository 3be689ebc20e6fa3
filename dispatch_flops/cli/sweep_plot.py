"""``sweep --plot``: FLOPs over one size, a curve for each combination of the others."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dispatch_flops.cli.output import write
from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.renderers import plots

Sizes = Mapping[str, Any]

_FORMATS = ("png", "svg", "pdf")
_MOST_CURVES = 12  # that a legend holds


def add_plot_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw FLOPs over the size that has most values: .png, .svg or .pdf (extra: plots)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot to come, known to be possible before anything is profiled.

    axis: the size along x. curves: per point of the sweep, the name of the curve it is on.
    """

    path: Path
    axis: str
    xs: tuple[float, ...]
    curves: tuple[str, ...]

    @classmethod
    def of(cls, grid: Sequence[Sizes], path: str) -> Figure:
        """The figure of a full grid; raises TargetError where none can be drawn."""
        if Path(path).suffix.lower()[1:] not in _FORMATS:
            raise TargetError(f"--plot {path}: the name ends with .{', .'.join(_FORMATS)}")
        _require_matplotlib()
        values = {name: {sizes[name] for sizes in grid} for name in numeric(grid)}
        axis = max(values, key=lambda name: len(values[name]), default="")
        if len(values.get(axis, ())) < 2 or min(values[axis]) <= 0:
            raise TargetError("--plot needs a size of two or more positive values")
        curves = [sizes_text({k: v for k, v in s.items() if k != axis}) or "FLOPs" for s in grid]
        if len(set(curves)) > _MOST_CURVES:
            raise TargetError(f"--plot: {len(set(curves))} curves are too many to tell apart")
        xs = tuple(sizes[axis] for sizes in grid)
        return cls(path=Path(path), axis=axis, xs=xs, curves=tuple(curves))

    def write(self, flops: Sequence[int], *, lower_bound: bool) -> None:
        """Draw and write the file; flops: of each point of the grid."""
        points = sorted(zip(self.curves, self.xs, flops, strict=True), key=lambda point: point[1])
        counts = {
            curve: [count for name, _, count in points if name == curve]
            for curve in dict.fromkeys(self.curves)
        }
        format = cast(plots.Format, self.path.suffix.lower()[1:])
        label = "≥ FLOPs" if lower_bound else "FLOPs"
        xs = sorted(set(self.xs))
        try:
            content = plots.scaling(
                xs, counts, size_name=self.axis, count_name=label, format=format
            )
        except ConfigError as error:
            raise TargetError(f"--plot: {error}") from None
        write(self.path, content)


def numeric(grid: Sequence[Sizes]) -> list[str]:
    """The sizes that are numbers throughout."""
    return [name for name in grid[0] if all(_is_number(sizes[name]) for sizes in grid)]


def sizes_text(sizes: Sizes) -> str:
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise TargetError("--plot needs matplotlib: pip install 'dispatch-flops[plots]'") from None
