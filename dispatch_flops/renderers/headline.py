"""The few numbers that a profile comes down to, as the page, the notebook and loggers show them."""

from __future__ import annotations

from dataclasses import dataclass

from dispatch_flops.analysis import latency_of, phases_of, sum_known
from dispatch_flops.efficiency import hfu, mfu
from dispatch_flops.hardware import Machine, find
from dispatch_flops.tree import Profile, StepTiming

ABOVE_PEAK = "above the peak: a count, the time or the peak is wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What stands at the top of a report.

    model_flops: forward and backward; hardware_flops: all phases.
    seconds: of everything that was counted, once; ``None`` where a part was not measured.
    seconds_of: what those seconds are of, in words.
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

    @property
    def exceeds_peak(self) -> bool:
        """True if the machine cannot do so much in the time: a count, the time or the peak is
        wrong.
        """
        return max(self.mfu or 0.0, self.hfu or 0.0) > 1


def headline(profile: Profile, machine: Machine | None = None) -> Headline:
    """The totals of this rank; utilisation where the machine's peaks are known."""
    root, total = profile.root, profile.total()
    seconds, seconds_of = measured_seconds(profile)
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
    )


def measured_seconds(profile: Profile) -> tuple[float | None, str]:
    """Seconds of all phases that ran, and the words for them; None if a phase lacks its time."""
    timing = profile.timing
    if timing.iteration_s is not None:
        return timing.iteration_s, "whole iteration"
    parts = {
        "forward": _forward_s(profile),
        "backward": timing.backward_s,
        "optimizer": timing.step_s,
    }
    # Recomputation takes place within the backward pass.
    ran = ["backward" if phase == "recompute" else phase for phase in phases_of(profile)]
    if not ran and profile.root.calls:  # a model of which no operator ran
        ran = ["forward"]
    names = [name for name in parts if name in ran]
    if not names or any(parts[name] is None for name in names):
        return None, "not measured"
    return sum_known(parts[name] for name in names), " + ".join(names)


def phase_seconds(profile: Profile) -> dict[str, float | None]:
    """Seconds per phase where the profile has them."""
    timing: StepTiming = profile.timing
    return {
        "forward": _forward_s(profile),
        "backward": timing.backward_s,
        "recompute": None,
        "optimizer": timing.step_s,
    }


def machine_of(profile: Profile, machine: Machine | None = None) -> Machine | None:
    """The machine that was named, or else the one that the profile's device is known to be."""
    return find(profile.scope.device_name) if machine is None else machine


def _forward_s(profile: Profile) -> float | None:
    forward_s = profile.timing.forward_s
    return latency_of(profile.root) if forward_s is None else forward_s
