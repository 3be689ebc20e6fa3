"""Communication of a cluster by process groups, over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from dispatch_flops.profile import CommCost
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profile.communication import CommKind
from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.rank_figures import Spread, spread_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTraffic:
    """What ranks send and receive in the groups of one mesh dimension, by one kind of call.

    label: the mesh dimension; without one, the groups' name. size: ranks of each group.
    payload: bytes of one rank, over the ranks that take part. total: of all ranks together.
    """

    label: str
    size: int
    kind: CommKind
    payload: Spread
    total: CommCost


def traffic_by_group(cluster: ClusterProfile, phase: Phase | None = None) -> list[GroupTraffic]:
    """Return the communication of a cluster by group and kind, the most payload first.

    Groups of one mesh dimension are taken together, as those of the stages of a pipeline are.

        [(part.label, part.kind, part.payload.imbalance) for part in traffic_by_group(cluster)]
    """
    sent: dict[tuple[str, int, CommKind], dict[int, CommCost]] = {}
    for rank, profile in cluster.profiles.items():
        for total in profile.communication:
            if phase in (None, total.phase):
                ranks = sent.setdefault((total.group.label, total.group.size, total.kind), {})
                ranks[rank] = ranks.get(rank, CommCost()) + total.cost
    same = cluster.same_ranks()
    found = []
    for (label, size, kind), costs in sent.items():
        spread = spread_of({rank: cost.payload_bytes for rank, cost in costs.items()}, same)
        assert spread is not None
        whole = sum((cost * len(same[rank]) for rank, cost in costs.items()), start=CommCost())
        found.append(GroupTraffic(label=label, size=size, kind=kind, payload=spread, total=whole))
    return sorted(found, key=lambda part: -part.total.payload_bytes)
