"""Tables of the dicts that ``Profile.by_module`` and ``Profile.by_operator`` return."""

from __future__ import annotations

from collections.abc import Mapping

from dispatch_flops.profile import OpTotal
from dispatch_flops.profile.cost import ZERO, OpCost
from dispatch_flops.profile.cost_maps import CostMap
from dispatch_flops.renderers.notebook import table_html
from dispatch_flops.renderers.text import alignment, at_least, one_line, table
from dispatch_flops.units import bytes_text, count_text

_FIGURES = ("MACs", "FLOPs", "Bytes")
_MOST_ROWS = 100  # in a notebook


def render(costs: Mapping[str, OpCost] | Mapping[str, OpTotal]) -> str:
    """Return a line per module or operator.

    print(cost_table.render(profile.by_operator("backward")))
    """
    header, rows = _cells(costs)
    return table(header, rows, alignment(len(header)), "plain")


def render_html(costs: Mapping[str, OpCost] | Mapping[str, OpTotal]) -> str:
    """Return the same table for a notebook, of at most 100 rows."""
    header, rows = _cells(costs)
    more = len(rows) - _MOST_ROWS
    if more > 0:
        rows = [*rows[:_MOST_ROWS], [f"… {more} more", *[""] * (len(header) - 1)]]
    return table_html(header, rows)


def _cells(
    costs: Mapping[str, OpCost] | Mapping[str, OpTotal],
) -> tuple[list[str], list[list[str]]]:
    if any(isinstance(cost, OpTotal) for cost in costs.values()):
        return ["Operator", "Calls", *_FIGURES], [
            [one_line(name), str(total.calls), *_figures(total.cost or ZERO, bool(total.uncounted))]
            for name, total in costs.items()
            if isinstance(total, OpTotal)
        ]
    bounds = costs.lower_bounds if isinstance(costs, CostMap) else ()
    return ["Module", *_FIGURES], [
        [one_line(name) or "(model)", *_figures(cost, name in bounds)]
        for name, cost in costs.items()
        if isinstance(cost, OpCost)
    ]


def _figures(cost: OpCost, is_lower_bound: bool) -> list[str]:
    texts = (count_text(cost.macs), count_text(cost.flops), bytes_text(cost.bytes_total))
    return [at_least(text, is_lower_bound) for text in texts]
