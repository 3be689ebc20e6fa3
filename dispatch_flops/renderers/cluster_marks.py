"""Marks of a cluster's figures that are not exact: ``>=`` for a lower bound, else ``~``."""

from __future__ import annotations

from collections.abc import Iterable

from dispatch_flops.analysis.figures import COSTS, tree_figures
from dispatch_flops.profile import Profile
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.rank_figures import BY, By

LOWER_BOUND, APPROXIMATE = ">= ", "~ "


class Marks:
    """Marks of the figures of ranks in one phase, or in all (None); "" for what is exact."""

    def __init__(self, cluster: ClusterProfile, phase: Phase | None) -> None:
        self._represented = cluster.represented
        self._of = {
            rank: {by: _mark(profile, by, phase) for by in BY}
            for rank, profile in cluster.profiles.items()
        }

    def of(self, ranks: Iterable[int], by: By) -> str:
        """Return the mark of a figure over some ranks, of which one may be inexact."""
        found = {self._of[self._represented.get(rank, rank)][by] for rank in ranks}
        return next((mark for mark in (APPROXIMATE, LOWER_BOUND) if mark in found), "")


def _mark(profile: Profile, by: By, phase: Phase | None) -> str:
    if by in COSTS:
        uncounted = (op for op in profile.op_totals() if op.uncounted)
        return LOWER_BOUND if any(phase in (None, op.phase) for op in uncounted) else ""
    if by == "memory" and profile.memory is not None:
        if profile.memory.is_approximate:
            return APPROXIMATE
        return LOWER_BOUND if profile.memory.is_lower_bound else ""
    return ""


def modules_of_unknown_cost(
    cluster: ClusterProfile, phase: Phase | None
) -> frozenset[tuple[int | None, str]]:
    """Return stage and fqn of the modules whose costs are lower bounds on some rank."""
    return frozenset(
        (cluster.stage(rank), fqn)
        for rank, profile in cluster.profiles.items()
        for fqn, figures in tree_figures(profile.root, phase).items()
        if figures.lower_bound
    )
