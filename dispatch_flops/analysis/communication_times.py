"""Seconds of communication by the alpha-beta model: calls x latency + bytes / rate of a link."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dispatch_flops.analysis.machines import Link, Machine
from dispatch_flops.profile import CommCost, CommTotal, Profile

Reach = Literal["node", "network"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLink:
    """The link that limits a group of ranks. reach: it is within a node, or between nodes."""

    link: Link
    reach: Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class DimTime:
    """Communication of one rank in groups of one size over one mesh dimension.

    dim: name of the mesh dimension, or of the group where it has none. size: ranks of a group.
    cost: calls, payload and bus bytes. seconds: None where the link is unknown.
    reach: "node" or "network", whichever the slowest call uses.
    link: that limits the group; None where it is unknown.
    """

    dim: str
    size: int
    cost: CommCost
    seconds: float | None
    reach: Reach | None
    link: Link | None


def group_link(total: CommTotal, machine: Machine, rank: int | None = None) -> GroupLink | None:
    """Return the link that limits a communication; None where the machine does not state it.

    Ranks are placed on nodes in order. A group over several nodes communicates in rings, as many
    as it has ranks on a node: each leaves the node by the network link of another rank. Together
    they are not faster than the link within a node.

    rank: that sends or receives; with it, a message within a node uses the node's link.
    """
    nodes = _ranks_by_node(total, machine.devices_per_node, rank)
    if len(nodes) == 1:
        node = machine.node_link
        return None if node is None else GroupLink(link=node, reach="node")
    network = machine.network_link
    if network is None:
        return None
    together = 1 if total.kind in ("send", "recv") else min(nodes.values())
    rate = together * network.bytes_per_s
    if together > 1 and machine.node_link is not None:
        rate = min(rate, machine.node_link.bytes_per_s)
    return GroupLink(link=replace(network, bytes_per_s=rate), reach="network")


def _ranks_by_node(total: CommTotal, per_node: int, rank: int | None) -> Counter[int]:
    """Return ``{node: ranks}`` of those that take part; of the first ranks where unknown."""
    ranks: Iterable[int] = total.group.ranks or range(total.group.size)
    shares = total.sent_bytes if total.kind == "send" else total.received_bytes
    if rank is not None and total.kind in ("send", "recv") and shares is not None:
        peers = zip(total.group.ranks, shares, strict=True)
        ranks = {rank, *(peer for peer, share in peers if share)}
    return Counter(member // per_node for member in ranks)


def collective_s(total: CommTotal, machine: Machine, rank: int | None = None) -> float | None:
    """Return calls x latency + bus bytes / rate of the link; None where the link is unknown.

    A latency that is not known is left out: the result is then a lower bound.

    rank: as for ``group_link``. Communication of a group of one rank, or without data, is 0.
    """
    if total.group.size < 2 or not total.payload_bytes:
        return 0.0
    found = group_link(total, machine, rank)
    if found is None:
        return None
    waiting = total.calls * (found.link.latency_s or 0.0)
    return waiting + total.bus_bytes / found.link.bytes_per_s


def communication_s(profile: Profile, machine: Machine) -> float | None:
    """Return the seconds of all communication, one after the other; None if a link is unknown."""
    seconds = [collective_s(part, machine, profile.run.rank) for part in profile.communication]
    known = [part for part in seconds if part is not None]
    return sum(known) if len(known) == len(seconds) else None


def busiest_link_s(profile: Profile, machine: Machine) -> float | None:
    """Return the seconds of the link that is used longest; None where a link is unknown.

    Links within a node and between nodes work at the same time, and so do the two directions of
    a link: messages that are sent and received use one direction each, collectives both.
    """
    seconds: defaultdict[tuple[Reach, str], float] = defaultdict(float)
    for part in profile.communication:
        took = collective_s(part, machine, profile.run.rank)
        if took is None:
            return None
        found = group_link(part, machine, profile.run.rank)
        if found is not None:
            for direction in ("send", "recv"):
                if part.kind == direction or part.kind not in ("send", "recv"):
                    seconds[found.reach, direction] += took
    return max(seconds.values(), default=0.0)


def times_by_dim(profile: Profile, machine: Machine) -> tuple[DimTime, ...]:
    """Return the communication over each mesh dimension, the longest first."""
    parts: defaultdict[tuple[str, int], list[CommTotal]] = defaultdict(list)
    for part in profile.communication:
        if part.payload_bytes:
            parts[part.group.label, part.group.size].append(part)
    found = [_dim_time(dim, size, of, profile, machine) for (dim, size), of in parts.items()]
    return tuple(sorted(found, key=lambda time: (-(time.seconds or 0.0), time.dim)))


def _dim_time(
    dim: str, size: int, parts: list[CommTotal], profile: Profile, machine: Machine
) -> DimTime:
    rank = profile.run.rank
    seconds = [collective_s(part, machine, rank) for part in parts]
    known = [part for part in seconds if part is not None]
    links = [found for part in parts if (found := group_link(part, machine, rank)) is not None]
    slowest = min(links, key=lambda found: found.link.bytes_per_s, default=None)
    return DimTime(
        dim=dim,
        size=size,
        cost=sum((part.cost for part in parts), start=CommCost()),
        seconds=sum(known) if len(known) == len(seconds) else None,
        reach=None if slowest is None else slowest.reach,
        link=None if slowest is None else slowest.link,
    )
