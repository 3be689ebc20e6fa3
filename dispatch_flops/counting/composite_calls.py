"""Record calls of operators that autograd takes apart before a dispatch mode sees them.

With a formula of the user's such a call is one operator: its parts run, but are not recorded. What
autograd runs for it in backward is recorded as for any other operator. Without a formula its parts
are recorded. An extension's operator of which no part computes is recorded as unknown, for its
kernels bypass the dispatcher. If autograd's kernel calls that of the device by the dispatcher, the
mode has recorded the operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.counting.formulas_not_asked import FormulasNotAsked, problem_of_call
from dispatch_flops.counting.higher_order import HigherOrderState
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.own_backward import watch_backward
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.operators.composites import is_of_extension
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.operators.operator_keys import name_of
from dispatch_flops.operators.registry import Rule
from dispatch_flops.operators.tensors import tensors_in, untraced

BYPASSES = (
    "it ran no operator that computes: its kernels bypass the dispatcher. Register a formula for it"
)
PARTS_ALONE = (
    "the operators that it runs are counted. If it computes by itself as well, register a formula"
)


class Recorder(Protocol):
    """Dispatch mode that counts, as far as it is used here."""

    tracker: Tracker
    higher_order: HigherOrderState
    not_asked: FormulasNotAsked

    def rule_of(self, func: OpOverload) -> Rule | None:
        """Return the rule that applies in this thread."""

    def record_call(self, func: OpOverload, args: Any, kwargs: Any, out: Any) -> CallCost:
        """Record a call that has returned ``out``; return its cost."""


def run_composite(
    mode: Recorder, func: OpOverload, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run ``func`` by ``run`` under ``mode``; record either the call or its parts."""
    rule = mode.rule_of(func)
    has_formula = rule is not None and not rule.builtin
    problem = problem_of_call() if has_formula else None
    here = mode.tracker.here(args)
    parts = ModulePhase(here.fqn, here.phase)
    seconds = parts.seconds = _SecondsOfParts()
    try:
        with _recorded_in(mode.tracker, func, parts):
            out = run(*args, **kwargs)
    except BaseException:  # checkpointing raises once it has recomputed what it needs
        _give(parts, seconds, here)
        raise
    if _was_seen(func, parts):  # autograd's kernel has called that of the device
        _give(parts, seconds, here)
        return out
    if problem is not None:
        mode.not_asked.add(name_of(func.overloadpacket), problem)
    elif has_formula:
        args, kwargs, result = _torch.without_gradient_wrappers((args, kwargs, out))
        with _torch.modes_disabled(), untraced():
            cost = mode.record_call(func, args, kwargs, result)
            seconds.give_to(here, cost)
        if not any(share.phase == "backward" for share in cost.shares):
            watch_backward(mode, func, out, here.fqn)
        return out
    if _computes_unseen(func, args, kwargs, out, parts):
        here.counts[CallCost(str(func), "unknown", error=BYPASSES)] += 1
    elif is_of_extension(func) and any(cost.kind != "free" for cost in parts.counts):
        mode.higher_order.notes[f"{func}: {PARTS_ALONE}"] = None
    _give(parts, seconds, here)
    return out


def _was_seen(func: OpOverload, parts: ModulePhase) -> bool:
    """Return True if the operator itself is among the operators that its call ran."""
    name = str(func)
    return any(cost.op == name for cost in parts.counts)


def _give(parts: ModulePhase, seconds: _SecondsOfParts, here: ModulePhase) -> None:
    for cost, calls in parts.counts.items():
        here.counts[cost] += calls
    seconds.give_to(here)


@contextmanager
def _recorded_in(tracker: Tracker, func: OpOverload, parts: ModulePhase) -> Iterator[None]:
    """Record the operators that this thread runs in the block in ``parts``."""
    tracker.enter_operator(func, parts)
    try:
        yield
    finally:
        tracker.leave_operator(func)


class _SecondsOfParts(defaultdict[CallCost, float]):
    """Seconds of an operator's parts; those of events are known only after its end."""

    def __init__(self) -> None:
        super().__init__(float)
        self._owner: ModulePhase | None = None
        self._cost: CallCost | None = None

    def give_to(self, module_phase: ModulePhase, cost: CallCost | None = None) -> None:
        """Add these seconds and later ones there: to ``cost``, or to that of each part."""
        self._owner, self._cost = module_phase, cost
        for part, seconds in self.items():
            self[part] = seconds
        self.clear()

    def __setitem__(self, part: CallCost, seconds: float) -> None:
        if self._owner is None:
            super().__setitem__(part, seconds)
        else:
            self._owner.add_seconds(self._cost or part, seconds)

    def __missing__(self, part: CallCost) -> float:
        return 0.0


def _computes_unseen(
    func: OpOverload, args: Any, kwargs: Any, out: Any, parts: ModulePhase
) -> bool:
    """Return True if a call has a result that no visible operator computed.

    A view of an argument needs no kernel. A call that only moves data by visible operators cannot
    be told from one that allocates its result for a kernel of its own.
    """
    if any(cost.kind != "free" for cost in parts.counts):
        return False
    given = {_memory(tensor) for tensor in tensors_in((args, kwargs))}
    is_fresh = any(_memory(tensor) not in given for tensor in tensors_in(out))
    return is_fresh or _torch.schema_of(func).is_mutable


def _memory(tensor: torch.Tensor) -> Any:
    """Return what two views of the same memory have in common."""
    try:
        return _torch.storage_address(tensor)
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper around others
        return id(tensor)
