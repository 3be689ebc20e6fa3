"""Dicts of costs that print as tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from dispatch_flops.profile.cost import OpCost
from dispatch_flops.profile.tree import OpTotal

Figure = TypeVar("Figure", OpCost, OpTotal)


class CostMap(dict[str, Figure]):
    """Dict of costs by module or operator; ``print`` and notebooks show it as a table.

    lower_bounds: the modules whose cost leaves out operators without a known one.

    print(profile.by_operator())
    """

    def __init__(self, costs: Mapping[str, Figure], lower_bounds: Collection[str] = ()) -> None:
        super().__init__()
        self.update(costs)
        self.lower_bounds: frozenset[str] = frozenset(lower_bounds)

    def __str__(self) -> str:
        from dispatch_flops.renderers import cost_table  # above this room: imported when shown

        return cost_table.render(self)

    def _repr_html_(self) -> str:
        from dispatch_flops.renderers import cost_table  # above this room: imported when shown

        return cost_table.render_html(self)

    def __reduce__(self) -> tuple[type[dict[str, Figure]], tuple[dict[str, Figure]]]:
        """Pickle and copy as a plain dict, because its reader need not have this package."""
        return dict, (dict(self),)
