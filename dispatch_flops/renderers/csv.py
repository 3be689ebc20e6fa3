"""Comma-separated values for spreadsheets; integers are exact and every text is quoted."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dispatch_flops.analysis.communication import inclusive_communication
from dispatch_flops.analysis.figures import tree_figures, walk_with_depth
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import CommCost, ModuleNode, Profile
from dispatch_flops.profile.cost import COST_FIELDS, STEP_PHASES, Phase, in_order
from dispatch_flops.profile.memory import HELD_NAMES
from dispatch_flops.profile.tree import cost_in, local_params_of
from dispatch_flops.renderers.view import View

__all__ = ["render"]

Row = Mapping[str, str | int | float | None]
OPERATOR_COLUMNS = (
    "fqn", "op", "phase", "dtype", "kind", "calls", "uncounted", *COST_FIELDS, "latency_s", "error",
)  # fmt: skip
COMMUNICATION_COLUMNS = (
    "fqn", "phase", "kind", "op", "dtype", "group", "group_size", "group_ranks", "mesh_dim",
    "calls", "payload_bytes", "bus_bytes", "sent_bytes", "received_bytes",
)  # fmt: skip


def render(profile: Profile, view: View | None = None) -> str:
    """Return a header and a row per module, or per operator; unknown values are empty.

    view: ``table`` is "modules" (the default), "operators" or "communication".

    Raises ConfigError for another ``table``.

    Example::

        Path("operators.csv").write_text(csv.render(profile, View(table="operators")))
    """
    view = view or View()
    match view.table:
        case "modules":
            return _text(module_rows(profile))
        case "operators":
            return _text(operator_rows(profile), OPERATOR_COLUMNS)
        case "communication":
            return _text(communication_rows(profile), COMMUNICATION_COLUMNS)
    raise ConfigError(f'table={view.table!r:.60}: choose "modules", "operators" or "communication"')


def module_rows(profile: Profile) -> Iterator[Row]:
    """Yield a row per module, then one for what ran outside the model; None is unknown."""
    phases = in_order((*STEP_PHASES, *phases_of(profile)))
    sent = inclusive_communication(profile)
    is_sharded = any(node.local_params is not None for node in profile.nodes())
    has_memory = any(node.memory is not None for node in profile.nodes())
    for root in (profile.root, profile.outside):
        yield from _rows_below(root, phases, sent, is_sharded=is_sharded, has_memory=has_memory)


def communication_rows(profile: Profile) -> Iterator[Row]:
    """Yield a row per module, phase, communication operator, dtype and group.

    Ranks, and bytes to and from each of them, are separated by spaces.
    """
    for total in profile.communication:
        row = {name: getattr(total, name, None) for name in COMMUNICATION_COLUMNS}
        group = total.group
        yield row | {
            "group": group.name,
            "group_size": group.size,
            "group_ranks": _spaced(group.ranks),
            "mesh_dim": group.mesh_dim,
            "sent_bytes": _spaced(total.sent_bytes),
            "received_bytes": _spaced(total.received_bytes),
        }


def _spaced(numbers: Iterable[int] | None) -> str | None:
    return None if numbers is None else " ".join(map(str, numbers))


def operator_rows(profile: Profile) -> Iterator[Row]:
    """Yield a row per operator, module, phase and dtype; None is unknown."""
    for node in profile.nodes():
        for op in node.ops:
            yield {
                "fqn": node.fqn,
                **{
                    name: getattr(op.cost if name in COST_FIELDS else op, name, None)
                    for name in OPERATOR_COLUMNS[1:]
                },
            }


def _rows_below(
    root: ModuleNode,
    phases: Sequence[Phase],
    sent: Mapping[str, CommCost],
    *,
    is_sharded: bool,
    has_memory: bool,
) -> Iterator[Row]:
    forward, backward = tree_figures(root, "forward"), tree_figures(root, "backward")
    for node, depth in walk_with_depth(root):
        own, total = node.own(), node.total()
        row: dict[str, str | int | float | None] = {
            "fqn": node.fqn,
            "class_name": node.class_name,
            "extra_repr": node.extra_repr,
            "depth": depth,
            "calls": node.calls,
            "own_params": node.own_params,
            "total_params": node.total_params,
            "active_params": node.active_params,
            "trainable_params": node.trainable_params,
            "tokens": node.tokens,
            "latency_s": forward[node.fqn].latency_s,
            "backward_latency_s": backward[node.fqn].latency_s,
            "lower_bound": int(node.is_lower_bound),
            "own_macs": own.macs,
            "own_flops": own.flops,
            "total_macs": total.macs,
            "total_flops": total.flops,
            "total_bytes": total.bytes_total,
        }
        for phase in phases:
            part = cost_in(node, phase)
            row[f"{phase}_macs"], row[f"{phase}_flops"] = part.macs, part.flops
        if has_memory:  # a run that did not follow memory has no such columns
            memory = node.memory
            for name in HELD_NAMES:
                row[f"own_{name}_bytes"] = getattr(memory.own, name) if memory else None
                row[f"total_{name}_bytes"] = getattr(memory.total, name) if memory else None
            for phase in phases:
                row[f"{phase}_peak_bytes"] = memory.peak_bytes.get(phase) if memory else None
        if is_sharded:
            row["local_params"] = local_params_of(node)
        if sent:  # a run of one process has no such columns
            cost = sent.get(node.fqn, CommCost())
            row["comm_calls"] = cost.calls
            row["comm_payload_bytes"], row["comm_bus_bytes"] = cost.payload_bytes, cost.bus_bytes
        yield row


def _text(rows: Iterable[Row], columns: Sequence[str] | None = None) -> str:
    """columns: the header, for a table that may be empty; by default the first row's keys."""
    rows = list(rows)
    buffer = io.StringIO()
    # By default the writer does not quote a lone carriage return.
    writer = csv.DictWriter(
        buffer, list(columns or rows[0]), lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC
    )
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().encode(errors="backslashreplace").decode()  # a lone surrogate
