"""The cost of operator calls: integer figures that add.

``OpCost`` is the one cost value of the package. A new figure is one new field of it: sums,
products, checks, saved profiles and operator rows take the fields from the class.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from dispatch_flops.errors import ConfigError
from dispatch_flops.units import ratio

# "setup" is the extra micro-batch by which a pipeline infers its shapes. It is not part of a step,
# so tables have it only where it took place.
Phase = Literal["forward", "backward", "recompute", "optimizer", "setup"]
PHASES: tuple[Phase, ...] = get_args(Phase)
STEP_PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer")
MODEL_PHASES: tuple[Phase, ...] = ("forward", "backward")
ALL_PHASES = "all"  # in place of a phase on pages: no phase has this name

FLOPS_PER_MAC = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """Cost of one operator call, or of several together; costs add, and multiply by an int.

    ``sum`` adds any number of them.

    macs: multiply-accumulates of contractions.
    flops: floating-point operations, ``2 * macs`` included.
    bytes_read, bytes_written: bytes that an unfused operator must move once. Where a formula
        leaves both at 0, the profiler fills in elements x element size of the tensors that go
        in and come out. A tensor that the operator changes, and does not return, counts as one
        that goes in: state both for such an operator.

    Example::

        cost = OpCost(macs=6, flops=12) + 2 * OpCost(flops=5)
        print(cost.macs, cost.flops)  # prints 6 22
    """

    macs: int = 0
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def __add__(self, other: OpCost) -> OpCost:
        return add_costs((self, other)) if isinstance(other, OpCost) else NotImplemented

    def __radd__(self, other: int) -> OpCost:
        return self if other == 0 else NotImplemented  # sum() starts at 0

    def __mul__(self, times: int) -> OpCost:
        return self if times == 1 else _from_counts(count * times for count in counts_of(self))

    __rmul__ = __mul__

    @property
    def bytes_total(self) -> int:
        """Bytes read and written together."""
        return self.bytes_read + self.bytes_written

    @property
    def arithmetic_intensity(self) -> float | None:
        """FLOPs per byte; None where no byte is moved, or where it exceeds a float."""
        return ratio(self.flops, self.bytes_total)


ZERO = OpCost()
COST_FIELDS: tuple[str, ...] = tuple(field.name for field in fields(OpCost))

# With attrgetter, and ZERO shared by all that is free, summing over the fields is as fast as
# fields written out by hand.
counts_of: Callable[[OpCost], tuple[int, ...]] = operator.attrgetter(*COST_FIELDS)
_COUNTERS: tuple[Callable[[OpCost], int], ...] = tuple(map(operator.attrgetter, COST_FIELDS))


def _from_counts(counts: Iterable[int]) -> OpCost:
    named = dict(zip(COST_FIELDS, counts, strict=True))
    return OpCost(**named) if any(named.values()) else ZERO


def add_costs(costs: Iterable[OpCost | None]) -> OpCost:
    """Return the sum of the known costs; ``ZERO`` if none is known."""
    known = [cost for cost in costs if cost is not None and cost is not ZERO]
    if len(known) < 2:
        return known[0] if known else ZERO
    return _from_counts(sum(map(count, known)) for count in _COUNTERS)


def in_order(phases: Iterable[Phase | None]) -> tuple[Phase, ...]:
    """Return each phase once: those of ``PHASES`` first, others in order of appearance."""
    seen = [phase for phase in dict.fromkeys(phases) if phase is not None]
    return (*(p for p in PHASES if p in seen), *(p for p in seen if p not in PHASES))


def check_phase(phase: Phase | None, others: Iterable[Phase | None]) -> None:
    """Raise ConfigError if ``phase`` is neither standard nor one of ``others``; None is all."""
    known = in_order((*PHASES, *others))
    if phase is not None and phase not in known:
        raise ConfigError(f"{phase!r:.60} is not a phase; choose one of {', '.join(known)}")


def flops(count: int) -> OpCost:
    """Return a cost of ``count`` FLOPs that are not part of a MAC."""
    return OpCost(flops=count)


def contraction(macs: int, *, complex_numbers: bool = False, extra_flops: int = 0) -> OpCost:
    """Return the cost of ``macs`` multiply-accumulates, plus FLOPs that are not part of a MAC.

    A complex multiply-accumulate is 4 real ones: (a+bi)(c+di) takes 4 products and 2 sums, and
    the accumulation takes 2 more sums. That is 8 FLOPs.
    """
    real_macs = 4 * macs if complex_numbers else macs
    return OpCost(macs=real_macs, flops=FLOPS_PER_MAC * real_macs + extra_flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of one call's cost that belongs to a submodule or to another phase.

    child: name of a submodule, relative to the running module. Where the module has no such
        submodule, the share is the module's own.
    phase: the phase that the share belongs to; None for the phase of the call.

    Example::

        # A fused block whose second product belongs to its submodule ``out_proj``.
        product = OpCost(macs=60, flops=120)
        split = Split(own=product, shares=(Share(cost=product, child="out_proj"),))
        print(split.total.macs)  # prints 120
    """

    cost: OpCost
    child: str = ""
    phase: Phase | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Cost of one call, divided between the running module, its submodules and other phases.

    own: the part of the running module in the phase of the call.

    Example::

        # The backward of a fused attention: two of its five products compute the scores again.
        product = OpCost(macs=64, flops=128)
        split = Split(own=4 * product, shares=(Share(cost=product, phase="recompute"),))
        print(split.own.macs, split.total.macs)  # prints 256 320
    """

    own: OpCost = ZERO
    shares: tuple[Share, ...] = field(default=())

    @property
    def total(self) -> OpCost:
        """Cost of the whole call: ``own`` and all shares."""
        return add_costs((self.own, *(share.cost for share in self.shares)))
