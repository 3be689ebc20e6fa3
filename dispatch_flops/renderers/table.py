"""Compact tables, plain or Markdown, of modules, operators or uncounted operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dispatch_flops.analysis.communication import inclusive_communication
from dispatch_flops.analysis.figures import (
    Figures,
    inclusive,
    total_figures,
    tree_figures,
    walk_with_depth,
)
from dispatch_flops.analysis.operators import OperatorRow, operator_rows, phases_of
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import CommCost, ModuleNode, Profile, RunInfo, sum_known
from dispatch_flops.profile.cost import Phase
from dispatch_flops.renderers import communication
from dispatch_flops.renderers.explanations import OF_WHAT_WAS_COUNTED
from dispatch_flops.renderers.run_facts import run_facts
from dispatch_flops.renderers.text import Style, alignment, at_least, code, table
from dispatch_flops.renderers.view import View
from dispatch_flops.units import (
    bytes_text,
    count_text,
    fraction_text,
    number_text,
    params_text,
    percent_text,
    ratio,
    seconds_text,
)

__all__ = ["render"]


def render(profile: Profile, view: View | None = None) -> str:
    """Return a table of what the run cost.

    "modules": parameters, MACs and FLOPs of each module, in total and per phase. What ran outside
    the model has rows of its own, and a first row ``Global`` has the total. Below the table are
    the inputs and what else is recorded of the run.
    "operators": every operator that ran; free ones cost 0, and those of unknown cost show n/a.
    "uncounted": the operators of unknown cost, with the number of such calls and the reason.
    "communication": what the rank sent and received.

    view: ``table``, ``style`` and, for modules, ``depth``.

    Raises ConfigError for another ``table``.

        print(table.render(profile, View(depth=2)))
    """
    view = view or View()
    match view.table:
        case "modules":
            tables = _module_table(profile, view.depth, view.style)
            return "\n".join([tables, *_bound_lines(profile), *_run_lines(profile.run, view.style)])
        case "operators":
            return _operator_table(profile, view.style)
        case "uncounted":
            return _uncounted_table(profile, view.style)
        case "communication":
            return communication.render(profile, view)
    raise ConfigError(
        f'table={view.table!r:.60}: choose "modules", "operators", "uncounted" or "communication"'
    )


def uncounted_rows(profile: Profile) -> Iterator[tuple[str, int, str]]:
    """Yield each operator of unknown cost, the number of such calls and the reason."""
    errors = profile.formula_errors()
    for op, calls in profile.uncounted_ops().items():
        yield op, calls, errors.get(op, "no formula")


def _bound_lines(profile: Profile) -> Iterator[str]:
    """Yield a blank line and what lower bounds mean for shares, in a table that has some."""
    if profile.is_lower_bound:
        yield ""
        yield f"Numbers marked >= are lower bounds, and {OF_WHAT_WAS_COUNTED}."


def _run_lines(run: RunInfo, style: Style) -> Iterator[str]:
    """Yield a blank line and what is recorded of the run, one fact a line."""
    for number, (label, text) in enumerate(run_facts(run)):
        if not number:
            yield ""
        yield f"- {label}: {code(text, style)}" if style == "markdown" else f"{label}: {text}"


def _module_table(profile: Profile, depth: int | None, style: Style) -> str:
    phases = phases_of(profile) if len(phases_of(profile)) > 1 else ()
    rows = _module_rows(profile, phases, depth, style)
    header = ["Module", "Params", "MACs", "FLOPs", *(f"{p} FLOPs" for p in phases), "% Total"]
    if profile.communication:
        header.append("Payload")
    return table(header, rows, alignment(len(header)), style)


def _module_rows(
    profile: Profile, phases: Sequence[Phase], depth: int | None, style: Style
) -> list[list[str]]:
    trees = [profile.root] if _ran(profile.root) else []
    if profile.outside.is_lower_bound or profile.outside.total().flops:
        trees.append(profile.outside)
    total = profile.total().flops
    sent = inclusive_communication(profile)
    rows: list[list[str]] = []
    indent = 0 if trees == [profile.root] else 1
    for tree in trees:
        columns = [inclusive(tree), *(tree_figures(tree, phase) for phase in phases)]
        for node, level in walk_with_depth(tree):
            if depth is None or level <= depth:
                pad = " " * (indent + level) if style == "plain" else ""
                label = pad + code(_label(tree, node, is_model=tree is profile.root), style)
                cells = _cells(label, [column[node.fqn] for column in columns], total)
                rows.append([*cells, *_sent(sent, node.fqn)])
    if indent:
        figures = [total_figures(profile, phase) for phase in (None, *phases)]
        whole = sum((part.cost for part in profile.communication), start=CommCost())
        cells = _cells("Global", figures, total)
        rows.insert(0, [*cells, *_sent({"": whole} if sent else {}, "")])
    return rows


def _sent(sent: Mapping[str, CommCost], fqn: str) -> tuple[str, ...]:
    """Return the cell of a module's payload; no cell for a run of one process."""
    return (bytes_text(sent[fqn].payload_bytes) if fqn in sent else "",) if sent else ()


def _ran(root: ModuleNode) -> bool:
    return bool(root.calls or root.children or root.ops)


def _cells(label: str, figures: Sequence[Figures], all_flops: int) -> list[str]:
    """figures: those of all phases together, then those of each phase."""
    together = figures[0]
    return [
        label,
        params_text(together.params),
        at_least(count_text(together.cost.macs), together.lower_bound),
        *(at_least(count_text(part.cost.flops), part.lower_bound) for part in figures),
        percent_text(together.cost.flops, all_flops),
    ]


def _label(tree: ModuleNode, node: ModuleNode, *, is_model: bool) -> str:
    """Return class and fqn, as torch.utils.flop_counter labels the model's modules."""
    if not is_model:
        return node.fqn
    if not node.fqn:
        return tree.class_name
    return node.fqn if tree.is_several_models else f"{tree.class_name}.{node.fqn}"


def _operator_table(profile: Profile, style: Style) -> str:
    rows = operator_rows(profile)
    whole_s = sum_known(row.latency_s for row in rows)
    header = ["Operator", "Kind", "Phase", "Dtype", "Calls", "MACs", "FLOPs", "% FLOPs"]
    header += ["Bytes/call", "FLOPs/byte", *(["Time", "% Time"] if whole_s else [])]
    cells = [_operator_row(row, whole_s, style) for row in rows]
    if profile.communication:
        header.append("Payload")
        payloads = _payloads(profile)
        for row, line in zip(rows, cells, strict=True):
            size = payloads.get((row.op, row.dtype))
            line.append("" if size is None else bytes_text(size))
    return table(header, cells, alignment(len(header), left=4), style)


def _payloads(profile: Profile) -> dict[tuple[str, str | None], int]:
    """Return ``{(operator, dtype): payload bytes}`` of what was sent and received."""
    sums: dict[tuple[str, str | None], int] = {}
    for total in profile.communication:
        key = (total.op, total.dtype)
        sums[key] = sums.get(key, 0) + total.payload_bytes
    return sums


def _operator_row(row: OperatorRow, whole_s: float | None, style: Style) -> list[str]:
    bound = bool(row.uncounted)
    cost = row.cost
    cells = [
        code(row.op, style),
        row.kind,
        "+".join(row.phases),
        row.dtype or "",
        str(row.calls),
        at_least(count_text(cost.macs if cost else None), bound),
        at_least(count_text(cost.flops if cost else None), bound),
        fraction_text(row.share),
        bytes_text(row.bytes_per_call),
        number_text(row.arithmetic_intensity),
    ]
    if whole_s:
        cells += [seconds_text(row.latency_s), fraction_text(ratio(row.latency_s, whole_s))]
    return cells


def _uncounted_table(profile: Profile, style: Style) -> str:
    rows = [
        [code(op, style), str(calls), code(why, style)]
        for op, calls, why in uncounted_rows(profile)
    ]
    return table(["Operator", "Uncounted calls", "Why"], rows, ("left", "right", "left"), style)
