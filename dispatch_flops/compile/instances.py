"""Find the module that runs a graph which several modules of one class share.

Blocks that are compiled one by one have one graph with their parameters as inputs. A forward run
gets a parameter of the block that runs. A backward run is given the same by autograd: the node that
runs it leads to the parameters' gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from dispatch_flops import _torch
from dispatch_flops.compile.attribution import NodeAttribution


class Instances:
    """Tells the module that runs one partitioned graph."""

    def __init__(
        self, attribution: NodeAttribution, graph: fx.GraphModule, *, is_backward: bool
    ) -> None:
        self._attribution = attribution
        self._position = None if is_backward else _position_of_parameter(attribution, graph)
        self._is_backward = is_backward
        self._known: dict[int, tuple[weakref.ref[nn.Parameter], str | None]] = {}

    def running(self, inputs: Sequence[Any]) -> str | None:
        """Return the fqn of the module that runs the graph; None where it cannot be told.

        inputs: of the run.
        """
        parameter = self._parameter(inputs)
        if parameter is None:
            return None
        known = self._known.get(id(parameter))
        if known is None or known[0]() is not parameter:
            fqn = self._attribution.find_sibling(parameter)
            known = self._known[id(parameter)] = weakref.ref(parameter), fqn
        return known[1]

    def _parameter(self, inputs: Sequence[Any]) -> nn.Parameter | None:
        if not self._is_backward:
            found = None if self._position is None else inputs[self._position]
            return found if isinstance(found, nn.Parameter) else None
        node = _torch.current_node()
        for following, _ in node.next_functions if node is not None else ():
            found = getattr(following, "variable", None)
            if isinstance(found, nn.Parameter):
                return found
        return None


def _position_of_parameter(attribution: NodeAttribution, graph: fx.GraphModule) -> int | None:
    """Return the position, among a forward graph's inputs, of a parameter of its module."""
    positions = attribution.parameter_positions
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if getattr(node.meta.get("desc"), "idx", None) in positions:
            return index
    return None
