"""Count a module class that has a formula as one operator.

The formula is called as ``formula(module, *args, out=output, **kwargs)``. What the module runs in
forward or recomputation is not counted besides. Its backward pass is counted as for any other
module: as operators, under the modules that made them. So is a part of the call that a checkpoint
recomputes: it ends a recomputation as soon as backward has what it needs. So are calls in functions
of ``torch.cond``, ``scan`` and the like, which torch traces, and on samples of ``torch.vmap``. A
warning says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from dispatch_flops import _torch
from dispatch_flops.counting.dispatch_mode import CountingMode
from dispatch_flops.counting.formulas_not_asked import problem_in, problem_of_call
from dispatch_flops.counting.thread_state import ModulePhase, OpenCall, ThreadState
from dispatch_flops.counting.undo import UndoStack
from dispatch_flops.operators import registry
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost, cost_of_call
from dispatch_flops.operators.operator_keys import name_of
from dispatch_flops.operators.registry import Rule

_FAILED = object()


class OpaqueModules:
    """Records calls of modules whose class has a formula, from ``start`` on.

    Installs hooks of its own, and only if there is such a formula. They run right after the
    tracker's. On entry, the module's call is on the tracker's stack; on exit ``_open`` keeps it.
    """

    def __init__(
        self, mode: CountingMode, conventions: Conventions, own_rules: Mapping[Any, Rule]
    ) -> None:
        self._tracker = mode.tracker
        self._not_asked = mode.not_asked
        self._higher_order = mode.higher_order
        self._conventions = conventions
        self._rules = registry.module_rules(own_rules)
        self._costs: dict[Any, CallCost] = {}
        self._open: dict[ThreadState, OpenCall] = {}
        self._discarded: dict[ThreadState, list[ModulePhase]] = {}  # of the open calls

    def start(self, undo: UndoStack) -> None:
        """Install the hooks until ``undo`` runs."""
        if self._rules:
            undo.add(lambda: _torch.remove_global_hooks(self._enter, self._leave))
            register_module_forward_pre_hook(self._enter)
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
            undo.add(lambda: setattr(self._higher_order, "before_call", None))
            self._higher_order.before_call = self._note_traced_calls

    def _enter(self, module: nn.Module, args: Any) -> None:
        thread = self._tracker.thread()
        if thread is None:
            return
        call = thread.stack[-1]
        if call.owner is not module or call.module_phase is None:
            return
        if self._open.get(thread) not in thread.stack:
            if type(module) not in self._rules or not self._is_asked(module):
                return
            self._open[thread] = call
            self._discarded[thread] = []
        # This ModulePhase is not aggregated: what is recorded there is discarded.
        discarded = ModulePhase(call.module_phase.fqn, call.module_phase.phase)
        thread.current = call.module_phase = discarded
        self._discarded[thread].append(discarded)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any = _FAILED) -> None:
        # torch calls this without kwargs where forward raised.
        thread = self._tracker.thread()
        call = self._open.get(thread) if thread is not None else None
        if thread is None or call is None or call.owner is not module:
            return
        if call in thread.stack and not call.is_in_hooks:
            return
        del self._open[thread]
        discarded = self._discarded.pop(thread)
        if call.module_phase is None:
            return
        if output is not _FAILED:
            module_phase = thread.module_phase(call.module_phase.fqn, call.module_phase.phase)
            with _torch.modes_disabled():
                module_phase.counts[self._cost_of(module, args, kwargs, output)] += 1
        elif call.module_phase.phase == "recompute":
            for part in discarded:
                counts = thread.module_phase(part.fqn, part.phase).counts
                for cost, calls in part.counts.items():
                    counts[cost] += calls

    def _is_asked(self, module: nn.Module) -> bool:
        """Return True if the formula of the module is asked for this call; note why not."""
        problem = problem_of_call()
        if problem is not None:
            self._not_asked.add(name_of(type(module)), problem)
        return problem is None

    def _note_traced_calls(self) -> None:
        """Note the classes of modules in the functions that higher-order operators run now."""
        thread = self._tracker.join_thread()
        if self._open.get(thread) in thread.stack:  # nothing in it is counted
            return
        for operator, function in _torch.functions_of_running_operators():
            for cls in _torch.module_classes_in(function):
                if cls in self._rules:
                    self._not_asked.add(name_of(cls), problem_in(operator))

    def _cost_of(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> CallCost:
        cls = type(module)
        args, kwargs, output = _torch.without_gradient_wrappers((args, kwargs, output))
        cost = cost_of_call(
            name_of(cls), cls, self._rules[cls], (module, *args), kwargs, output,
            self._conventions, read=(args, kwargs, tuple(module.parameters())),
        )  # fmt: skip
        key = (cost.op, cost.dtype, cost.cost, cost.shares, cost.error)
        return self._costs.setdefault(key, cost)
