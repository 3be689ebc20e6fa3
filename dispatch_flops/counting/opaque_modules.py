"""Count a module class that has a formula as one operator.

The formula is called as ``formula(module, *args, out=output, **kwargs)``. What the module runs in
forward or recomputation is not counted besides. Its backward pass is counted as for any other
module: as operators, under the modules that made them. So is a part of the call that a checkpoint
recomputes: it ends a recomputation as soon as backward has what it needs. So are calls in functions
of ``torch.cond``, ``scan`` and the like, which torch traces, and on samples of ``torch.vmap``. A
warning says so.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from dispatch_flops import _torch
from dispatch_flops.counting.dispatch_mode import CountingMode
from dispatch_flops.counting.formulas_not_asked import INLINED, problem_in, problem_of_call
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

    Installs hooks of its own, and only once there is such a formula. They run right after the
    tracker's. On entry, the module's call is on the tracker's stack; on exit ``_open`` keeps it.
    """

    def __init__(
        self, mode: CountingMode, conventions: Conventions, own_rules: Mapping[Any, Rule]
    ) -> None:
        self._tracker = mode.tracker
        self._not_asked = mode.not_asked
        self._higher_order = mode.higher_order
        self._conventions = conventions
        self._own_rules = own_rules
        self._rules: dict[int, dict[type, Rule]] = {}  # by thread
        self._has_started = self._has_hooks = False
        self._costs: dict[Any, CallCost] = {}
        self._open: dict[ThreadState, tuple[OpenCall, Rule]] = {}
        self._discarded: dict[ThreadState, list[ModulePhase]] = {}  # of the open calls
        self._read_graphs: weakref.WeakSet[fx.GraphModule] = weakref.WeakSet()

    def start(self, undo: UndoStack) -> None:
        """Install the hooks until ``undo`` runs, as soon as a class has a formula."""
        undo.add(self._stop)
        self._has_started = True
        registry.watch(self)
        self.rules_changed()

    def rules_changed(self) -> None:
        """Ask for the rules again; install the hooks if a class has a formula now."""
        self._rules.clear()
        self._read_graphs.clear()
        if self._has_started and not self._has_hooks and self._rules_here():
            self._has_hooks = True
            register_module_forward_pre_hook(self._enter)
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
            self._higher_order.before_call = self._note_traced_calls

    def _stop(self) -> None:
        self._has_started = False
        self._higher_order.before_call = None
        if self._has_hooks:
            _torch.remove_global_hooks(self._enter, self._leave)
            self._has_hooks = False

    def _rules_here(self) -> dict[type, Rule]:
        """Return the rules of module classes in this thread."""
        thread = threading.get_ident()
        rules = self._rules.get(thread)
        if rules is None:
            rules = self._rules[thread] = registry.module_rules(self._own_rules)
        return rules

    def _enter(self, module: nn.Module, args: Any) -> None:
        thread = self._tracker.thread()
        if thread is None:
            return
        call = thread.stack[-1]
        if call.owner is not module:
            return
        assert call.module_phase is not None  # the outside alone has none
        if not self._is_in_opaque_call(thread):
            if isinstance(module, fx.GraphModule):
                self._note_inlined_calls(module)
            cls = _torch.class_of(module)
            rule = self._rules_here().get(cls)
            if rule is None or not self._is_asked(cls):
                return
            self._open[thread] = call, rule
            self._discarded[thread] = []
        # This ModulePhase is not aggregated: what is recorded there is discarded.
        discarded = ModulePhase(call.module_phase.fqn, call.module_phase.phase)
        thread.current = call.module_phase = discarded
        self._discarded[thread].append(discarded)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any = _FAILED) -> None:
        # torch calls this without kwargs where forward raised.
        thread = self._tracker.thread()
        if thread is None or thread not in self._open:
            return
        call, rule = self._open[thread]
        if call.owner is not module or (call in thread.stack and not call.is_in_hooks):
            return
        del self._open[thread]
        discarded = self._discarded.pop(thread)
        assert call.module_phase is not None
        if output is not _FAILED:
            module_phase = thread.module_phase(call.module_phase.fqn, call.module_phase.phase)
            module_phase.counts[self._cost_of(rule, module, args, kwargs, output)] += 1
        elif call.module_phase.phase == "recompute":
            for part in discarded:
                counts = thread.module_phase(part.fqn, part.phase).counts
                for cost, calls in part.counts.items():
                    counts[cost] += calls

    def _is_asked(self, cls: type) -> bool:
        """Return True if the formula of a class is asked for this call; note why not."""
        problem = problem_of_call()
        if problem is not None:
            self._not_asked.add(name_of(cls), problem)
        return problem is None

    def _note_traced_calls(self) -> None:
        """Note the classes of modules in the functions that higher-order operators run now."""
        if self._is_in_opaque_call(self._tracker.join_thread()):
            return
        for operator, function in _torch.functions_of_running_operators():
            self._note_classes_in(function, problem_in(operator))

    def _note_inlined_calls(self, graph: fx.GraphModule) -> None:
        """Note the classes of modules whose calls were traced into a graph that is called."""
        if graph not in self._read_graphs:
            self._read_graphs.add(graph)
            self._note_classes_in(graph, INLINED)

    def _note_classes_in(self, function: fx.GraphModule, problem: str) -> None:
        found = _torch.module_classes_in(function)
        for cls in self._rules_here():
            if cls in found or f"{cls.__module__}.{cls.__qualname__}" in found:
                self._not_asked.add(name_of(cls), problem)

    def _is_in_opaque_call(self, thread: ThreadState) -> bool:
        """Return True if what the thread runs is a part of a call with a formula."""
        opened = self._open.get(thread)
        return opened is not None and opened[0] in thread.stack

    def _cost_of(
        self, rule: Rule, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> CallCost:
        cls = _torch.class_of(module)
        args, kwargs, output = _torch.without_gradient_wrappers((args, kwargs, output))
        cost = cost_of_call(
            name_of(cls), cls, rule, (module, *args), kwargs, output,
            self._conventions, read=(args, kwargs, tuple(module.parameters())),
        )  # fmt: skip
        key = (cost.op, cost.dtype, cost.cost, cost.shares, cost.error)
        return self._costs.setdefault(key, cost)
