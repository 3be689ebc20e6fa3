"""Find the module that runs a graph which several modules of one class share.

Blocks that are compiled one by one have one graph with their parameters as inputs. So do modules
that are passed to a compiled function. A forward run gets a parameter of the module that runs. A
backward run is given the same by autograd: the node that runs it leads to the parameters'
gradients. A model that the backend was not given may run the graph as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx, nn

from dispatch_flops import _torch
from dispatch_flops.compile.attribution import NodeAttribution
from dispatch_flops.profile import OUTSIDE


class Instances:
    """Tells the module that runs one partitioned graph."""

    def __init__(
        self, attribution: NodeAttribution, graph: fx.GraphModule, *, is_backward: bool
    ) -> None:
        self._attribution = attribution
        self._position = None if is_backward else _position_of_parameter(attribution, graph)
        self._is_backward = is_backward
        # A parameter of no model may be an argument. Then one of the called module's is there, too.
        self._tells_unknown = attribution.keeps_parameters and (
            attribution.is_trained or not is_backward
        )
        self._known: dict[int, tuple[weakref.ref[nn.Parameter], str | None]] = {}

    def running(self, inputs: Sequence[Any]) -> str | None:
        """Return the fqn of the module that runs the graph; None where it cannot be told.

        "outside" for a module of no model. inputs: of the run.
        """
        is_unknown = False
        for parameter in self._parameters(inputs):
            fqn = self._fqn_by(parameter)
            if fqn is not None and fqn != OUTSIDE:
                return fqn
            is_unknown = is_unknown or fqn == OUTSIDE
        return OUTSIDE if is_unknown and self._tells_unknown else None

    def _fqn_by(self, parameter: nn.Parameter) -> str | None:
        """Return the fqn of the module that a parameter tells; "outside" if it is of no model."""
        known = self._known.get(id(parameter))
        if known is None or known[0]() is not parameter:
            fqn = self._attribution.find_sibling(parameter)
            if fqn is None and not self._attribution.is_known(parameter):
                fqn = OUTSIDE
            known = self._known[id(parameter)] = weakref.ref(parameter), fqn
        return known[1]

    def _parameters(self, inputs: Sequence[Any]) -> Iterator[nn.Parameter]:
        if not self._is_backward:
            found = None if self._position is None else inputs[self._position]
            if isinstance(found, nn.Parameter):
                yield found
            return
        node = _torch.current_node()
        for following, _ in node.next_functions if node is not None else ():
            found = getattr(following, "variable", None)
            if isinstance(found, nn.Parameter):
                yield found


def _position_of_parameter(attribution: NodeAttribution, graph: fx.GraphModule) -> int | None:
    """Return the position, among a forward graph's inputs, of a parameter of its module."""
    positions = attribution.parameter_positions
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if getattr(node.meta.get("desc"), "idx", None) in positions:
            return index
    return None
