"""``sweep --machine``: what a machine allows at each point of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.step_bounds import StepBounds, step_bounds
from dispatch_flops.profile import Profile
from dispatch_flops.renderers.plan_texts import fits_text
from dispatch_flops.units import (
    NOT_AVAILABLE,
    flops_per_s_text,
    fraction_text,
    ratio,
    seconds_text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePoint:
    """Bounds of one run on a machine, for unfused operators; None where a rate is unknown."""

    machine: Machine
    bounds: StepBounds
    flops: int
    peak_bytes: int | None

    @property
    def attainable_flops_per_s(self) -> float | None:
        """FLOP/s of the least time."""
        return ratio(self.flops, self.bounds.least_s)

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the machine's memory; None where either is unknown."""
        if self.peak_bytes is None or self.machine.memory_bytes is None:
            return None
        return self.peak_bytes <= self.machine.memory_bytes


def machine_point(profile: Profile, machine: Machine) -> MachinePoint:
    """Return the bounds of a profile's run on a machine."""
    return MachinePoint(
        machine=machine,
        bounds=step_bounds(profile, machine),
        flops=profile.total().flops,
        peak_bytes=None if profile.memory is None else profile.memory.peak_bytes,
    )


@dataclass(frozen=True, slots=True)
class MachineColumn:
    """A figure of a point: its headings in tables and in CSV, its value and its text."""

    heading: str
    name: str
    value: Callable[[MachinePoint], Any]
    text: Callable[[Any], str]


COLUMNS: tuple[MachineColumn, ...] = (
    MachineColumn("Least time", "least_s", lambda point: point.bounds.least_s, seconds_text),
    MachineColumn(
        "Attainable", "attainable_flops_per_s",
        lambda point: point.attainable_flops_per_s, flops_per_s_text,
    ),
    MachineColumn(
        "MFU ceiling", "mfu_ceiling", lambda point: point.bounds.mfu_ceiling[0], fraction_text
    ),
    MachineColumn(
        "Bound by", "bound", lambda point: point.bounds.bound, lambda bound: bound or NOT_AVAILABLE
    ),
)  # fmt: skip
FITS = MachineColumn("Fits", "fits", lambda point: point.fits, fits_text)


def columns_for(profiles: Sequence[Profile]) -> tuple[MachineColumn, ...]:
    """Return the columns; whether it fits is one where memory was followed."""
    has_peaks = any(profile.memory is not None for profile in profiles)
    return (*COLUMNS, FITS) if has_peaks else COLUMNS


def note_on(machine: Machine, *, is_lower_bound: bool) -> str:
    """Return what the columns are, in words."""
    text = f"Least time, attainable rate and MFU ceiling are of unfused operators on {machine.name}"
    return f"{text}, and of what was counted" if is_lower_bound else text
