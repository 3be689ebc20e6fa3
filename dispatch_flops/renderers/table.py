"""Compact tables, plain or Markdown: the module tree, the operators, the uncounted ones."""

from __future__ import annotations

from collections.abc import Sequence

from dispatch_flops.analysis.figures import Figures, inclusive, total_figures, walk_with_depth
from dispatch_flops.analysis.operators import OperatorRow, operator_rows, phases_of
from dispatch_flops.profile import ModuleNode, Profile, sum_known
from dispatch_flops.profile.cost import Phase
from dispatch_flops.renderers.text import Align, Style, at_least, code, table
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


def render(profile: Profile, *, depth: int | None = None, style: Style = "plain") -> str:
    """Params, MACs, FLOPs and share of each module, all phases together and one by one.

    depth: levels shown; 1 is the model alone, ``None`` all. Where work was done outside the
    model, it has rows of its own, and a first row ``Global`` has the total.
    """
    phases = phases_of(profile) if len(phases_of(profile)) > 1 else ()
    rows = _module_rows(profile, phases, depth, style)
    header = ["Module", "Params", "MACs", "FLOPs", *(f"{p} FLOPs" for p in phases), "% Total"]
    return table(header, rows, _alignment(len(header), left=1), style)


def _module_rows(
    profile: Profile, phases: Sequence[Phase], depth: int | None, style: Style
) -> list[list[str]]:
    trees = [profile.root] if _ran(profile.root) else []
    if profile.outside.is_lower_bound or profile.outside.total().flops:
        trees.append(profile.outside)
    total = profile.total().flops
    rows: list[list[str]] = []
    indent = 0 if trees == [profile.root] else 1
    for tree in trees:
        columns = [inclusive(tree), *(inclusive(tree, phase) for phase in phases)]
        for node, level in walk_with_depth(tree):
            if depth is None or level < depth:
                pad = " " * (indent + level) if style == "plain" else ""
                label = pad + code(_label(tree, node, is_model=tree is profile.root), style)
                rows.append(_cells(label, [column[node.fqn] for column in columns], total))
    if indent:
        rows.insert(
            0, _cells("Global", [total_figures(profile, p) for p in (None, *phases)], total)
        )
    return rows


def _ran(root: ModuleNode) -> bool:
    return bool(root.calls or root.children or root.ops)


def _cells(label: str, figures: Sequence[Figures], all_flops: int) -> list[str]:
    """figures: of all phases together, then of each."""
    whole = figures[0]
    return [
        label,
        params_text(whole.params),
        at_least(count_text(whole.cost.macs), whole.lower_bound),
        *(at_least(count_text(part.cost.flops), part.lower_bound) for part in figures),
        percent_text(whole.cost.flops, all_flops),
    ]


def _label(tree: ModuleNode, node: ModuleNode, *, is_model: bool) -> str:
    """Of the model as torch.utils.flop_counter writes it: its class, then the module's fqn."""
    if not is_model:
        return node.fqn
    return f"{tree.class_name}.{node.fqn}" if node.fqn else tree.class_name


def operator_table(profile: Profile, *, style: Style = "plain") -> str:
    """Every operator that ran, with its cost; the free ones with 0, the unknown with n/a."""
    rows = operator_rows(profile)
    whole_s = sum_known(row.latency_s for row in rows)
    header = ["Operator", "Kind", "Phase", "Dtype", "Calls", "MACs", "FLOPs", "% FLOPs"]
    header += ["Bytes/call", "FLOPs/byte", *(["Time", "% Time"] if whole_s else [])]
    cells = [_operator_row(row, whole_s, style) for row in rows]
    return table(header, cells, _alignment(len(header), left=4), style)


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


def uncounted_table(profile: Profile, *, style: Style = "plain") -> str:
    """The operators whose cost is not known, with the calls that lack it and the reason."""
    errors = profile.formula_errors()
    rows = [
        [code(op, style), str(calls), code(errors.get(op, "no formula"), style)]
        for op, calls in profile.uncounted_ops().items()
    ]
    return table(["Operator", "Uncounted calls", "Why"], rows, ("left", "right", "left"), style)


def _alignment(columns: int, *, left: int) -> Sequence[Align]:
    return tuple("left" if column < left else "right" for column in range(columns))
