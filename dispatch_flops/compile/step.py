"""Cost of what compiled graphs ran between two points of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dispatch_flops.analysis.machines import is_finite
from dispatch_flops.counting.step_totals import StepTotals
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile.cost import OpCost, Phase
from dispatch_flops.units import ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(StepTotals):
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
    def flops_per_s(self) -> float | None:
        """FLOP/s over all phases; None if no time passed."""
        return ratio(self.total.flops, self.seconds)

    def mfu(self, peak_flops_per_s: float) -> float | None:
        """Return the model FLOPs utilization, a share of the peak; None if no time passed.

        It is a lower bound where ``is_lower_bound`` is True.

        peak_flops_per_s: dense peak of the device for the model's dtype. Raises ConfigError if it
        is not a number above 0.
        """
        if not is_finite(peak_flops_per_s) or peak_flops_per_s <= 0:
            raise ConfigError(f"peak_flops_per_s={peak_flops_per_s!r:.60}: pass FLOP/s above 0")
        achieved = ratio(self.model_total.flops, self.seconds)
        return None if achieved is None else achieved / peak_flops_per_s
