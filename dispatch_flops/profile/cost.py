"""What one operator call costs.

``OpCost`` is the unit of account of the whole package: four integers that add.
``Split`` is what a formula returns when one call's cost belongs to several places.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["forward", "backward", "recompute", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer")
MODEL_PHASES: tuple[Phase, ...] = ("forward", "backward")

FLOPS_PER_MAC = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """Work of one operator call, or a sum of such.

    macs: multiply-accumulates of contractions.
    flops: floating-point operations, ``2 * macs`` included.
    bytes_read, bytes_written: what an unfused op must move once. A formula may leave
        both at 0: the collector then fills in elements x element size of the tensors
        that go in and come out.
    """

    macs: int = 0
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def __add__(self, other: OpCost) -> OpCost:
        return OpCost(
            macs=self.macs + other.macs,
            flops=self.flops + other.flops,
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
        )

    def __mul__(self, times: int) -> OpCost:
        return OpCost(
            macs=self.macs * times,
            flops=self.flops * times,
            bytes_read=self.bytes_read * times,
            bytes_written=self.bytes_written * times,
        )

    __rmul__ = __mul__

    @property
    def bytes_total(self) -> int:
        """Bytes read and written together."""
        return self.bytes_read + self.bytes_written

    @property
    def arithmetic_intensity(self) -> float | None:
        """FLOPs per byte; ``None`` where no byte moves."""
        return self.flops / self.bytes_total if self.bytes_total else None


ZERO = OpCost()


def flops(count: int) -> OpCost:
    """A cost of ``count`` FLOPs that are no MACs."""
    return OpCost(flops=count)


def contraction(macs: int, *, complex_numbers: bool = False, extra_flops: int = 0) -> OpCost:
    """Cost of ``macs`` multiply-accumulates, plus FLOPs that are no part of a MAC.

    A complex multiply-accumulate is 4 real ones: (a+bi)(c+di) takes 4 products and
    2 sums, the accumulation 2 sums more: 8 FLOPs.
    """
    real_macs = 4 * macs if complex_numbers else macs
    return OpCost(macs=real_macs, flops=FLOPS_PER_MAC * real_macs + extra_flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of one call's cost that belongs elsewhere than the call itself.

    child: name of a submodule of the module at work, relative to it, where the module has one.
    phase: a phase other than the one observed.
    """

    cost: OpCost
    child: str = ""
    phase: Phase | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One call's cost: what is its own, and shares that belong to submodules or other phases.

    The call's whole cost is ``own`` plus all shares.
    """

    own: OpCost = ZERO
    shares: tuple[Share, ...] = field(default=())

    @property
    def total(self) -> OpCost:
        return sum((share.cost for share in self.shares), start=self.own)
