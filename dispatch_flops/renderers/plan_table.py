"""A plan as a table: a column for each choice, and what the figures assume."""

from __future__ import annotations

from dispatch_flops.analysis.communication_times import DimTime
from dispatch_flops.analysis.planned import Plan, PlannedStep
from dispatch_flops.analysis.planned_cluster import PlannedCluster
from dispatch_flops.renderers.text import Style, at_least, table
from dispatch_flops.units import (
    NOT_AVAILABLE,
    bytes_text,
    count_text,
    fraction_text,
    params_text,
    seconds_text,
)


def render(plan: Plan, style: Style = "plain") -> str:
    """Return the table of the choices, followed by the assumptions."""
    columns = [_column(step) for step in plan.steps]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    header = ["", *(", ".join(f"{n}={v}" for n, v in step.sizes.items()) for step in plan.steps)]
    align = ["left", *["right"] * len(columns)]
    machine = plan.machine
    lines = [f"{machine.name}: {machine.source}" if machine.source else machine.name, ""]
    lines.append(table(header, rows, align, style))  # type: ignore[arg-type]
    if plan.assumptions:
        lines += ["", "Assumptions:", *(f"- {text}" for text in plan.assumptions)]
    return "\n".join(lines)


def _column(step: PlannedStep) -> dict[str, str]:
    bounds, profile = step.bounds, step.profile
    is_bound = profile.is_lower_bound
    memory_is_bound = profile.memory is not None and profile.memory.is_lower_bound
    fits = {True: "yes", False: "no", None: NOT_AVAILABLE}[step.fits]
    column = {
        **_parameters(step),
        "memory": at_least(bytes_text(step.peak_bytes), memory_is_bound),
        **{f"  {role}": bytes_text(count) for role, count in step.memory_by_role.items()},
        "fits": fits,
        "headroom": _headroom(step),
    }
    if step.largest_batch is not None:
        column["largest batch that fits"] = str(step.largest_batch)
    if step.cluster is not None:
        column |= {
            "model FLOPs, all devices": at_least(
                count_text(step.cluster.model_cost.flops), is_bound
            ),
            "hardware FLOPs, all devices": at_least(count_text(step.cluster.cost.flops), is_bound),
        }
    column |= {
        "model FLOPs": at_least(count_text(profile.model_total().flops), is_bound),
        "hardware FLOPs": at_least(count_text(profile.total().flops), is_bound),
        "bytes moved": at_least(bytes_text(profile.total().bytes_total), is_bound),
        "computing": seconds_text(bounds.compute_s),
        "moving": seconds_text(bounds.memory_s),
        "communicating": seconds_text(bounds.communication_s),
        **_communication(step.cluster),
        "operators": count_text(bounds.operators),
        "step, all traffic saved": seconds_text(bounds.fused_s),
        "step, unfused": seconds_text(bounds.least_s),
        "step, nothing hidden": seconds_text(bounds.serial_s),
        "bound by": bounds.bound or NOT_AVAILABLE,
        "MFU ceiling, unfused": fraction_text(bounds.mfu_ceiling[0]),
        "MFU ceiling": fraction_text(bounds.mfu_ceiling[1]),
    }
    if step.tokens is not None:
        column |= _rates("tokens/s ceiling", step.tokens_per_s, step.devices)
    if step.samples is not None:
        column |= _rates("samples/s ceiling", step.samples_per_s, step.devices)
    return column


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
        return {name: _range(rates)}
    low, high = (None if rate is None else rate / devices for rate in rates)
    return {name: _range(rates), f"{name}, a device": _range((low, high))}


def _headroom(step: PlannedStep) -> str:
    free = step.headroom_bytes
    if free is None:
        return NOT_AVAILABLE
    return bytes_text(int(free)) if free >= 0 else f"-{bytes_text(int(-free))}"


def _range(rates: tuple[float | None, float | None]) -> str:
    low, high = rates
    if low is None or high is None:
        return NOT_AVAILABLE
    return count_text(high) if low == high else f"{count_text(low)} to {count_text(high)}"
