"""What the ranks of a planned step need, and which of them limit it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dispatch_flops.analysis.communication_times import DimTime, GroupLink, group_link, times_by_dim
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.plain_figures import figures_of
from dispatch_flops.analysis.step_bounds import StepBounds, step_bounds
from dispatch_flops.profile import CommGroup, CommTotal, Profile
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profile.cost import OpCost
from dispatch_flops.profile.mesh_positions import common_dims, coordinates_of, mesh_dims, rank_at


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRank:
    """A rank of a planned step. ranks: how many it stands for, itself included."""

    rank: int
    ranks: int
    stage: int | None
    profile: Profile
    bounds: StepBounds

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that the step allocates on this rank; None where not followed."""
        return None if self.profile.memory is None else self.profile.memory.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCluster:
    """The ranks of a planned step over a device mesh.

    mesh: ``{dimension: size}``, outermost first. ranks: one of each kind, and of those of a kind
        one for each set of links that their groups have.
    notes: what a reader must know of the simulation.

    Example::

        cluster = planned.steps[0].cluster
        cluster.fullest.rank, cluster.fullest.peak_bytes
        cluster.communication[0].dim, cluster.communication[0].seconds
    """

    machine: Machine
    mesh: Mapping[str, int]
    ranks: tuple[PlannedRank, ...]
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Number of ranks, one on each device."""
        return sum(part.ranks for part in self.ranks)

    @property
    def fullest(self) -> PlannedRank:
        """The first rank with the highest peak of memory."""
        return max(self.ranks, key=lambda part: part.peak_bytes or 0)

    @property
    def slowest(self) -> PlannedRank:
        """The first rank whose step takes longest at least; most FLOPs where times are unknown."""
        return max(
            self.ranks,
            key=lambda part: (part.bounds.least_s or 0.0, part.profile.total().flops),
        )

    @property
    def communication(self) -> tuple[DimTime, ...]:
        """Communication of the slowest rank over each mesh dimension, the longest first."""
        return times_by_dim(self.slowest.profile, self.machine)

    @property
    def bounds(self) -> StepBounds:
        """The bounds of the slowest rank, with the mean of all devices as model_compute_s."""
        seconds = [part.bounds.model_compute_s for part in self.ranks]
        if any(part is None for part in seconds):
            return replace(self.slowest.bounds, model_compute_s=None)
        known = zip(seconds, self.ranks, strict=True)
        total = sum((part or 0.0) * rank.ranks for part, rank in known)
        return replace(self.slowest.bounds, model_compute_s=total / self.devices)

    @property
    def model_cost(self) -> OpCost:
        """Forward and backward of all ranks together."""
        return self._sum({part.rank: part.profile.model_total() for part in self.ranks})

    @property
    def cost(self) -> OpCost:
        """All phases of all ranks together."""
        return self._sum({part.rank: part.profile.total() for part in self.ranks})

    def _sum(self, costs: Mapping[int, OpCost]) -> OpCost:
        return sum((costs[part.rank] * part.ranks for part in self.ranks), start=OpCost())

    @property
    def parameters(self) -> int:
        """Parameters of the whole model: those of one rank of each pipeline stage."""
        stages: dict[int | None, int] = {}
        for part in self.ranks:
            stages[part.stage] = max(stages.get(part.stage, 0), part.profile.total_params)
        return sum(stages.values())


def cluster_to_row(cluster: PlannedCluster) -> dict[str, Any]:
    """Return the figures as plain data; the fullest and the slowest rank by their numbers."""
    return figures_of(cluster, fullest=cluster.fullest.rank, slowest=cluster.slowest.rank)


def planned_cluster(
    cluster: ClusterProfile,
    mesh: Mapping[str, int],
    machine: Machine,
    host_s_per_operator: float | None = None,
) -> PlannedCluster:
    """Return the figures of simulated ranks on the devices of a machine."""
    return PlannedCluster(
        machine=machine,
        mesh=dict(mesh),
        ranks=tuple(
            PlannedRank(
                rank=profile.run.rank,
                ranks=ranks,
                stage=cluster.stage(profile.run.rank),
                profile=profile,
                bounds=step_bounds(profile, machine, host_s_per_operator),
            )
            for head, alike in cluster.same_ranks().items()
            for profile, ranks in _on_equal_links(cluster.profiles[head], alike, mesh, machine)
        ),
        notes=cluster.notes,
    )


def _on_equal_links(
    profile: Profile, ranks: Iterable[int], mesh: Mapping[str, int], machine: Machine
) -> Iterator[tuple[Profile, int]]:
    """Yield the profile for the first of the ranks whose groups have equal links, and their number.

    The ranks do the same, but the group of one may be on one node and that of another on two.
    profile: of the first of the ranks.
    """
    head = profile.run.rank
    groups = {part.group: common_dims(part.group.ranks, mesh) for part in profile.communication}
    calls = {_link_key(part): part for part in profile.communication}.values()
    alike: defaultdict[tuple[GroupLink | None, ...], list[int]] = defaultdict(list)
    for rank in ranks:
        moved = {group: _moved(group, dims, head, rank, mesh) for group, dims in groups.items()}
        links = (
            group_link(replace(part, group=moved[part.group]), machine, rank) for part in calls
        )
        alike[tuple(links)].append(rank)
    for rank, *others in alike.values():
        moved = {group: _moved(group, dims, head, rank, mesh) for group, dims in groups.items()}
        parts = (replace(part, group=moved[part.group]) for part in profile.communication)
        run = replace(profile.run, rank=rank, mesh=mesh_dims(rank, mesh))
        yield replace(profile, communication=tuple(parts), run=run), 1 + len(others)


def _link_key(part: CommTotal) -> tuple[Any, ...]:
    """Return what of a communication its link depends on."""
    is_between_two = part.kind in ("send", "recv")
    return part.group, part.kind, is_between_two and (part.sent_bytes, part.received_bytes)


def _moved(
    group: CommGroup, dims: Iterable[str], head: int, rank: int, mesh: Mapping[str, int]
) -> CommGroup:
    """Return the group in which a rank is where ``head`` is in this one.

    dims: in which the ranks of the group have equal positions. A group that is not one of whole
    dimensions, such as two of four ranks, is left as it is where the rank is not part of it.
    """
    at = coordinates_of(rank, mesh)
    offset = rank_at(coordinates_of(head, mesh) | {dim: at[dim] for dim in dims}, mesh) - head
    ranks = tuple(member + offset for member in group.ranks)
    return replace(group, ranks=ranks) if rank in ranks else group
