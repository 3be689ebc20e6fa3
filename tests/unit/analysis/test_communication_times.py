"""Seconds of communication, from the calls, bytes and links of small made-up jobs.

A node has 4 devices; its link moves 1100 bytes a second, the network 130 for each device.
"""

from __future__ import annotations

import dataclasses

import pytest

from dispatch_flops import CommGroup, CommTotal, Machine, ModuleNode, Profile
from dispatch_flops.analysis.communication_times import (
    busiest_link_s,
    collective_s,
    communication_s,
    group_link,
    times_by_dim,
)
from dispatch_flops.analysis.machines import Link
from dispatch_flops.analysis.step_bounds import StepBounds, step_bounds
from dispatch_flops.profile import RunInfo

NODE, NETWORK = 1100, 130  # bytes per second
ALPHA, BETA = 3, 7  # seconds of a call
MACHINE = Machine(
    name="cluster",
    devices_per_node=4,
    node_link=Link(bytes_per_s=NODE, latency_s=ALPHA, name="inner"),
    network_link=Link(bytes_per_s=NETWORK, latency_s=BETA, name="outer"),
)


def group(*ranks: int, dim: str = "dp") -> CommGroup:
    return CommGroup(name=f"mesh_{dim}", size=len(ranks), ranks=ranks, mesh_dim=dim)


def total(kind, ranks: CommGroup, payload_bytes: int, calls: int = 1, **more) -> CommTotal:
    return CommTotal(
        fqn="", phase="forward", kind=kind, op="c10d.op", dtype="float32",
        group=ranks, calls=calls, payload_bytes=payload_bytes, **more,
    )  # fmt: skip


def profile(*parts: CommTotal, rank: int = 0) -> Profile:
    return Profile(
        root=ModuleNode(fqn="", class_name="Net"), run=RunInfo(rank=rank), communication=parts
    )


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("all_reduce", 2 * 2 / 3), ("all_gather", 2 / 3), ("reduce_scatter", 2 / 3),
        ("all_to_all", 2 / 3), ("gather", 2 / 3), ("scatter", 2 / 3),
        ("broadcast", 1), ("reduce", 1), ("send", 1), ("recv", 1),
    ],
)  # fmt: skip
def test_collective_takes_a_latency_for_each_call_and_its_share_of_the_bytes(kind, share) -> None:
    seconds = collective_s(total(kind, group(0, 1, 3), 3 * 17 * NODE, calls=5), MACHINE)
    assert seconds == pytest.approx(5 * ALPHA + 3 * 17 * share)


def test_barrier_and_group_of_one_rank_take_no_time() -> None:
    assert collective_s(total("barrier", group(0, 5), 0), MACHINE) == 0
    assert collective_s(total("all_reduce", group(2), 11), MACHINE) == 0


@pytest.mark.parametrize(
    ("ranks", "reach", "rate"),
    [
        ((0, 3), "node", NODE),
        ((5, 6, 7), "node", NODE),
        ((3, 4), "network", NETWORK),  # neighbours on two nodes
        ((0, 4, 8), "network", NETWORK),
        ((0, 1, 4, 5), "network", 2 * NETWORK),  # two of each node
        ((0, 1, 2, 4), "network", NETWORK),  # one of the second node
        (tuple(range(8)), "network", 4 * NETWORK),
    ],
)
def test_link_of_a_group_is_what_its_ranks_of_a_node_have_together(ranks, reach, rate) -> None:
    found = group_link(total("all_gather", group(*ranks), 1), MACHINE)
    assert found is not None
    assert (found.reach, found.link.bytes_per_s) == (reach, rate)
    assert found.link.latency_s == (ALPHA if reach == "node" else BETA)


def test_latency_that_is_not_known_is_left_out() -> None:
    unknown = dataclasses.replace(MACHINE, node_link=Link(bytes_per_s=NODE))
    found = total("all_gather", group(0, 1), 5 * NODE)
    assert collective_s(found, unknown) == pytest.approx(collective_s(found, MACHINE) - ALPHA)


def test_group_over_nodes_is_no_faster_than_the_link_within_one() -> None:
    narrow = dataclasses.replace(MACHINE, node_link=Link(bytes_per_s=3 * NETWORK))
    found = group_link(total("all_gather", group(*range(8)), 1), narrow)
    assert found is not None and found.link.bytes_per_s == 3 * NETWORK


def test_message_uses_one_link_and_that_of_the_node_where_the_peer_is_near() -> None:
    stages = group(0, 1, 4, 5, dim="pp")
    near = total("send", stages, 19 * NODE, sent_bytes=(0, 19 * NODE, 0, 0))
    far = total("recv", stages, 23 * NETWORK, received_bytes=(0, 0, 0, 23 * NETWORK))
    assert collective_s(near, MACHINE, rank=0) == pytest.approx(ALPHA + 19)
    assert collective_s(far, MACHINE, rank=1) == pytest.approx(BETA + 23)
    assert collective_s(near, MACHINE) == pytest.approx(BETA + 19 * NODE / NETWORK)
    (over_pp,) = times_by_dim(profile(near), MACHINE)
    assert (over_pp.seconds, over_pp.reach) == (ALPHA + 19, "node")


def test_unknown_link_leaves_the_seconds_unknown() -> None:
    alone = dataclasses.replace(MACHINE, network_link=None)
    near, far = total("all_gather", group(0, 1), 8), total("all_gather", group(0, 4), 8)
    assert collective_s(near, alone) is not None and collective_s(far, alone) is None
    assert communication_s(profile(near, far), alone) is None
    assert busiest_link_s(profile(near, far), alone) is None
    assert times_by_dim(profile(far), alone)[0].seconds is None
    assert communication_s(profile(near, far), Machine(name="unknown")) is None
    nothing = profile(total("all_reduce", group(2), 8), total("barrier", group(0, 1), 0))
    assert busiest_link_s(nothing, Machine(name="unknown")) == 0


NEAR = total("all_reduce", group(0, 1, dim="tp"), 5 * NODE, calls=2)  # 2 * 3 + 5 = 11 s
FAR = total("all_gather", group(0, 4), 2 * 11 * NETWORK)  # 7 + 11 = 18 s
TO_NEXT = total("send", group(0, 8, dim="pp"), 29 * NETWORK)  # 7 + 29 = 36 s
FROM_NEXT = total("recv", group(0, 8, dim="pp"), 31 * NETWORK)  # 7 + 31 = 38 s


def test_communication_one_after_the_other_is_the_sum() -> None:
    assert communication_s(profile(NEAR, FAR, TO_NEXT, FROM_NEXT), MACHINE) == 11 + 18 + 36 + 38
    assert communication_s(profile(), MACHINE) == 0


def test_busiest_link_has_its_collectives_and_the_messages_of_one_direction() -> None:
    assert busiest_link_s(profile(NEAR, FAR), MACHINE) == 18
    assert busiest_link_s(profile(NEAR, FAR, TO_NEXT, FROM_NEXT), MACHINE) == 18 + 38
    assert busiest_link_s(profile(), MACHINE) == 0


def test_times_by_dim_are_those_of_each_mesh_dimension() -> None:
    found = {time.dim: time for time in times_by_dim(profile(NEAR, FAR, FAR, TO_NEXT), MACHINE)}
    assert [*found] == ["dp", "pp", "tp"]  # 36 s, 36 s and 11 s
    dp, tp = found["dp"], found["tp"]
    assert (dp.size, dp.seconds, dp.reach) == (2, 2 * 18, "network")
    assert dp.cost.calls == 2 and dp.cost.payload_bytes == 2 * dp.cost.bus_bytes == 44 * NETWORK
    assert (tp.size, tp.seconds, tp.reach, tp.cost.calls) == (2, 11, "node", 2)
    assert tp.link == MACHINE.node_link


def test_bounds_hide_the_busiest_link_at_best_and_nothing_at_worst() -> None:
    bounds = step_bounds(profile(NEAR, FAR), dataclasses.replace(MACHINE, bytes_per_s=1.0))
    assert (bounds.communication_s, bounds.busiest_link_s) == (11 + 18, 18)
    assert bounds.fused_s == bounds.least_s == 18 and bounds.serial_s == 29
    assert bounds.bound == "communication"


def test_bounds_without_a_busiest_link_hide_no_communication_in_another() -> None:
    bounds = StepBounds(
        compute_s=2.0, memory_s=3.0, kernels_s=5.0, communication_s=7.0, operators=1
    )
    assert bounds.fused_s == bounds.least_s == 7 and bounds.serial_s == 12
