"""Call of a module whose class has a formula, in compiled code.

It counts as one operator, as in an eager counter. The formula is asked for each run's sizes, with
tensors that have no data.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from dispatch_flops import _torch
from dispatch_flops.compile.templates import UNKNOWN_SIZE, Templates, Values, fill_in, is_symbolic
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost, cost_of_call
from dispatch_flops.operators.operator_keys import name_of
from dispatch_flops.operators.registry import Rule

_CHECKPOINTS = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
_GRAPH_BREAK = "a graph break splits the call"
_GONE = "the module does not exist any more; read the totals while it does"


class OpaqueCall:
    """One call of a module whose class has a formula, as torch.compile traced it.

    mark: stands for the call in nodes' ``nn_module_stack``; "" for the compiled function itself.
    target: the class.
    stack: the module calls around it, as torch.compile keeps them.
    inside: names of the higher-order operators whose functions call the module.
    problem: why the formula cannot be asked; None if it can.
    has_nodes: the call made nodes.
    is_claimed: a graph that AOTAutograd partitions counts the call.
    operators: calls of operators that do arithmetic in the call, by name.
    """

    def __init__(
        self, mark: str, module: nn.Module, stack: Mapping[str, Any], inside: Sequence[str] = ()
    ) -> None:
        self.mark = mark
        self.target = _torch.class_of(module)
        self.stack = stack
        self.inside = inside
        self.problem: str | None = _GRAPH_BREAK
        self.has_nodes = True
        self.is_claimed = False
        self.operators: Counter[str] = Counter()
        self._module = weakref.ref(module)
        self._traced: _torch.TracedValues | None = None
        self._values: Any = None
        self._leaves: list[Any] = []
        self._kept: dict[int, Any] = {}
        self._costs: dict[tuple[Rule, frozenset[tuple[Any, int]]], CallCost] = {}

    def module(self) -> nn.Module | None:
        """Return the module; None if it does not exist any more."""
        return self._module()

    def take(self, read: Callable[[], _torch.TracedValues]) -> None:
        """Take ``(args, kwargs, result)`` of the call, which has returned."""
        try:
            self._traced = read()
        except Exception as error:  # whatever torch.compile represents otherwise
            self.problem = f"its arguments and result cannot be read ({error})"
        else:
            self.problem = None

    def is_recomputed_by(self, operators: Counter[str]) -> bool:
        """Return True if these operators, which a backward graph runs, recompute the whole call."""
        is_checkpointed = any(name in _CHECKPOINTS for name in self.inside)
        return is_checkpointed and bool(self.operators) and self.operators <= operators

    def make_templates(self) -> None:
        """Replace the compiler's tensors by templates, for they would keep its state alive."""
        if self._traced is None:
            return
        (value, leaves, kept), self._traced = self._traced, None
        templates = Templates()
        self._leaves = [templates.of(meaning) for _, meaning in leaves]
        self._kept = {id(part): part for part in kept}
        self._values = _with_parts(value, [part for part, _ in leaves], self._leaves, self._kept)

    @property
    def has_symbols(self) -> bool:
        """True if a size among its values is symbolic."""
        return is_symbolic(self._leaves)

    def cost(
        self,
        rule: Rule,
        values: Values,
        conventions: Conventions,
        *,
        module: nn.Module | None = None,
    ) -> CallCost:
        """Return the cost that the formula states; unknown if it fails.

        values: of the symbols. module: another module of the class, which runs the same code.
        """
        name = name_of(self.target)
        key = rule, frozenset(values.items())
        owner = self.module() if module is None else module
        if owner is None:
            return self._costs.get(key) or CallCost(name, "unknown", error=_GONE)
        try:
            leaves = [fill_in(leaf, values, fakes=None) for leaf in self._leaves]
        except TypeError:
            return CallCost(name, "unknown", error=UNKNOWN_SIZE)
        args, kwargs, out = _with_parts(self._values, self._leaves, leaves, self._kept)
        cost = cost_of_call(
            name, self.target, rule, (owner, *args), kwargs, out, conventions,
            read=(args, kwargs, tuple(owner.parameters())),
        )  # fmt: skip
        if module is None:
            self._costs[key] = cost
        return cost


def _with_parts(value: Any, parts: list[Any], others: list[Any], kept: Mapping[int, Any]) -> Any:
    """Return a copy of ``value`` with other parts in place of these, and with those kept."""
    memo = {id(part): other for part, other in zip(parts, others, strict=True)}
    return copy.deepcopy(value, {**kept, **memo})
