"""Operators over all modules: rows by overload and dtype, cost by dtype, phases that ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dispatch_flops.profile import OpTotal, Profile, add_costs, flops_of, merge_ops
from dispatch_flops.profile.cost import ZERO, OpCost, Phase, in_order
from dispatch_flops.units import ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """All calls of one operator with one compute dtype.

    cost: of the calls whose cost is known; None if no call's cost is known.
    share: of all known FLOPs, 0 to 1; None where the cost is unknown or the total is 0.
    The other fields are those of ``OpTotal``.

    Example::

        for row in operator_rows(profile)[:5]:
            print(row.op, row.dtype, row.calls, row.share)
    """

    op: str
    kind: str
    phases: tuple[Phase, ...]
    dtype: str | None
    calls: int
    uncounted: int = 0
    cost: OpCost | None
    share: float | None = None
    latency_s: float | None = None
    error: str | None = None

    @property
    def bytes_per_call(self) -> float | None:
        """Mean bytes read and written, over the calls whose cost is known."""
        return ratio(self.cost.bytes_total, self.calls - self.uncounted) if self.cost else None

    @property
    def arithmetic_intensity(self) -> float | None:
        """FLOPs per byte; None where unknown or where no byte is moved."""
        return self.cost.arithmetic_intensity if self.cost else None


def operator_rows(profile: Profile, phase: Phase | None = None) -> list[OperatorRow]:
    """Return a row per operator and dtype, of model and outside: most FLOPs first, then bytes.

    Example::

        rows = operator_rows(profile, "forward")
        print([row.op for row in rows if (row.arithmetic_intensity or 0) < 10])  # limited by memory
    """
    merged: dict[tuple[str, str | None], OpTotal] = {}
    phases: dict[tuple[str, str | None], list[Phase | None]] = {}
    for op in _ops(profile, phase):
        key = (op.op, op.dtype)
        merged[key] = merge_ops(merged[key], op) if key in merged else op
        phases.setdefault(key, []).append(op.phase)
    total = sum(flops_of(op) for op in merged.values())
    rows = [
        OperatorRow(
            op=op.op,
            kind=op.kind,
            phases=in_order(phases[key]),
            dtype=op.dtype,
            calls=op.calls,
            uncounted=op.uncounted,
            cost=op.cost,
            share=ratio(op.cost.flops if op.cost else None, total),
            latency_s=op.latency_s,
            error=op.error,
        )
        for key, op in merged.items()
    ]
    return sorted(rows, key=_operator_rank)


def cost_by_dtype(profile: Profile, phase: Phase | None = None) -> dict[str | None, OpCost]:
    """Return ``{compute dtype: known cost}``, most FLOPs first; None for calls without tensors.

    Example::

        with torch.autocast("cpu", torch.bfloat16), counter:
            model(x)
        for dtype, cost in cost_by_dtype(counter.profile).items():
            print(dtype, cost.macs)
    """
    groups: dict[str | None, list[OpCost | None]] = {}
    for op in _ops(profile, phase):
        groups.setdefault(op.dtype, []).append(op.cost)
    costs = {dtype: add_costs(parts) for dtype, parts in groups.items()}
    return dict(sorted(costs.items(), key=lambda item: (-item[1].flops, item[0] or "")))


def phases_of(profile: Profile) -> tuple[Phase, ...]:
    """Return the phases in which an operator ran.

    The order is forward, backward, recompute, optimizer, setup; then others as they appear.

    Example::

        for phase in phases_of(profile):
            print(phase, profile.total(phase).flops)
    """
    return in_order(op.phase for op in profile.op_totals())


def _ops(profile: Profile, phase: Phase | None) -> Iterator[OpTotal]:
    profile.total(phase)  # raises for what is not a phase
    return (op for op in profile.op_totals() if phase is None or op.phase == phase)


def _operator_rank(row: OperatorRow) -> tuple[int, int, str, str]:
    cost = row.cost or ZERO
    return (-cost.flops, -cost.bytes_total, row.op, row.dtype or "")
