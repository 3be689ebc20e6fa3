"""What a meter shows of some steps: totals, rates and utilisation."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import distributed

from dispatch_flops.analysis.efficiency import utilisation
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.counting.step_totals import StepTotals
from dispatch_flops.profile import OpTotal, add_costs
from dispatch_flops.profile.cost import COST_FIELDS, MODEL_PHASES, PHASES, OpCost, Phase, in_order
from dispatch_flops.units import flops_per_s_text, fraction_text, percent_text, ratio


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MeterReading(StepTotals):
    """Costs, times and rates of some steps.

    steps: how many. samples, tokens: what the program stated of them.
    operators: their cost, one total for each phase, dtype and family of kernels.
    uncounted: ``{operator: calls}`` of what has no known cost; with one entry or more, all figures
        are lower bounds.
    is_estimate: the MACs or FLOPs of a step depend on more than its signature, or a part of it ran
        only while it was not counted. Bytes, which data change a little in many models, are not
        compared.
    standard_error: that of ``total_flops``, as far as the steps that were counted tell how much the
        others differ; 0 where none is estimated, None where they do not tell.
    timed_steps: of the steps, those that ran without the counter. Rates and utilisations are of
        these alone, with their ``timed_operators``, ``timed_tokens`` and wall time ``seconds``.
    devices: number of ranks whose figures are summed.

    A rate is None if no such step took time.
    """

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    operators: tuple[OpTotal, ...] = ()
    uncounted: Mapping[str, int] = field(default_factory=dict)
    is_estimate: bool = False
    standard_error: float | None = 0.0
    timed_steps: int = 0
    timed_operators: tuple[OpTotal, ...] = ()
    timed_tokens: int = 0
    seconds: float = 0.0
    devices: int = 1
    machine: Machine | None = None

    def __repr__(self) -> str:
        return f"<MeterReading: {self.text()}>"

    def text(self) -> str:
        """Return steps, FLOPs and what is known of rates and utilisation, in a line."""
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        parts = [steps, f"{self._bound()}{self.total_flops} FLOPs"]
        if self.standard_error:
            parts[1] += f" ± {percent_text(self.standard_error, self.total_flops)}"
        if self.flops_per_s is not None:
            parts.append(flops_per_s_text(self.flops_per_s))
        known = {"MFU": self.mfu, "HFU": self.hfu}
        parts += [f"{name} {fraction_text(v)}" for name, v in known.items() if v is not None]
        return ", ".join(parts)

    def _bound(self) -> str:
        if self.is_lower_bound:
            return "at least "
        return "about " if self.is_estimate else ""

    @property
    def costs(self) -> dict[Phase, OpCost]:
        """Cost of each phase."""
        found = in_order((*PHASES, *(op.phase for op in self.operators)))
        return {phase: add_costs(_costs(self.operators, (phase,))) for phase in found}

    @property
    def flops_per_s(self) -> float | None:
        """FLOP/s over all phases."""
        return ratio(add_costs(op.cost for op in self.timed_operators).flops, self.seconds)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second; None if the program stated no tokens."""
        return ratio(self.timed_tokens or None, self.seconds)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation; None if a peak of the machine is not known, too."""
        return self._utilisation(MODEL_PHASES)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation: with recomputation and optimizer; None as for ``mfu``."""
        return self._utilisation(PHASES)

    def over_ranks(self) -> MeterReading:
        """Return the sum of this reading over all ranks; itself where there is one rank.

        Every rank must call this. Seconds are those of the slowest rank. Where ranks have timed
        different numbers of steps, as with batches of shapes of their own, each rank's mean counts
        as often as that of the rank that timed most. Rates are None until all ranks have timed one.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            return self
        found: list[MeterReading] = [self] * distributed.get_world_size()
        distributed.all_gather_object(found, self)
        return _sum_of_ranks(found)

    def _utilisation(self, phases: tuple[Phase, ...]) -> float | None:
        if not self.timed_steps:
            return None
        seconds = self.seconds * self.devices
        return utilisation(self.timed_operators, phases, self.machine, seconds)


def _sum_of_ranks(found: list[MeterReading]) -> MeterReading:
    uncounted: Counter[str] = Counter()
    for one in found:
        uncounted.update(one.uncounted)
    errors = [one.standard_error for one in found if one.standard_error is not None]
    ran = [one for one in found if one.steps]
    timed_steps = 0
    if all(one.timed_steps for one in ran):
        timed_steps = max((one.timed_steps for one in ran), default=0)
    timed = [_as_if_timed(one, timed_steps) for one in ran if timed_steps]
    return dataclasses.replace(
        found[0],
        steps=max(one.steps for one in found),
        samples=sum(one.samples for one in found),
        tokens=sum(one.tokens for one in found),
        operators=tuple(op for one in found for op in one.operators),
        uncounted=dict(uncounted),
        is_estimate=any(one.is_estimate for one in found),
        standard_error=math.hypot(*errors) if len(errors) == len(found) else None,
        timed_steps=timed_steps,
        timed_operators=tuple(op for one in timed for op in one.timed_operators),
        timed_tokens=sum(one.timed_tokens for one in timed),
        seconds=max((one.seconds for one in timed), default=0.0),
        devices=sum(one.devices for one in found),
    )


def _as_if_timed(one: MeterReading, steps: int) -> MeterReading:
    """Return the reading as if so many steps had been timed, with the mean of those that were."""
    if one.timed_steps == steps:
        return one

    def scaled(amount: int) -> int:
        return amount * steps // one.timed_steps

    def scaled_cost(cost: OpCost) -> OpCost:
        return OpCost(**{name: scaled(getattr(cost, name)) for name in COST_FIELDS})

    return dataclasses.replace(
        one,
        timed_steps=steps,
        timed_operators=tuple(
            dataclasses.replace(op, cost=op.cost and scaled_cost(op.cost))
            for op in one.timed_operators
        ),
        timed_tokens=scaled(one.timed_tokens),
        seconds=one.seconds * steps / one.timed_steps,
    )


def _costs(operators: tuple[OpTotal, ...], phases: tuple[Phase, ...]) -> list[OpCost | None]:
    return [op.cost for op in operators if op.phase in phases]
