"""Headline of a profile: the totals that reports, notebooks and loggers show first."""

from __future__ import annotations

from dataclasses import dataclass

from dispatch_flops.analysis.efficiency import (
    hfu,
    hfu_is_lower_bound,
    mfu,
    mfu_is_lower_bound,
    moving_s,
    why_no_utilisation,
)
from dispatch_flops.analysis.latency import measured_seconds, measured_seconds_are_inexact
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.profile import Profile
from dispatch_flops.profile.cost import MODEL_PHASES

ABOVE_PEAK = "above the peak: a count, the time or the peak is wrong"
ABOVE_BANDWIDTH = (
    "more bytes than the bandwidth allows in that time: caches or fused kernels saved traffic, or "
    "a count, the time or the bandwidth is wrong"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """Totals of a profile, of this rank.

    macs, hardware_flops, bytes_total: of all phases. model_flops: of forward and backward.
    seconds: of everything that was counted; None where a part was not measured.
    seconds_of: what those seconds are of, in words.
    seconds_are_inexact: True if they may be off by more than 10 %.
    mfu, hfu: shares of the machine's peak; None where the peak or the time is not known.
    why_no_mfu, why_no_hfu: what is not known, in words; ``""`` where the share is.
    lower_bound: True if an operator that ran has no known cost.
    mfu_is_lower_bound, hfu_is_lower_bound: True if the utilisation leaves out work, as that of
        operators without a known cost and of integers without a peak.
    least_moving_s: seconds that the bytes take at the machine's bandwidth; None if not known.

    Example::

        found = headline(profile)
        print(found.params, found.model_flops, found.bytes_total)
        print(found.seconds, "s:", found.seconds_of)
    """

    params: int
    trainable_params: int
    active_params: int
    macs: int
    model_flops: int
    hardware_flops: int
    bytes_total: int
    seconds: float | None
    seconds_of: str
    mfu: float | None
    hfu: float | None
    lower_bound: bool
    mfu_is_lower_bound: bool = False
    hfu_is_lower_bound: bool = False
    least_moving_s: float | None = None
    seconds_are_inexact: bool = False
    why_no_mfu: str = ""
    why_no_hfu: str = ""

    @property
    def exceeds_peak(self) -> bool:
        """True if the time is shorter than the peaks or the bandwidth allow; see ``warning``."""
        return bool(self.warning)

    @property
    def warning(self) -> str:
        """What is wrong, in words, if the machine cannot be that fast; else ``""``."""
        if max(self.mfu or 0.0, self.hfu or 0.0) > 1:
            return ABOVE_PEAK
        least, seconds = self.least_moving_s, self.seconds
        return ABOVE_BANDWIDTH if least is not None and seconds and seconds < least else ""


def headline(profile: Profile, machine: Machine | None = None) -> Headline:
    """Return the headline of a profile.

    machine: whose peaks the utilisations refer to; without one they are None.

    Example::

        headline(profile, MACHINES["NVIDIA H200"]).mfu
    """
    root, total = profile.root, profile.total()
    seconds, seconds_of = measured_seconds(profile)
    ops, phases = tuple(profile.op_totals()), phases_of(profile)
    return Headline(
        params=root.total_params,
        trainable_params=root.trainable_params,
        active_params=root.active_params,
        macs=total.macs,
        model_flops=profile.model_total().flops,
        hardware_flops=total.flops,
        bytes_total=total.bytes_total,
        seconds=seconds,
        seconds_of=seconds_of,
        mfu=mfu(profile, machine, seconds),
        hfu=hfu(profile, machine, seconds),
        lower_bound=profile.is_lower_bound,
        mfu_is_lower_bound=mfu_is_lower_bound(profile, machine),
        hfu_is_lower_bound=hfu_is_lower_bound(profile, machine),
        least_moving_s=None if machine is None else moving_s(total, machine),
        seconds_are_inexact=measured_seconds_are_inexact(profile),
        why_no_mfu=why_no_utilisation(ops, MODEL_PHASES, machine, seconds),
        why_no_hfu=why_no_utilisation(ops, phases, machine, seconds),
    )
