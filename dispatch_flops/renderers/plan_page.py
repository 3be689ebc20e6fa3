"""HTML page of a plan: its choices side by side, without requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dispatch_flops.analysis.memory_fit import MemoryFit
from dispatch_flops.analysis.planned import Plan, PlannedStep
from dispatch_flops.analysis.planned_generation import (
    GenerationPlan,
    GenerationStep,
    PlannedGeneration,
)
from dispatch_flops.profile import MemoryProfile
from dispatch_flops.profile.memory import ROLES
from dispatch_flops.renderers.html.document import document
from dispatch_flops.renderers.plan_table import columns_of, rows_of, titles_of
from dispatch_flops.renderers.plan_texts import (
    headroom_text,
    largest_text,
    peak_text,
    range_text,
    seconds_range_text,
)
from dispatch_flops.renderers.text import at_least, one_line
from dispatch_flops.renderers.view import View
from dispatch_flops.units import bytes_text, fraction_text

__all__ = ["render"]

Data = dict[str, Any]


def render(plan: Plan | GenerationPlan, view: View | None = None) -> str:
    """Return the text of a self-contained HTML file, with the figures of ``plan_table``.

    plan: what ``dispatch_flops.plan`` or ``plan_generate`` returned. view: ``title``.

    Example::

        planned = plan(
            lambda batch: (nn.Linear(3, 5), (torch.ones(batch, 3),)),
            "NVIDIA H100 80GB HBM3", sizes={"batch": [8, 16]}, search_batch=False,
        )
        Path("plan.html").write_text(plan_page.render(planned, View(title="a layer")))
    """
    columns = columns_of(plan)
    machine = plan.machine
    if isinstance(plan, GenerationPlan):
        choices = [_generation(choice) for choice in plan.choices]
        model = plan.choices[0].passes[0].profile.root.class_name if plan.choices else ""
    else:
        choices = [_step(step) for step in plan.steps]
        model = plan.steps[0].profile.root.class_name if plan.steps else ""
    heading = one_line((view or View()).title or model) or "Plan"
    data: Mapping[str, Any] = {
        "title": heading,
        "subtitle": one_line(": ".join(filter(None, (machine.name, machine.source)))),
        "capacity": machine.memory_bytes,
        "roles": list(ROLES),
        "choices": [
            {"label": one_line(title) or "the step", **choice}
            for title, choice in zip(titles_of(plan), choices, strict=True)
        ],
        "rows": [[name, [column.get(name, "") for column in columns]] for name in rows_of(columns)],
        "assumptions": list(plan.assumptions),
    }
    return document(title=heading, kind="plan", body="plan.html", scripts=("plan.js",), data=data)


def _step(step: PlannedStep) -> Data:
    bounds = step.bounds
    details = [] if step.cluster is None else [f"{step.devices} devices"]
    if bounds.bound is not None:
        details.append(f"bound by {bounds.bound}")
    details.append(f"MFU at most {fraction_text(bounds.mfu_ceiling[1])}")
    if step.tokens is not None:
        details.append(f"{range_text(step.tokens_per_s)} tokens/s at most")
    return {
        "fits": step.fits,
        "fit": _fit_text(step, step.memory),
        "value": at_least(
            seconds_range_text(bounds.fused_s, bounds.serial_s), step.profile.is_lower_bound
        ),
        "details": [*details, *_largest(step, step.memory)],
        "times": {"Step": _times(bounds.fused_s, bounds.least_s, bounds.serial_s)},
        **_memory(step.memory),
    }


def _generation(choice: PlannedGeneration) -> Data:
    memory = choice.highest.profile.memory
    details = [f"KV cache {bytes_text(choice.cache_bytes)}"]
    times = {}
    if choice.prefill is not None:
        times["Prefill"] = _times_of(choice.prefill)
        low, high = times["Prefill"]["low"], times["Prefill"]["high"]
        details.append(f"prefill {seconds_range_text(low, high)}")
    last = choice.decode or choice.prefill
    assert last is not None
    if choice.decode is not None:
        times["Step of decode"] = _times_of(choice.decode)
        details.append(f"per token {seconds_range_text(*choice.decode.token_s)}")
        details.append(f"bound by {last.bound}" if last.bound else "")
    return {
        "fits": choice.fits,
        "fit": _fit_text(choice, memory),
        "value": f"{range_text(last.tokens_per_s)} tokens/s",
        "details": [*filter(None, details), *_largest(choice, memory)],
        "times": times,
        **_memory(memory),
    }


def _times_of(step: GenerationStep) -> Data:
    return _times(step.fused_s, step.bounds.least_s, step.bounds.serial_s)


def _times(low: float | None, middle: float | None, high: float | None) -> Data:
    return {"low": low, "middle": middle, "high": high}


def _fit_text(choice: MemoryFit, memory: MemoryProfile | None) -> str:
    if choice.fits is None:
        return "capacity unknown" if choice.peak_bytes is not None else "memory not followed"
    free = headroom_text(choice.headroom_bytes, memory)
    return f"fits, {free} free" if choice.fits else "does not fit"


def _largest(choice: MemoryFit, memory: MemoryProfile | None) -> list[str]:
    if choice.largest_batch is None:
        return []
    return [f"largest batch that fits: {largest_text(choice, memory)}"]


def _memory(memory: MemoryProfile | None) -> Data:
    peak, roles = (None, {}) if memory is None else (memory.peak_bytes, memory.by_role())
    return {"peak": peak, "roles": roles, "memory": peak_text(memory)}
