"""Calls of composite operators with a formula, in the graphs of one compiled function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import takewhile

from torch import fx

from dispatch_flops._torch import OpOverload
from dispatch_flops.compile.attribution import NodeAttribution
from dispatch_flops.compile.formula_calls import FormulaCall, Region
from dispatch_flops.compile.node_calls import Opaque
from dispatch_flops.compile.node_operators import (
    functions_of,
    name_of_higher_order,
    operator_nodes,
)
from dispatch_flops.compile.node_stacks import own_stack
from dispatch_flops.compile.traced_composites import (
    CompositeCall,
    Place,
    TracedComposites,
    call_of,
)
from dispatch_flops.counting.formulas_not_asked import problem_in

_CHANGED = "the compiler merged its operators with others, or removed them; what is left is counted"
_OTHER_SIZES = "compiled autograd traces a backward pass of varying sizes anew"

Around = Callable[[Mapping[str, object]], tuple[Opaque, ...]]


class CompositeRegions:
    """Calls of composite operators in one function that a backend compiles.

    operators: those that have a formula. is_rewritten: the compiler may merge operators before the
    backend has the graphs. around_stack: returns the opaque calls of modules that a
    module stack lists. problems: ``{operator: why its formula is not asked}``.
    """

    def __init__(
        self,
        attribution: NodeAttribution,
        traced: fx.GraphModule,
        operators: Iterable[OpOverload],
        around_stack: Around,
        *,
        is_rewritten: bool,
    ) -> None:
        self.problems: dict[OpOverload, str] = {}
        self._attribution = attribution
        self._around_stack = around_stack
        self._is_rewritten = is_rewritten
        self._composites = TracedComposites(operators)
        self._higher_order = _names_of_higher_order_nodes(traced)
        self._known: set[Place] = set()

    def recorded(self) -> AbstractContextManager[None]:
        """Return a block in which AOTAutograd traces the function."""
        return self._composites.recorded()

    def around(self, node: fx.Node) -> tuple[CompositeCall, ...]:
        """Return the calls in which a node was made, outermost first."""
        if not self._composites.calls and not self._attribution.is_of_compiled_autograd:
            return ()
        return tuple(call for key in own_stack(node) if (call := self._call(key)) is not None)

    def formula_calls(
        self, graph: fx.GraphModule, regions: Mapping[Opaque, Region], *, is_backward: bool
    ) -> list[FormulaCall]:
        """Return the calls that a graph with these regions counts."""
        counted: dict[CompositeCall, Region] = {}
        for call, region in regions.items():
            if isinstance(call, CompositeCall):
                problem = self._problem_of_other(call, region)
                if problem is not None:
                    self.problems[call.target] = problem
                elif _is_counted(call, region):
                    counted[call] = region
        missing = self._new_calls(is_backward=is_backward)
        for call in counted:
            missing.pop(call.place, None)
        outside = self._not_in_functions(graph, missing.values())
        self.problems = {**self._composites.problems, **self.problems}
        if self._is_rewritten:
            changed = {call.target: _CHANGED for call in outside if call.operators}
            self.problems = {**changed, **self.problems}
        return [
            *(_formula_call(call, region) for call, region in counted.items()),
            *(self._call_without_region(call) for call in outside if not call.operators),
        ]

    def _call(self, key: str) -> CompositeCall | None:
        """Return the call that an entry of a module stack stands for; None for another entry.

        Compiled autograd traces the backward graph of another function, with that one's entries.
        """
        own = self._composites.calls.get(key)
        if own is not None or not self._attribution.is_of_compiled_autograd:
            return own
        return call_of(key)

    def _problem_of_other(self, call: CompositeCall, region: Region) -> str | None:
        """Return why the formula is not asked for a call of another function; None if it may be."""
        if call.mark in self._composites.calls:
            return None
        if not _is_counted(call, region):
            return _CHANGED if region.first.phase == "backward" else None
        return _OTHER_SIZES if call.has_symbols else None

    def _new_calls(self, *, is_backward: bool) -> dict[Place, CompositeCall]:
        """Return the calls that this graph is the first to have, as they were traced last.

        What a compiler traces for itself is not in a node of the program.
        """
        places = {
            call.place: call
            for call in self._composites.calls.values()
            if call.place not in self._known
            and (is_backward if call.is_of_backward else call.place.node)
        }
        self._known.update(places)
        return places

    def _not_in_functions(
        self, graph: fx.GraphModule, missing: Iterable[CompositeCall]
    ) -> list[CompositeCall]:
        """Return the calls that no higher-order operator makes; note why others are not asked."""
        calls = self._composites.calls
        inside = {
            calls[mark].place: operator
            for mark, operator in _marks_in_functions(graph)
            if mark in calls
        }
        for call in missing:
            if call.place in inside:
                self.problems[call.target] = problem_in(inside[call.place])
        # The functions are also traced beforehand, as a whole.
        return [
            call
            for call in missing
            if call.place not in inside and call.place.node not in self._higher_order
        ]

    def _call_without_region(self, call: CompositeCall) -> FormulaCall:
        """Return a call that does no arithmetic, of which the graph has nothing."""
        return FormulaCall(
            call=call,
            fqn=self._attribution.fqn_of_call(call.stack, None),
            phase="forward",
            times=1,
            around=self._around_stack(call.stack),
        )


def _is_counted(call: CompositeCall, region: Region) -> bool:
    """Return True if the formula of a call stands for its region of a graph.

    That may lack operators that another call has computed as well, and unused ones. A compiler may
    recompute operators of its own accord; the formula is asked again if a checkpoint does so.
    """
    runs, found = len(region.runs), region.operators
    traced = Counter({name: runs * calls for name, calls in call.operators.items()})
    if region.first.phase == "recompute":
        return region.first.is_checkpointed and found == traced
    return found <= traced and bool(found) == bool(traced)


def _formula_call(call: CompositeCall, region: Region) -> FormulaCall:
    outer = takewhile(lambda one: one is not call, (one for one, _ in region.first.around))
    return FormulaCall(
        call=call,
        fqn=region.first.fqn,
        phase=region.first.phase,
        times=len(region.runs),
        around=tuple(outer),
    )


def _names_of_higher_order_nodes(traced: fx.GraphModule) -> frozenset[str]:
    return frozenset(
        node.name
        for part in traced.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
        if name_of_higher_order(node) is not None
    )


def _marks_in_functions(graph: fx.GraphModule) -> Iterator[tuple[str, str]]:
    """Yield ``(entry of a module stack, operator)`` of what higher-order operators call."""
    for node, _ in operator_nodes(graph):
        for function in functions_of(node):
            for part in function.modules():
                for inner in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
                    yield from (
                        (mark, str(name_of_higher_order(node))) for mark in own_stack(inner)
                    )
