"""A plan as a table: a column for each choice, and what the figures assume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dispatch_flops.analysis.communication_times import DimTime
from dispatch_flops.analysis.planned import Plan, PlannedStep
from dispatch_flops.analysis.planned_cluster import PlannedCluster
from dispatch_flops.analysis.planned_generation import GenerationPlan
from dispatch_flops.renderers.generation_column import generation_column
from dispatch_flops.renderers.plan_texts import (
    fits_text,
    headroom_text,
    largest_text,
    peak_text,
    range_text,
)
from dispatch_flops.renderers.text import Style, alignment, at_least, table
from dispatch_flops.units import (
    NOT_AVAILABLE,
    bytes_text,
    count_text,
    fraction_text,
    params_text,
    seconds_text,
)

__all__ = ["render"]


def render(plan: Plan | GenerationPlan, style: Style = "plain") -> str:
    """Return the table of the choices, followed by the assumptions.

    plan: what ``dispatch_flops.plan`` or ``plan_generate`` returned.
    style: "plain" (the default) or "markdown".

    Example::

        def build(batch):
            return nn.Linear(3, 5), (torch.ones(batch, 3),)

        planned = plan(build, "NVIDIA H200", sizes={"batch": [8, 16]}, search_batch=False)
        print(plan_table.render(planned, "markdown"))
    """
    columns = columns_of(plan)
    rows = [[name, *(column.get(name, "") for column in columns)] for name in rows_of(columns)]
    header = ["", *titles_of(plan)]
    machine = plan.machine
    lines = [f"{machine.name}: {machine.source}" if machine.source else machine.name, ""]
    lines.append(table(header, rows, alignment(len(header)), style))
    if plan.assumptions:
        lines += ["", "Assumptions:", *(f"- {text}" for text in plan.assumptions)]
    return "\n".join(lines)


def titles_of(plan: Plan | GenerationPlan) -> list[str]:
    """Return the sizes of each choice in words."""
    choices = plan.choices if isinstance(plan, GenerationPlan) else plan.steps
    return [", ".join(f"{name}={value}" for name, value in c.sizes.items()) for c in choices]


def columns_of(plan: Plan | GenerationPlan) -> list[dict[str, str]]:
    """Return ``{name: text}`` of each choice's figures."""
    if isinstance(plan, GenerationPlan):
        return [generation_column(choice) for choice in plan.choices]
    return [_column(step) for step in plan.steps]


def rows_of(columns: Sequence[Mapping[str, str]]) -> list[str]:
    """Return all names; one that the first column lacks comes after its predecessor."""
    names: list[str] = []
    for column in columns:
        at = 0
        for name in column:
            if name not in names:
                names.insert(at, name)
            at = names.index(name) + 1
    return names


def _column(step: PlannedStep) -> dict[str, str]:
    bounds, profile = step.bounds, step.profile
    is_bound = profile.is_lower_bound
    column = {
        **_parameters(step),
        "memory": peak_text(step.memory),
        **{f"  {role}": bytes_text(count) for role, count in (step.memory_by_role or {}).items()},
        "fits": fits_text(step.fits),
        "headroom": headroom_text(step.headroom_bytes, step.memory),
    }
    if step.largest_batch is not None:
        column["largest batch that fits"] = largest_text(step, step.memory)
    if step.cluster is not None:
        column |= _flops_of_all(step.cluster)
    column |= {
        "model FLOPs": at_least(count_text(profile.model_total().flops), is_bound),
        "hardware FLOPs": at_least(count_text(profile.total().flops), is_bound),
        "bytes moved": at_least(bytes_text(profile.total().bytes_total), is_bound),
        "computing": at_least(seconds_text(bounds.compute_s), is_bound),
        "moving": at_least(seconds_text(bounds.memory_s), is_bound),
        "communicating": seconds_text(bounds.communication_s),
        **_communication(step.cluster),
        "operators": count_text(bounds.operators),
        "step, all traffic saved": at_least(seconds_text(bounds.fused_s), is_bound),
        "step, unfused": at_least(seconds_text(bounds.least_s), is_bound),
        "step, nothing hidden": at_least(seconds_text(bounds.serial_s), is_bound),
        "bound by": bounds.bound or NOT_AVAILABLE,
        "MFU ceiling, unfused": fraction_text(bounds.mfu_ceiling[0]),
        "MFU ceiling": fraction_text(bounds.mfu_ceiling[1]),
    }
    if step.tokens is not None:
        column |= _rates("tokens/s ceiling", step.tokens_per_s, step.devices)
    if step.samples is not None:
        column |= _rates("samples/s ceiling", step.samples_per_s, step.devices)
    return column


def _flops_of_all(cluster: PlannedCluster) -> dict[str, str]:
    is_bound = any(part.profile.is_lower_bound for part in cluster.ranks)
    return {
        "model FLOPs, all devices": at_least(count_text(cluster.model_cost.flops), is_bound),
        "hardware FLOPs, all devices": at_least(count_text(cluster.cost.flops), is_bound),
    }


def _parameters(step: PlannedStep) -> dict[str, str]:
    """Return the rows of parameters; on a mesh also of devices, and which rank is the fullest."""
    if step.cluster is None:
        return {"parameters": params_text(step.profile.total_params)}
    full = step.cluster.fullest
    return {
        "devices": str(step.devices),
        "parameters": params_text(step.cluster.parameters),
        "parameters of a device": params_text(full.profile.local_params),
        "fullest rank": str(full.rank),
    }


def _communication(cluster: PlannedCluster | None) -> dict[str, str]:
    """Return the rows of communication over each mesh dimension."""
    rows: dict[str, str] = {}
    for part in () if cluster is None else cluster.communication:
        name = f"  {part.dim}, {part.size} ranks"
        rows |= {
            name: seconds_text(part.seconds),
            f"{name}: calls": count_text(part.cost.calls),
            f"{name}: payload": bytes_text(part.cost.payload_bytes),
            f"{name}: bus bytes": bytes_text(part.cost.bus_bytes),
            f"{name}: link": _link(part),
        }
    return rows


def _link(part: DimTime) -> str:
    if part.link is None or part.reach is None:
        return NOT_AVAILABLE
    where = {"node": "within a node", "network": "between nodes"}[part.reach]
    return f"{bytes_text(part.link.bytes_per_s)}/s {where}"


def _rates(name: str, rates: tuple[float | None, float | None], devices: int) -> dict[str, str]:
    """Return the row of rates of all devices; with several, also of one."""
    if devices == 1:
        return {name: range_text(rates)}
    low, high = (None if rate is None else rate / devices for rate in rates)
    return {name: range_text(rates), f"{name}, a device": range_text((low, high))}
