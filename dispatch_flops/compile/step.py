"""Cost of what compiled graphs ran between two points of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import add_costs
from dispatch_flops.profile.cost import MODEL_PHASES, OpCost, Phase
from dispatch_flops.units import ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Cost and wall time of the graphs that ran between two calls of ``CountingBackend.step``.

        step = backend.step()
        print(step.total.flops, step.flops_per_s, step.mfu(peak_flops_per_s=989e12))

    Totals and rates have the names that a reading of ``FlopMeter`` has.

    costs: by phase. seconds: wall time between the calls. The device is not synchronized, so that
    a single step may be off; over many steps the error averages out.
    uncounted: ``{what ran without a known cost: how often}``. With one entry or more, all figures
    are lower bounds.
    """

    costs: Mapping[Phase, OpCost] = field(default_factory=dict)
    seconds: float
    uncounted: Mapping[str, int] = field(default_factory=dict)

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

    @property
    def flops_per_s(self) -> float | None:
        """FLOP/s over all phases; None if no time passed."""
        return ratio(self.total.flops, self.seconds)

    def mfu(self, peak_flops_per_s: float) -> float | None:
        """Return the model FLOPs utilization, a share of the peak; None if no time passed.

        It is a lower bound where ``is_lower_bound`` is True.

        peak_flops_per_s: dense peak of the device for the model's dtype. Raises ConfigError if it
        is not positive.
        """
        if not peak_flops_per_s > 0:
            raise ConfigError(f"peak_flops_per_s={peak_flops_per_s!r}: pass FLOP/s above 0")
        achieved = ratio(self.model_total.flops, self.seconds)
        return None if achieved is None else achieved / peak_flops_per_s
