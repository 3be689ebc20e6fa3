"""Profiles of four ranks built by hand: two pipeline stages of two ranks each."""

from __future__ import annotations

from dispatch_flops.profile import PhaseSeconds, Profile, RunInfo, StepTiming
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profile.communication import CommGroup, CommTotal
from dispatch_flops.profile.mesh_positions import mesh_dims
from tests.helpers.trees import module, op

MESH = {"pp": 2, "dp": 2}
MACS = (2 * 3, 2 * 5, 2 * 7, 2 * 11)  # of each rank; 2 FLOPs each
PAYLOAD = (64, 64, 64, 320)
SECONDS = (0.25, 0.5, 0.125, 1.0)


def of_rank(rank: int, name: str = "0", note: str | None = None) -> Profile:
    """Return the profile of one rank; its model has a module ``layers.NAME``."""
    layer = module(
        "Linear",
        name=name,
        parent="layers",
        own_params=10 + rank,
        ops=(op("aten.mm.default", macs=MACS[rank], n_bytes=(8, 4)),),
    )
    layers = module("ModuleDict", layer, name="layers", calls=0)
    total = CommTotal(
        fqn=f"layers.{name}",
        phase="backward",
        kind="reduce_scatter",
        op="c10d._reduce_scatter_base_.default",
        dtype="float32",
        group=CommGroup(name="mesh_dp", size=2, ranks=(0, 1), mesh_dim="dp"),
        calls=1,
        payload_bytes=PAYLOAD[rank],
    )
    return Profile(
        root=module("Net", layers),
        run=RunInfo(rank=rank, world_size=4, mesh=mesh_dims(rank, MESH)),
        timing=StepTiming(seconds=PhaseSeconds({"forward": SECONDS[rank]})),
        communication=(total,),
        notes=() if note is None else (note,),
    ).check()


def four_ranks() -> ClusterProfile:
    """Return the ranks merged, in an order that is not theirs."""
    return ClusterProfile.merge(of_rank(rank) for rank in (2, 0, 3, 1))


def represented() -> ClusterProfile:
    """Return ranks 0 and 2, of which the second stands for rank 3, too; rank 1 is missing."""
    return ClusterProfile(
        profiles={0: of_rank(0), 2: of_rank(2)},
        represented={3: 2},
        world_size=4,
        notes=("a note",),
    )
