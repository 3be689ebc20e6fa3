"""Figures of one rank, of its modules, and their spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from dispatch_flops.profile.cost import OpCost, Phase
from dispatch_flops.profile.memory import PhaseBytes
from dispatch_flops.profile.profile import Profile
from dispatch_flops.profile.seconds import sum_known, timed_phase
from dispatch_flops.profile.tree import ModuleNode, cost_in, local_params_of
from dispatch_flops.units import ratio

By = Literal["macs", "flops", "bytes", "communication", "memory", "time", "params"]
BY: tuple[By, ...] = ("macs", "flops", "bytes", "communication", "memory", "time", "params")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One figure over several ranks.

    minimum, maximum: of one rank. total: of all ranks together. ranks: number of ranks.
    straggler: the first rank that has the maximum.
    """

    minimum: float
    maximum: float
    total: float
    ranks: int
    straggler: int

    @property
    def imbalance(self) -> float | None:
        """Maximum divided by mean: 1.0 where all ranks are equal; None where all are 0."""
        return ratio(self.maximum * self.ranks, self.total)


def total_of(profile: Profile, phase: Phase | None) -> OpCost:
    """Return the cost of a rank, 0 in a phase that only other ranks have."""
    return cost_in(profile.root, phase) + cost_in(profile.outside, phase)


def value_of(profile: Profile, by: By, phase: Phase | None) -> float | None:
    """Return a figure of a rank; None where it was not measured."""
    match by:
        case "params":
            return profile.local_params
        case "communication":
            return sum(
                total.payload_bytes
                for total in profile.communication
                if phase is None or total.phase == phase
            )
        case "memory":
            return None if profile.memory is None else profile.memory.peak_in(phase)
        case "time":
            return _seconds_of(profile, phase)
    return _FIGURE[by](total_of(profile, phase))


def _seconds_of(profile: Profile, phase: Phase | None) -> float | None:
    """Return the seconds of a phase, or of all that ran; None where a part was not measured.

    Recomputation has none of its own: its time is part of the backward pass's.
    """
    timing = profile.timing
    known = {"forward": profile.root.seconds.get("forward"), **timing.seconds}
    if phase is not None:
        return known.get(phase)
    if timing.iteration_s is not None:
        return timing.iteration_s
    ran = {timed_phase(op.phase) for op in profile.op_totals() if op.phase is not None}
    seconds = [known.get(part) for part in ran or timing.seconds]
    return None if None in seconds else sum_known(seconds)


_FIGURE: dict[str, Callable[[OpCost], int]] = {
    "macs": lambda cost: cost.macs,
    "flops": lambda cost: cost.flops,
    "bytes": lambda cost: cost.bytes_total,
}


def module_values(profile: Profile, by: By, phase: Phase | None) -> Iterator[tuple[str, float]]:
    """Yield the fqn and the figure of each module that has one; inclusive but for communication."""
    if by == "communication":
        sums = {node.fqn: 0 for node in profile.root.walk()}
        for total in profile.communication:
            if phase is None or total.phase == phase:
                sums[total.fqn] = sums.get(total.fqn, 0) + total.payload_bytes
        yield from sums.items()
        return
    seconds = _whole_seconds(profile.root) if by == "time" and phase is None else {}
    for node in profile.root.walk():
        value: float | None
        if by == "params":
            value = local_params_of(node)
        elif by == "memory":
            value = None if node.memory is None else _peak_in(node.memory.peak_bytes, phase)
        elif by == "time":
            value = seconds[node.fqn] if phase is None else node.seconds.get(phase)
        else:
            value = _FIGURE[by](cost_in(node, phase))
        if value is not None:
            yield node.fqn, value


def timed_phases(root: ModuleNode) -> dict[str, set[Phase]]:
    """Return ``{fqn: phases whose seconds include what ran in the module and below}``."""
    ran: dict[str, set[Phase]] = {}
    for node in reversed(list(root.walk())):
        own = (timed_phase(op.phase) for op in node.ops if op.phase is not None)
        ran[node.fqn] = set(own).union(*(ran[child.fqn] for child in node.children))
    return ran


def _whole_seconds(root: ModuleNode) -> dict[str, float | None]:
    """Return the seconds of each module in all phases; None where one that ran was not measured."""
    ran = timed_phases(root)
    return {
        node.fqn: sum_known(node.seconds.values()) if ran[node.fqn] <= node.seconds.keys() else None
        for node in root.walk()
    }


def _peak_in(peaks: PhaseBytes, phase: Phase | None) -> int:
    return max(peaks.values(), default=0) if phase is None else peaks.get(phase, 0)


def spread_of(values: Mapping[int, float], classes: Mapping[int, list[int]]) -> Spread | None:
    """Return the spread of a figure; None where no rank has it.

    values: of profiled ranks. classes: the ranks that each stands for.
    """
    if not values:
        return None
    maximum = max(values.values())
    return Spread(
        minimum=min(values.values()),
        maximum=maximum,
        total=sum(value * len(classes[rank]) for rank, value in values.items()),
        ranks=sum(len(classes[rank]) for rank in values),
        straggler=min(min(classes[rank]) for rank in values if values[rank] == maximum),
    )
