"""Plans: how the dispatch mode handles each operator, and what its calls cost.

Plans and costs of torch's own operators outlast the counter that made them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dispatch_flops._torch import OpOverload
from dispatch_flops.counting.known_calls import KnownCall, KnownCalls
from dispatch_flops.operators import registry
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.operators.numbers import BY_VALUE, NumberKeys
from dispatch_flops.operators.registry import Rule

# The mode, the plan, and the operator's arguments.
Strategy = Callable[[Any, "Plan", Any, dict[str, Any]], Any]

_LIMIT = 8192  # plans, and costs, that are kept before all are dropped
_LIBRARIES = ("aten", "prim", "prims")
_PLAIN = frozenset(
    (int, bool, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)
) | {torch.memory_format}


def _no_parts(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


@dataclass(slots=True, eq=False)
class Plan:
    """How the mode handles one overload.

    call: runs the operator. is_adapted: it does more than that.
    fixed: a call that every call is like, where signatures make no difference.
    calls: other calls and their costs.
    strategy: takes the place of running and recording the operator; None for most operators.
    parts: runs the operators that a composite operator consists of.
    is_whole: of one that devices with a kernel run whole, for the arguments of a new call and the
        target; other devices take it apart. None for most operators.
    numbers: which numbers among the arguments decide the cost by their values.
    reads_data: the result depends on values. varies_in_shape: the shape of a result does.
    by_thread: the plan of each thread, where ``overridden`` gives threads different rules.
    is_shared: other counters use the same ``calls``.
    """

    func: Any
    name: str
    call: Callable[..., Any]
    rule: Rule | None
    fixed: KnownCall | None = None
    calls: KnownCalls = field(default_factory=KnownCalls)
    strategy: Strategy | None = None
    parts: Callable[..., Any] = _no_parts
    is_whole: Callable[[Any, str], bool] | None = None
    numbers: NumberKeys = BY_VALUE
    reads_data: bool = False
    varies_in_shape: bool = False
    by_thread: dict[int, Plan] | None = None
    is_shared: bool = False
    is_adapted: bool = False


class SharedPlans:
    """Plans that later counters use again, with the costs that earlier ones found.

    Only operators of torch that have a rule of this package are shared. Kernels and rules of
    others may come and go, and their arguments may be anything. A key is compared by equality: it
    states everything that a plan depends on besides the rules.
    """

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}
        self._costs = 0
        self._lock = threading.Lock()
        registry.watch(self)

    def rules_changed(self) -> None:
        """Drop all plans: rules were added or removed."""
        with self._lock:
            self._plans.clear()
            self._costs = 0

    def find(self, key: Any) -> Plan | None:
        """Return the plan of that key, if there is one."""
        return self._plans.get(key)

    def add(self, key: Any, plan: Plan, changes: int) -> None:
        """Share the plan, if it may be shared.

        changes: ``registry.changes()`` from before the plan was made.
        """
        func, rule = plan.func, plan.rule
        if not isinstance(func, OpOverload) or func.namespace not in _LIBRARIES:
            return
        if rule is None or not rule.builtin:
            return
        with self._lock:
            if registry.changes() != changes:
                return
            if len(self._plans) >= _LIMIT:
                self._plans.clear()
            plan.is_shared = True
            self._plans[key] = plan

    def add_cost(self, plan: Plan, signature: Any, cost: CallCost) -> bool:
        """Share the cost of a signature; return False if it is not to be shared.

        A formula that failed is tried again by the next counter. A signature may hold an object
        that keeps tensors alive.
        """
        if cost.error is not None or not _is_plain(signature):
            return False
        if self._costs >= _LIMIT:
            for known in list(self._plans.values()):
                known.calls.clear()
            self._costs = 0
        self._costs += 1
        plan.calls.by_signature[signature] = KnownCall(cost=cost)
        return True


def _is_plain(signature: Any) -> bool:
    """Return True if a signature consists of values that keep nothing else alive."""
    if isinstance(signature, tuple):
        return all(map(_is_plain, signature))
    if isinstance(signature, type):
        return signature.__module__.partition(".")[0] in ("builtins", "torch")
    return type(signature) in _PLAIN


SHARED_PLANS = SharedPlans()
