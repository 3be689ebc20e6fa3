"""Communication of a cluster by group."""

from __future__ import annotations

import dataclasses

from dispatch_flops.analysis.cluster_communication import traffic_by_group
from dispatch_flops.profile import CommCost, CommGroup, CommTotal, Profile
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profile.rank_figures import Spread
from tests.helpers.clusters import four_ranks, of_rank, represented


def with_all_gather(rank: int, payload: int) -> Profile:
    """A rank that also gathers over a group without a mesh dimension."""
    profile = of_rank(rank)
    gathered = CommTotal(
        fqn="", phase="forward", kind="all_gather", op="c10d._allgather_base_.default",
        dtype="float32", group=CommGroup(name="default_pg", size=4, ranks=(0, 1, 2, 3)),
        calls=3, payload_bytes=payload,
    )  # fmt: skip
    return dataclasses.replace(profile, communication=(*profile.communication, gathered))


def test_groups_of_a_mesh_dimension_are_together_and_kinds_apart() -> None:
    cluster = ClusterProfile.merge([with_all_gather(0, 4000), of_rank(1), with_all_gather(2, 800)])
    gather, scatter = traffic_by_group(cluster)
    assert (gather.label, gather.size, gather.kind) == ("default_pg", 4, "all_gather")
    # Two ranks take part: 3 of 4 parts of the payload are on the bus.
    assert gather.payload == Spread(minimum=800, maximum=4000, total=4800, ranks=2, straggler=0)
    assert gather.total == CommCost(calls=6, payload_bytes=4800, bus_bytes=3600)
    assert (scatter.label, scatter.size, scatter.kind) == ("dp", 2, "reduce_scatter")
    assert scatter.payload == Spread(minimum=64, maximum=64, total=192, ranks=3, straggler=0)
    assert [part.kind for part in traffic_by_group(cluster, "forward")] == ["all_gather"]


def test_represented_ranks_count_as_their_representative() -> None:
    """Rank 2 stands for rank 3, too; rank 0 for itself."""
    (part,) = traffic_by_group(represented())
    assert part.total.payload_bytes == 64 + 2 * 64
    assert part.payload.ranks == 3


def test_uneven_ranks_have_a_straggler() -> None:
    (part,) = traffic_by_group(four_ranks())
    assert part.payload.straggler == 3
    assert part.payload.imbalance == 320 * 4 / 512
