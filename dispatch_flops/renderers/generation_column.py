"""Figures of one choice of a plan for generation, as text."""

from __future__ import annotations

from dispatch_flops.analysis.planned_generation import GenerationStep, PlannedGeneration
from dispatch_flops.renderers.plan_texts import (
    fits_text,
    headroom_text,
    largest_text,
    peak_text,
    range_text,
    seconds_range_text,
)
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
    memory = choice.highest.profile.memory
    column = {
        "parameters": params_text(choice.passes[0].profile.total_params),
        "KV cache at the end": bytes_text(choice.cache_bytes),
        "memory": peak_text(memory),
        **{f"  {role}": bytes_text(n) for role, n in (choice.highest.memory_by_role or {}).items()},
        "fits": fits_text(choice.fits),
        "headroom": headroom_text(choice.headroom_bytes, memory),
    }
    if choice.largest_batch is not None:
        column["largest batch that fits"] = largest_text(choice, memory)
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
    is_bound = profile.is_lower_bound
    return {
        f"{name}, FLOPs": at_least(count_text(profile.total().flops), is_bound),
        f"{name}, computing": at_least(seconds_text(bounds.compute_s), is_bound),
        f"{name}, reading parameters and cache": seconds_text(step.reading_s),
        f"{name}, least time": at_least(seconds_text(step.fused_s), is_bound),
        f"{name}, unfused": at_least(seconds_text(bounds.least_s), is_bound),
        f"{name}, nothing hidden": at_least(seconds_text(bounds.serial_s), is_bound),
        f"{name}, bound by": step.bound or NOT_AVAILABLE,
    }


def _counts(low: int, high: int) -> str:
    return str(high) if low == high else f"{low} to {high}"
