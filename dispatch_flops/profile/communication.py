"""What a rank sends and receives: totals of communication calls, which add."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile.cost import PHASES, Phase

CommKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
    "scatter", "send", "recv", "barrier",
]  # fmt: skip
COMM_KINDS: tuple[CommKind, ...] = get_args(CommKind)
CommBy = Literal["module", "group", "phase", "kind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommGroup:
    """A process group: the ranks that take part in a collective.

    name: torch's description of the group, such as "default_pg" or "mesh_tp".
    size: number of ranks. ranks: their global ranks, in the order of the group.
    mesh_dim: name of the mesh dimension whose group this is; None where there is none.

    Example::

        CommGroup(name="mesh_tp", size=2, ranks=(4, 5), mesh_dim="tp")
    """

    name: str
    size: int
    ranks: tuple[int, ...]
    mesh_dim: str | None = None

    @property
    def label(self) -> str:
        """The mesh dimension's name; without one, the group's name."""
        return self.mesh_dim or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class CommCost:
    """Calls and bytes of several communication calls together; costs add.

    payload_bytes, bus_bytes: as in ``CommTotal``.
    """

    calls: int = 0
    payload_bytes: int = 0
    bus_bytes: int = 0

    def __add__(self, other: CommCost) -> CommCost:
        return CommCost(
            calls=self.calls + other.calls,
            payload_bytes=self.payload_bytes + other.payload_bytes,
            bus_bytes=self.bus_bytes + other.bus_bytes,
        )

    def __mul__(self, factor: int) -> CommCost:
        return CommCost(
            calls=self.calls * factor,
            payload_bytes=self.payload_bytes * factor,
            bus_bytes=self.bus_bytes * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommTotal:
    """All calls of one communication operator by one module, phase, dtype and group.

    fqn: the module that causes the communication. For FSDP that is the wrapped module, for tensor
        parallelism the module that the plan names.
    phase: the phase that the communication serves: reduce-scatters of gradients are "backward".
    kind: what is done, such as "all_gather". op: the overload, such as
        "c10d._allgather_base_.default".
    dtype: of the elements that move; None for a barrier.
    payload_bytes: of all calls together, the size as nccl-tests defines it. For all_gather and
        gather that is all ranks' data together; for every other kind it is this rank's input. A
        scatter has the data of all ranks, a recv what it receives.
    sent_bytes, received_bytes: bytes to and from each rank of the group, in the order of
        ``group.ranks``, 0 for this rank itself. None where the shares are even or not known.

    Example::

        group = CommGroup(name="mesh_dp", size=4, ranks=(0, 1, 2, 3), mesh_dim="dp")
        total = CommTotal(fqn="layers.0", phase="backward", kind="reduce_scatter",
                          op="c10d._reduce_scatter_base_.default", dtype="float32", group=group,
                          calls=1, payload_bytes=4096)
        total.bus_bytes  # 4096 * 3 // 4
    """

    fqn: str
    phase: Phase
    kind: CommKind
    op: str
    dtype: str | None
    group: CommGroup
    calls: int
    payload_bytes: int
    sent_bytes: tuple[int, ...] | None = None
    received_bytes: tuple[int, ...] | None = None

    @property
    def bus_bytes(self) -> int:
        """Bytes that each rank sends over its link, by nccl-tests' factors, rounded down.

        With n ranks: all_reduce moves 2(n-1)/n of the payload; all_gather, reduce_scatter,
        all_to_all, gather and scatter (n-1)/n; every other kind the whole payload. An all_to_all
        of known splits moves what it sends to the other ranks.
        Source: nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth".
        """
        if self.kind == "all_to_all" and self.sent_bytes is not None:
            return sum(self.sent_bytes)
        n = self.group.size
        if self.kind == "all_reduce":
            return 2 * (n - 1) * self.payload_bytes // n
        if self.kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
            return (n - 1) * self.payload_bytes // n
        return self.payload_bytes

    @property
    def cost(self) -> CommCost:
        """Calls and bytes, for sums over several totals."""
        return CommCost(
            calls=self.calls, payload_bytes=self.payload_bytes, bus_bytes=self.bus_bytes
        )


def merge_communication(totals: Iterable[CommTotal]) -> tuple[CommTotal, ...]:
    """Return the totals with those of equal module, phase, operator, dtype and group added.

    Bytes per rank are known in a sum where all parts have them.
    """
    merged: dict[Any, CommTotal] = {}
    for total in totals:
        key = (total.fqn, total.phase, total.kind, total.op, total.dtype, total.group)
        known = merged.get(key)
        merged[key] = total if known is None else _add(known, total)
    return tuple(merged.values())


def sum_by(
    totals: Iterable[CommTotal], by: CommBy
) -> dict[str, CommCost] | dict[CommGroup, CommCost]:
    """Return the summed cost of each module, group, phase or kind; most payload first.

    Raises ConfigError for another ``by``.
    """
    if by not in tuple(_KEYS):
        raise ConfigError(f"by={by!r:.60}: choose one of {', '.join(map(repr, _KEYS))}")
    name = _KEYS[by]
    sums: dict[Any, CommCost] = {}
    for total in totals:
        key = getattr(total, name)
        sums[key] = sums.get(key, CommCost()) + total.cost
    if by == "phase":
        return {phase: sums[phase] for phase in sorted(sums, key=_phase_order)}
    return dict(sorted(sums.items(), key=lambda item: (-item[1].payload_bytes, str(item[0]))))


_KEYS: dict[str, str] = {"module": "fqn", "group": "group", "phase": "phase", "kind": "kind"}


def _phase_order(phase: Phase) -> tuple[int, str]:
    return (PHASES.index(phase) if phase in PHASES else len(PHASES), phase)


def _add(a: CommTotal, b: CommTotal) -> CommTotal:
    return replace(
        a,
        calls=a.calls + b.calls,
        payload_bytes=a.payload_bytes + b.payload_bytes,
        sent_bytes=_add_shares(a.sent_bytes, b.sent_bytes),
        received_bytes=_add_shares(a.received_bytes, b.received_bytes),
    )


def _add_shares(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if a is None or b is None else tuple(map(sum, zip(a, b, strict=True)))
