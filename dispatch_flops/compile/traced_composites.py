"""Calls of composite operators that have a formula, as AOTAutograd traces them.

Autograd takes such an operator apart before a graph has it. Where AOTAutograd traces the call, its
arguments are read and the nodes that it makes are marked. With the formula the call is one
operator, as in an eager counter.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.compile.node_operators import arithmetic_of
from dispatch_flops.compile.templates import UNKNOWN_SIZE, Templates, Values, fill_in, is_symbolic
from dispatch_flops.counting.formulas_not_asked import problem_of_call
from dispatch_flops.counting.thread_state import NO_TASK
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost, cost_of_call
from dispatch_flops.operators.registry import Rule

_MARKS = count()
_calls: weakref.WeakValueDictionary[str, CompositeCall] = weakref.WeakValueDictionary()


class Place(NamedTuple):
    """Where a function makes a call: the node that is traced, and the number of its call there.

    AOTAutograd may trace a function several times. Calls of one place stand for the same one.
    """

    graph: int
    node: str
    number: int


@dataclass(eq=False, slots=True, kw_only=True, weakref_slot=True)
class CompositeCall:
    """One call of a composite operator.

    mark: stands for the call in nodes' ``nn_module_stack``.
    target: the operator. stack: the module calls around it, as torch.compile keeps them.
    is_of_backward: autograd made the call in a backward pass.
    operators: calls of operators that do arithmetic in it, by name.
    values: templates of ``(args, kwargs, result)``.
    """

    mark: str
    target: OpOverload
    place: Place
    stack: Mapping[str, Any]
    is_of_backward: bool
    operators: Counter[str]
    values: Any

    @property
    def has_symbols(self) -> bool:
        """True if a size among its values is symbolic."""
        return is_symbolic(self.values)

    def cost(
        self, rule: Rule, values: Values, conventions: Conventions, *, module: Any = None
    ) -> CallCost:
        """Return the cost that the formula states; unknown if it fails.

        values: of the symbols. module: does not matter to an operator.
        """
        name = str(self.target)
        try:
            args, kwargs, out = fill_in(self.values, values, fakes=None)
        except TypeError:
            return CallCost(name, "unknown", error=UNKNOWN_SIZE)
        return cost_of_call(name, self.target, rule, args, kwargs, out, conventions)


def call_of(mark: str) -> CompositeCall | None:
    """Return the call in any function that a mark stands for; None for another key."""
    return _calls.get(mark)


class TracedComposites:
    """Calls of composite operators in one function that a backend compiles.

    operators: those whose calls are recorded. calls: what AOTAutograd traced, by mark.
    problems: ``{operator: why the formula is not asked for a call of it}``.
    """

    def __init__(self, operators: Iterable[OpOverload]) -> None:
        self.calls: dict[str, CompositeCall] = {}
        self.problems: dict[OpOverload, str] = {}
        self._recorded: Counter[OpOverload] = Counter()
        self._operators = tuple(operators)
        self._numbers: Counter[Any] = Counter()  # of calls, by node and graph

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the calls that AOTAutograd traces in the block."""
        with _torch.kernels_in_traces(self._operators, self._record):
            yield
        self._numbers.clear()

    def _record(self, op: OpOverload, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        graph = _torch.traced_graph()
        if graph is None:
            return run(*args, **kwargs)
        problem = problem_of_call()
        if problem is not None:
            recorded = self._recorded[op]
            out = run(*args, **kwargs)
            if self._recorded[op] == recorded:  # torch.vmap may run the operator on the batch
                self.problems[op] = problem
            return out
        self._recorded[op] += 1
        node, stack = _torch.interpreted_node(), _torch.current_module_stack()
        is_of_backward = _torch.graph_task_id() != NO_TASK
        number = self._numbers[node, graph]
        self._numbers[node, graph] += 1
        mark = f"dispatch_flops {op} {next(_MARKS)}"
        known = len(graph.nodes)
        with _torch.marking_nodes(mark, type(op)):
            out = run(*args, **kwargs)
        made = islice(reversed(graph.nodes), len(graph.nodes) - known)
        self.calls[mark] = _calls[mark] = CompositeCall(
            mark=mark,
            target=op,
            place=Place(*node, number),
            stack=stack,
            is_of_backward=is_of_backward,
            operators=Counter(name for one in made for name in arithmetic_of(one)),
            values=Templates().of((args, kwargs, out)),
        )
        return out
