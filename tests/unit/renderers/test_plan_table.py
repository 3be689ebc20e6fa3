"""The table of a plan."""

from __future__ import annotations

import dataclasses

from dispatch_flops import Machine
from dispatch_flops.analysis.planned import Plan, PlannedStep
from dispatch_flops.analysis.planned_cluster import planned_cluster
from dispatch_flops.profile import OpTotal
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.renderers import plan_table
from tests.helpers.clusters import MACS, MESH, of_rank

MACHINE = Machine(name="a board", flops_per_s={"float32": 1e9}, bytes_per_s=1e12)


def test_figures_of_all_devices_are_lower_bounds_where_those_of_a_rank_are() -> None:
    """Rank 0 runs an operator without a cost, and rank 3 takes longest."""
    unknown = OpTotal(op="lib.a", phase="forward", calls=1, cost=None, uncounted=1)
    first = dataclasses.replace(
        of_rank(0), root=dataclasses.replace(of_rank(0).root, ops=(unknown,))
    )
    merged = ClusterProfile.merge([first, of_rank(1), of_rank(2), of_rank(3)])
    cluster = planned_cluster(merged, MESH, MACHINE)
    step = PlannedStep(
        sizes={},
        machine=MACHINE,
        profile=cluster.slowest.profile,
        bounds=cluster.bounds,
        cluster=cluster,
    )
    [rows] = plan_table.columns_of(Plan(machine=MACHINE, steps=(step,)))
    assert cluster.slowest.rank == 3
    for phases in ("model", "hardware"):
        assert rows[f"{phases} FLOPs, all devices"] == f">= {2 * sum(MACS)}"
        assert rows[f"{phases} FLOPs"] == str(2 * MACS[3])
