"""What generation needs and how long it takes at least: prefill and decode of one choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.memory_fit import MemoryFit
from dispatch_flops.analysis.plain_figures import PlainFigures, figures_of, plain
from dispatch_flops.analysis.step_bounds import StepBounds
from dispatch_flops.profile import Profile
from dispatch_flops.units import ratio

GENERATION_PLAN_SCHEMA = "dispatch_flops.generation_plan"
GENERATION_PLAN_VERSION = 1

Range = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStep:
    """One pass of a model that generates: a prompt, or a step of decode.

    profile: the pass as it was counted, without data; memory included.
    cache_bytes: keys and values of all sequences after the pass.
    read_bytes: of the parameters, the buffers, and the cache before the pass, that operators read.
        Rows and experts that tokens choose count as distinct, as far as there are so many.
    tokens: the fewest and the most new tokens that the pass yields, of all sequences together.
    """

    machine: Machine
    profile: Profile
    bounds: StepBounds
    cache_bytes: int
    read_bytes: int
    tokens: tuple[int, int]

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that the pass allocates; None where it was not followed."""
        return None if self.profile.memory is None else self.profile.memory.peak_bytes

    @property
    def memory_by_role(self) -> dict[str, int] | None:
        """What the peak consists of, the largest first; None where memory was not followed."""
        return None if self.profile.memory is None else self.profile.memory.by_role()

    @property
    def reading_s(self) -> float | None:
        """Seconds to read the parameters and the cache once; None where a rate is unknown."""
        return ratio(self.read_bytes, self.machine.bytes_per_s)

    @property
    def fused_s(self) -> float | None:
        """Seconds if parameters and cache are read once and fusion saves all other traffic."""
        if self.bounds.fused_s is None or self.reading_s is None:
            return None
        return max(self.bounds.fused_s, self.reading_s)

    @property
    def bound(self) -> Literal["compute", "memory"] | None:
        """ "compute" if all FLOPs at the peaks take at least as long as ``reading_s``."""
        if self.bounds.compute_s is None or self.reading_s is None:
            return None
        return "compute" if self.bounds.compute_s >= self.reading_s else "memory"

    @property
    def token_s(self) -> Range:
        """Least seconds per token of a sequence: of ``fused_s`` and the most tokens, and of
        nothing hidden and the fewest."""
        sequences, most = self.tokens
        slow = self.bounds.serial_s
        return _per(self.fused_s, most, sequences), slow

    @property
    def tokens_per_s(self) -> Range:
        """New tokens per second of the device: with nothing hidden, and with ``fused_s``."""
        fewest, most = self.tokens
        return ratio(fewest, self.bounds.serial_s), ratio(most, self.fused_s)


def _per(seconds: float | None, tokens: int, sequences: int) -> float | None:
    return None if seconds is None else seconds * sequences / tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGeneration(MemoryFit):
    """Generation with one choice of sizes, on one device of a machine.

    sizes: what was chosen, such as ``{"batch": 8, "prompt": 2048, "new": 256}``.
    prefill: the pass over the prompt; None for a step of given sequences.
    decode: the step at the mean context, whose least time is at most the mean of all steps, unless
        a sliding window fills up in between; None where prefill yields the only token.
    last: the last step, with the largest cache.
    steps: the fewest and the most steps of decode.
    largest_batch: the largest batch that fits, searched up to 2^20; 0 where none does, None where
        it was not searched.
    compute_bound_batch: the smallest batch whose decode is bound by computing; 0 where none is,
        None where it was not searched.
    """

    sizes: Mapping[str, Any]
    machine: Machine
    prefill: GenerationStep | None
    decode: GenerationStep | None
    last: GenerationStep | None
    steps: tuple[int, int]
    largest_batch: int | None = None
    compute_bound_batch: int | None = None

    @property
    def passes(self) -> tuple[GenerationStep, ...]:
        """The passes that were counted."""
        return tuple(step for step in (self.prefill, self.decode, self.last) if step is not None)

    @property
    def highest(self) -> GenerationStep:
        """The pass with the highest peak of memory."""
        return max(self.passes, key=lambda step: step.peak_bytes or 0)

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that any pass allocates; None where it was not followed."""
        return self.highest.peak_bytes

    @property
    def cache_bytes(self) -> int:
        """Keys and values at the end."""
        return max(step.cache_bytes for step in self.passes)

    @property
    def seconds(self) -> Range:
        """Least seconds of prefill and all decode: with ``fused_s``, and with nothing hidden."""
        fewest, most = self.steps
        return (
            _sum(self.prefill, self.decode, fewest, lambda step: step.fused_s),
            _sum(self.prefill, self.decode, most, lambda step: step.bounds.serial_s),
        )


def _sum(
    prefill: GenerationStep | None,
    decode: GenerationStep | None,
    steps: int,
    seconds_of: Any,
) -> float | None:
    total = 0.0
    for step, times in ((prefill, 1), (decode, steps)):
        seconds = 0.0 if step is None else seconds_of(step)
        if seconds is None:
            return None
        total += times * seconds
    return total


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GenerationPlan(PlainFigures):
    """Choices side by side, with what they assume.

    choices: one for each combination of sizes. assumptions: in words, for the reader.

    Example::

        choice = json.loads(planned.to_json())["choices"][0]
        choice["sizes"], choice["cache_bytes"], choice["decode"]["tokens_per_s"]
    """

    machine: Machine
    choices: tuple[PlannedGeneration, ...]
    assumptions: tuple[str, ...] = field(default_factory=tuple)

    def __repr__(self) -> str:
        return f"<GenerationPlan for {self.machine.name}; choices: {len(self.choices)}>"

    def __str__(self) -> str:
        """Return the table of the choices, and what they assume."""
        from dispatch_flops.renderers import plan_table  # above this room: imported when shown

        return plan_table.render(self)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain dicts, lists, strings and numbers, as ``Plan.to_dict`` does.

        ``passes`` and ``highest`` of a choice are names of its passes, such as "decode".
        """
        return {
            "schema": GENERATION_PLAN_SCHEMA,
            "version": GENERATION_PLAN_VERSION,
            "machine": plain(self.machine),
            "assumptions": list(self.assumptions),
            "choices": [_choice_to_row(choice) for choice in self.choices],
        }


def _choice_to_row(choice: PlannedGeneration) -> dict[str, Any]:
    named = {name: getattr(choice, name) for name in ("prefill", "decode", "last")}
    passes = [name for name, step in named.items() if step is not None]
    highest = next(name for name in passes if named[name] is choice.highest)
    return figures_of(choice, passes=passes, highest=highest)
