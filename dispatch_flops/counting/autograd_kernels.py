"""Kernels that show active counters the operators which autograd takes apart.

Outside inference mode, autograd takes a composite operator apart before a dispatch mode sees it,
and an operator that has only an Autograd kernel never reaches one; nor does one whose Autograd
kernel computes in place of the device's. While a counter is active, the operators of this kind that
have a formula of the user's, or belong to an extension, get kernels for autograd's dispatch keys,
and those with a formula also for keys of torch.func. A counter may provide kernels of its own for
further operators. Others, and threads without a counter, have no overhead.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.counting.composite_calls import run_composite
from dispatch_flops.counting.formulas_not_asked import problem_in
from dispatch_flops.counting.thread_state import NO_TASK
from dispatch_flops.counting.undo import UndoStack
from dispatch_flops.operators import registry
from dispatch_flops.operators.composites import operators_of_extensions, taken_apart_of
from dispatch_flops.operators.operator_keys import name_of
from dispatch_flops.operators.registry import Rule

Kernel = Callable[..., Any]
Kernels = Mapping[OpOverload, Mapping[str, Kernel]]  # by dispatch key; take the keyset first

# Higher-order operators whose function autograd traces before it runs for the first time.
_TRACED_BY_AUTOGRAD = frozenset(("scan",))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Kernels that an operator gets, by dispatch key, and whether its calls are observed.

    has_formula: its calls are also observed where torch.func takes them apart.
    """

    provided: tuple[tuple[str, Kernel], ...] = ()
    is_observed: bool = False
    has_formula: bool = False


_lock = threading.RLock()
_counters: dict[Any, tuple[Mapping[Any, Rule], Kernels]] = {}  # active modes; their own rules
_registered: dict[OpOverload, tuple[_Wanted, _torch.Kernels]] = {}


def start(mode: Any, own_rules: Mapping[Any, Rule], kernels: Kernels, undo: UndoStack) -> None:
    """Show ``mode`` the operators that autograd takes apart until ``undo`` runs.

    kernels: what ``mode`` provides, to be run where its dispatch key comes first.
    """
    undo.add(lambda: _stop(mode))
    with _lock:
        _counters[mode] = own_rules, kernels
        _update()


def _stop(mode: Any) -> None:
    with _lock:
        _counters.pop(mode, None)
        _update()


def counters_in_force() -> list[Any]:
    """Return the active counters of this thread, innermost first."""
    return [mode for mode in reversed(_torch.modes_in_force()) if mode in _counters]


class _Reader:
    """Is told when formulas are registered or removed while a counter is active."""

    def rules_changed(self) -> None:
        if _counters:
            with _lock:
                _update()


_reader = _Reader()
registry.watch(_reader)


def _update() -> None:
    """Register the kernels that are wanted now, and remove all others."""
    wanted = _wanted()
    for op, (registered, kernels) in list(_registered.items()):
        if wanted.get(op) != registered:  # other threads may be using those that stay
            kernels.remove()
            del _registered[op]
    for op, needs in wanted.items():
        if op not in _registered:
            kernels = _torch.Kernels(op.namespace)
            _registered[op] = needs, kernels  # before the first is registered: it may raise
            _register(op, needs, kernels)


def _wanted() -> dict[OpOverload, _Wanted]:
    observed: set[OpOverload] = set()
    with_formula: set[OpOverload] = set()
    if _counters:
        own_rules = (rules for rules, _ in _counters.values())
        with_formula = taken_apart_of(registry.keys_with_formulas(*own_rules))
        observed = {*operators_of_extensions(), *with_formula}
    provided: defaultdict[OpOverload, dict[str, Kernel]] = defaultdict(dict)
    for _, kernels in _counters.values():
        for op, by_key in kernels.items():
            provided[op] |= by_key
    return {
        op: _Wanted(tuple(provided[op].items()), op in observed, op in with_formula)
        for op in {*observed, *provided}
    }


def _register(op: OpOverload, needs: _Wanted, kernels: _torch.Kernels) -> None:
    by_key = dict(needs.provided)
    if needs.is_observed:
        by_key = {**_kernels_of(op), **by_key}
    for key, kernel in by_key.items():
        kernels.register(op, _observed(op, kernel) if needs.is_observed else kernel, key)
    if needs.has_formula:
        for key, kernel in _torch.transform_kernels(op).items():
            kernels.register(op, _observed(op, kernel), key)


def _kernels_of(op: OpOverload) -> Mapping[str, Kernel]:
    """Return the kernels by which autograd runs an operator that has none of this module's now."""
    known = _known_kernels(_torch.libraries_loaded())
    if op in known:
        return known[op]
    found = {key: _torch.autograd_kernel(op, key) for key in _torch.autograd_keys()}
    kernels = {key: kernel for key, kernel in found.items() if kernel is not None}
    if not _torch.may_be_replaced(op):
        known[op] = kernels
    return kernels


@functools.lru_cache(maxsize=1)
def _known_kernels(_loaded: Hashable) -> dict[OpOverload, Mapping[str, Kernel]]:
    """Return what is known of C++ while no library adds operators or kernels, to be filled."""
    return {}


def _observed(op: OpOverload, kernel: Kernel) -> Kernel:
    """Return ``kernel``, with its calls recorded by the counters that are active in the thread."""

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(kernel, keyset)
        active = counters_in_force()
        if not active:
            _note_traced_call(op)
        for mode in active:
            call = partial(run_composite, mode, op, call)
        return call(*args, **kwargs)

    return run


def _note_traced_call(op: OpOverload) -> None:
    """Note a call in a function that autograd traces, to run what it consists of instead."""
    is_traced = _torch.traced_graph() is not None and _torch.current_trace() is None
    if not is_traced or _torch.graph_task_id() != NO_TASK:
        return
    operators = {operator for operator, _ in _torch.functions_of_running_operators()}
    for operator in operators.intersection(_TRACED_BY_AUTOGRAD):
        for mode in list(_counters):
            rule = mode.rule_of(op)
            if mode.tracker.thread() is not None and rule is not None and not rule.builtin:
                mode.not_asked.add(name_of(op.overloadpacket), problem_in(operator))
