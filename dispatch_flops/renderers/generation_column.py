"""Figures of one choice of a plan for generation, as text."""

from __future__ import annotations

from dispatch_flops.analysis.memory_fit import MemoryFit
from dispatch_flops.analysis.planned_generation import GenerationStep, PlannedGeneration
from dispatch_flops.profile import MemoryProfile
from dispatch_flops.renderers.memory_table import marked_bytes
from dispatch_flops.renderers.text import at_least
from dispatch_flops.units import (
    NOT_AVAILABLE,
    bytes_text,
    count_text,
    params_text,
    seconds_text,
)

_NONE = "none"


def generation_column(choice: PlannedGeneration) -> dict[str, str]:
    """Return ``{name: text}``."""
    column = {
        "parameters": params_text(choice.passes[0].profile.total_params),
        "KV cache at the end": bytes_text(choice.cache_bytes),
        "memory": peak_text(choice.highest.profile.memory),
        **{f"  {role}": bytes_text(n) for role, n in (choice.highest.memory_by_role or {}).items()},
        "fits": {True: "yes", False: "no", None: NOT_AVAILABLE}[choice.fits],
        "headroom": headroom_text(choice.headroom_bytes),
    }
    if choice.largest_batch is not None:
        column["largest batch that fits"] = largest_text(choice)
    if choice.prefill is not None:
        column |= _pass("prefill", choice.prefill)
    if choice.decode is not None:
        column |= _pass("step", choice.decode)
        column["step, tokens/s ceiling"] = range_text(choice.decode.tokens_per_s)
        if choice.prefill is not None:
            low, high = choice.decode.token_s
            column["least time per token"] = seconds_range_text(low, high)
            column["steps"] = _counts(*choice.steps)
    if choice.compute_bound_batch is not None:
        column["steps are bound by computing from batch"] = (
            str(choice.compute_bound_batch) if choice.compute_bound_batch else _NONE
        )
    if choice.prefill is not None:
        column["all new tokens"] = seconds_range_text(*choice.seconds)
    return column


def _pass(name: str, step: GenerationStep) -> dict[str, str]:
    profile, bounds = step.profile, step.bounds
    return {
        f"{name}, FLOPs": at_least(count_text(profile.total().flops), profile.is_lower_bound),
        f"{name}, computing": seconds_text(bounds.compute_s),
        f"{name}, reading parameters and cache": seconds_text(step.reading_s),
        f"{name}, least time": seconds_text(step.fused_s),
        f"{name}, unfused": seconds_text(bounds.least_s),
        f"{name}, nothing hidden": seconds_text(bounds.serial_s),
        f"{name}, bound by": step.bound or NOT_AVAILABLE,
    }


def _counts(low: int, high: int) -> str:
    return str(high) if low == high else f"{low} to {high}"


def peak_text(memory: MemoryProfile | None) -> str:
    """Return the bytes at the peak as text, marked if they are not exact."""
    return NOT_AVAILABLE if memory is None else marked_bytes(memory.peak_bytes, memory)


def headroom_text(free: float | None) -> str:
    """Return free bytes as text, negative where memory is missing."""
    if free is None:
        return NOT_AVAILABLE
    return bytes_text(int(free)) if free >= 0 else f"-{bytes_text(int(-free))}"


def largest_text(choice: MemoryFit) -> str:
    """Return the largest batch that fits; more may fit than was searched."""
    return at_least(str(choice.largest_batch), choice.largest_batch_is_lower_bound)


def range_text(rates: tuple[float | None, float | None]) -> str:
    """Return the lower and the higher rate as text."""
    low, high = rates
    if low is None or high is None:
        return NOT_AVAILABLE
    return _rate_text(high) if low == high else f"{_rate_text(low)} to {_rate_text(high)}"


def _rate_text(rate: float) -> str:
    """Return the rate, below 1 without a prefix: 0.3, not 300 m, which reads as millions."""
    return f"{rate:.3g}" if 0 < rate < 1 else count_text(rate)


def seconds_range_text(low: float | None, high: float | None) -> str:
    """Return the lower and the higher time as text."""
    if low is None or high is None:
        return NOT_AVAILABLE
    return seconds_text(low) if low == high else f"{seconds_text(low)} to {seconds_text(high)}"
