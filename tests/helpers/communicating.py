"""A profile built by hand of a rank that sends and receives."""

from __future__ import annotations

import dataclasses
from typing import Any

from dispatch_flops.profile import OUTSIDE, CommGroup, CommTotal, MeshDim, Profile, RunInfo
from dispatch_flops.profile.communication import CommKind
from tests.helpers.trees import training_step

DP = CommGroup(name="mesh_dp", size=3, ranks=(1, 5, 9), mesh_dim="dp")
WORLD = CommGroup(name="default_pg", size=4, ranks=(0, 1, 2, 3))


def total(kind: CommKind = "all_reduce", **fields: Any) -> CommTotal:
    given = {
        "fqn": "0",
        "phase": "forward",
        "op": f"c10d.{kind}.default",
        "dtype": "float32",
        "group": DP,
        "calls": 1,
        "payload_bytes": 3 * 5 * 7,
    }
    return CommTotal(kind=kind, **(given | fields))


TOTALS = (
    total("all_gather", calls=2, payload_bytes=3 * 4),
    total("reduce_scatter", phase="backward", payload_bytes=3 * 11),
    total("all_to_all", fqn="1", payload_bytes=24, sent_bytes=(0, 4, 7), received_bytes=(0, 1, 2)),
    total("send", fqn=OUTSIDE, phase="setup", group=WORLD, dtype="uint8", payload_bytes=13),
    total("barrier", fqn="", dtype=None, group=WORLD, payload_bytes=0),
)


def communicating() -> Profile:
    mesh = (MeshDim(name="pp", size=2, coordinate=1), MeshDim(name="dp", size=3, coordinate=None))
    run = RunInfo(rank=5, world_size=6, mesh=mesh)
    return dataclasses.replace(training_step(), communication=TOTALS, run=run)
