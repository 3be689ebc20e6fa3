"""Totals of some steps, as a meter and a counting backend read them."""

from __future__ import annotations

from collections.abc import Mapping

from dispatch_flops.profile import add_costs
from dispatch_flops.profile.cost import MODEL_PHASES, OpCost, Phase


class StepTotals:
    """Base of readings of steps. uncounted: ``{what has no known cost: how often it ran}``."""

    __slots__ = ()
    uncounted: Mapping[str, int]

    @property
    def costs(self) -> Mapping[Phase, OpCost]:
        """Cost of each phase."""
        raise NotImplementedError

    @property
    def is_lower_bound(self) -> bool:
        """True if something that ran has no known cost."""
        return bool(self.uncounted)

    @property
    def total(self) -> OpCost:
        """Cost of all phases (hardware FLOPs)."""
        return add_costs(self.costs.values())

    @property
    def model_total(self) -> OpCost:
        """Cost of forward and backward, without recomputation (model FLOPs)."""
        return add_costs(self.costs.get(phase) for phase in MODEL_PHASES)

    @property
    def total_flops(self) -> int:
        """FLOPs of all phases."""
        return self.total.flops

    @property
    def model_flops(self) -> int:
        """FLOPs of forward and backward."""
        return self.model_total.flops
