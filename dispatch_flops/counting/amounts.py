"""Amounts of work by phase, dtype and family of kernels, to be added up over a run's steps."""

from __future__ import annotations

from collections import Counter
from typing import Final

from dispatch_flops.analysis.kernel_families import family_of
from dispatch_flops.counting.aggregation import RecordedCalls
from dispatch_flops.profile import OpTotal
from dispatch_flops.profile.cost import COST_FIELDS, OpCost, counts_of

# ``{(phase, dtype, family, figure): amount}``, for a machine may have peaks of each family; for
# operators without a known cost ``{("", overload, "", UNCOUNTED): calls}``.
Amounts = Counter[tuple[str, str | None, str, str]]

UNCOUNTED: Final = "uncounted"
OTHER: Final = "other"  # in place of a family


def amounts_of(calls: RecordedCalls) -> Amounts:
    """Return the amounts of recorded calls, by phase, dtype and family."""
    found: Amounts = Counter()
    for totals in calls.op_totals({}).values():
        for total in totals:
            if total.uncounted:
                found["", total.op, "", UNCOUNTED] += total.uncounted
            if total.cost is not None and total.phase is not None:
                family = family_of(total.op) or OTHER
                for name, amount in zip(COST_FIELDS, counts_of(total.cost), strict=True):
                    found[total.phase, total.dtype, family, name] += amount
    return found


def as_operators(amounts: Amounts) -> tuple[OpTotal, ...]:
    """Return the amounts as one ``OpTotal`` for each phase, dtype and family."""
    figures: dict[tuple[str, str | None, str], dict[str, int]] = {}
    for (phase, dtype, family, name), amount in amounts.items():
        if name != UNCOUNTED:
            figures.setdefault((phase, dtype, family), {})[name] = amount
    return tuple(
        OpTotal(op=family, phase=phase, dtype=dtype, calls=1, cost=OpCost(**costs))  # type: ignore[arg-type]
        for (phase, dtype, family), costs in figures.items()
    )


def has_backward(amounts: Amounts) -> bool:
    """Return True if operators of a backward pass are among the amounts."""
    return any(phase == "backward" for phase, *_ in amounts)


def flops_of(amounts: Amounts) -> int:
    """Return the FLOPs of the amounts."""
    return sum(amount for (*_, name), amount in amounts.items() if name == "flops")
