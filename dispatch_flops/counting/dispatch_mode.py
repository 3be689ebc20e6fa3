"""Dispatch mode that records the cost of every executed operator.

It never raises into the user's program and never keeps a tensor. What an overload needs is decided
when it is met for the first time. Each later call costs one look-up by signature and one increment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import HigherOrderOperator, NestedTensor, OpOverload
from dispatch_flops.counting import (
    autograd_kernels,
    meta_attention,
    meta_dropout,
    meta_rms_norm,
    meta_tensors,
)
from dispatch_flops.counting.communication import CommunicationRecorder
from dispatch_flops.counting.composite_calls import run_composite
from dispatch_flops.counting.entered_mode import EnteredMode
from dispatch_flops.counting.formulas_not_asked import FormulasNotAsked
from dispatch_flops.counting.higher_order import HANDLERS, HigherOrderContext, HigherOrderState
from dispatch_flops.counting.kernels import kernel
from dispatch_flops.counting.known_calls import KnownCall, KnownCalls, Pair, differs_in_numbers
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.observers import OperatorTimer
from dispatch_flops.counting.plans import SHARED_PLANS, Plan
from dispatch_flops.counting.signatures import call_signature, signature_of
from dispatch_flops.counting.strategies import (
    call_through,
    decompose,
    handle_higher_order,
    runs_operators,
    strategy_for,
)
from dispatch_flops.counting.tensor_subclasses import in_sharding_propagation, is_traced, is_wrapper
from dispatch_flops.counting.thread_state import ModulePhase, ThreadState
from dispatch_flops.counting.undo import UndoStack
from dispatch_flops.operators import registry
from dispatch_flops.operators.composites import is_of_extension
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost, cost_of_call
from dispatch_flops.operators.interrupts import is_of_signal_handler
from dispatch_flops.operators.numbers import BY_TYPE, number_keys
from dispatch_flops.operators.operator_keys import name_of
from dispatch_flops.operators.registry import Rule
from dispatch_flops.operators.tensors import tensors_in, untraced
from dispatch_flops.profile.cost import ZERO

_sequence_nr = _torch.sequence_nr
_graph_task = _torch.graph_task_id
_function_modes = _torch.function_modes
_Parameter = torch.nn.Parameter
_Tensor = torch.Tensor
_LIMIT = 8192  # signatures kept before all are dropped


class _SubclassState(threading.local):
    """Operators on tensor subclasses that a thread runs: how many, and which one it hands over.

    ran_parts: the last one ran as others, which were recorded in its place.
    """

    depth = 0
    handed_over: Any = None
    ran_parts = False


# Run composite operators on tensors without data as a device would.
_CHOSEN_BY_TARGET: dict[Any, Callable[..., Any]] = {
    meta_attention.ATTENTION: meta_attention.attend,
    meta_dropout.DROPOUT: meta_dropout.drop,
}


class CountingMode(EnteredMode):
    """Dispatch mode that records the cost of every operator where ``tracker`` attributes it.

    on_full: called when the number of known signatures reaches its limit.
    timer: measures the operators; None: their time is not taken.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        tracker: Tracker,
        conventions: Conventions,
        own_rules: Mapping[Any, Rule],
        on_full: Callable[[], None],
        timer: OperatorTimer | None = None,
    ) -> None:
        super().__init__()
        self.higher_order = HigherOrderState()
        self.not_asked = FormulasNotAsked()
        self.communication = CommunicationRecorder(tracker)
        self._timer = timer
        self.tracker = tracker
        self._local = tracker.local
        self._locator = tracker.locator
        self.conventions = conventions
        self._own_rules = own_rules
        self._on_full = on_full
        self._plans: dict[int, Plan] = {}  # by the id of the operator, which the plan keeps
        self._own_costs: dict[Any, CallCost] = {}  # of shared plans, but not for other counters
        self._signatures = 0
        self._plain_types: set[tuple[type, ...]] = set()
        self._subclass = _SubclassState()
        registry.watch(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps __torch_dispatch__, which imports torch._dynamo on the first operator.
        # The stance that the counter sets serves the same purpose.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise torch.compile, where the stance permits it at all, drops its code for good.
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        timer = self._timer
        if timer is not None and timer.begin():
            try:
                return self.__torch_dispatch__(func, types, args, kwargs)
            finally:
                timer.end()
        try:
            plan = self._plans[id(func)]  # an overload's own hash runs in Python
        except KeyError:
            plan = self._decide(func)
        if plan.strategy is not None or (
            types and (self._subclass.depth or types not in self._plain_types)
        ):
            return self._dispatch_specially(plan, types, args, kwargs or {})
        # What follows is ``run_and_record`` for a call that is known, written out: a function call
        # more is 2 % of what the mode adds to an operator.
        try:
            thread: ThreadState = self._local.thread
            known = plan.fixed
            if known is None:
                calls = plan.calls
                known = calls.latest.then
                if known.__class__ is Pair and not kwargs:
                    # ``is_like``, written out for two tensors, as residual connections add
                    a, b = args
                    if (
                        b.__class__ is not _Tensor  # a number, say
                        or a.is_nested
                        or b.is_nested
                        or not known.is_same(a, b)
                        or known.low < b.data_ptr() - a.data_ptr() < known.high
                    ):
                        known = calls.find(args, kwargs, thread.param_sink)
                    else:
                        calls.latest = known
                elif (
                    kwargs
                    or not calls.takes_tensors
                    or args[0].is_nested  # to compare one may crash
                    or not known.is_like(args)
                ):
                    known = calls.find(args, kwargs, thread.param_sink)
                else:
                    calls.latest = known
                    for index in known.params:
                        thread.param_sink.add(id(args[index]))
            elif args and (cls := args[0].__class__) is not _Tensor:
                if cls is _Parameter:
                    thread.param_sink.add(id(args[0]))
                elif known.run is not None:
                    raise TypeError  # torch's functions ask ``__torch_function__`` of a subclass
            cost, run = known.cost, known.run
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            if is_of_signal_handler(error):
                raise
            cost = None
        if cost is None:  # out of the handler: an error of the operator is to have no context
            return self.run_and_record(plan, args, kwargs or {})
        if run is None or plan.is_adapted or _function_modes():
            run = plan.call
        out = run(*args, **kwargs) if kwargs else run(*args)
        task = _graph_task()
        module_phase = thread.current
        if task != -1:
            module_phase = self._locator.locate_in_backward(thread, task)
        elif module_phase is None:
            module_phase = self._locator.locate(thread, args)
        module_phase.counts[cost] += 1
        thread.recorded_in = module_phase
        if timer is not None:
            timer.record(module_phase, cost)
        thread.last_seq = _sequence_nr()
        return out

    def start(self, undo: UndoStack) -> None:
        """Enter the mode in this thread until ``undo`` runs."""
        target = self.conventions.target
        kernels: dict[OpOverload, Mapping[str, Callable[..., Any]]] = {}
        for of in (meta_attention, meta_dropout, meta_rms_norm):
            kernels |= of.kernels(target)
        autograd_kernels.start(self, self._own_rules, kernels, undo)
        undo.add(self.leave)
        self.enter()

    # -- deciding -------------------------------------------------------------------------------

    def rules_changed(self) -> None:
        """Drop all plans: rules were added or removed."""
        self._plans.clear()
        self._own_costs.clear()

    def _decide(self, func: Any) -> Plan:
        """Return the plan of an overload that is met for the first time."""
        changes = registry.changes()
        if registry.is_overridden(func):
            plan = Plan(func, name_of(func), func, None, strategy=call_through)
            plan.by_thread = {}
        else:
            plan = self._adapt(self._find_plan(func, changes))
        self._plans[id(func)] = plan
        if registry.changes() != changes:  # in another thread, while the plan was made
            self._plans.pop(id(func), None)
        return plan

    def rule_of(self, func: Any) -> Rule | None:
        """Return the rule that applies to an operator in this thread."""
        return self._plan_of(func).rule

    def record_call(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> CallCost:
        """Record a call that ran elsewhere and returned ``out``; return its cost."""
        return self._record(self._plan_of(func), args, kwargs, out)

    def _plan_of(self, func: Any) -> Plan:
        plan = self._plans.get(id(func)) or self._decide(func)
        return plan if plan.by_thread is None else self._plan_of_thread(plan)

    def _plan_of_thread(self, plan: Plan) -> Plan:
        """Return the plan of this thread for an operator that a thread has overridden."""
        assert plan.by_thread is not None
        thread = threading.get_ident()
        if thread not in plan.by_thread:
            plan.by_thread[thread] = self._adapt(self._make_plan(plan.func))
        return plan.by_thread[thread]

    def _find_plan(self, func: Any, changes: int) -> Plan:
        """Return an earlier counter's plan, or a new one, which later counters may use."""
        if self._own_rules:
            return self._make_plan(func)
        key = (type(self), func, self.conventions, torch.get_default_dtype())
        plan = SHARED_PLANS.find(key)
        if plan is None:
            plan = self._make_plan(func)
            SHARED_PLANS.add(key, plan, changes)
        return plan

    def _make_plan(self, func: Any) -> Plan:
        if isinstance(func, HigherOrderOperator):
            return self._plan_higher_order(func)
        return self._plan_operator(func)

    def _adapt(self, plan: Plan) -> Plan:
        """Return the plan with what this counter alone adds to the operator's call."""
        call = plan.call
        if self._timer is not None:
            self._timer.disregard_reach()
            is_free = plan.fixed is not None and plan.fixed.cost.kind == "free"
            call = self._timer.timed(call, is_free=is_free)
        if plan.reads_data:
            call = meta_tensors.with_advice(call, plan.func, self.conventions.meta_value)
        return plan if call is plan.call else replace(plan, call=call, is_adapted=True)

    def _plan_operator(self, func: OpOverload) -> Plan:
        rule = registry.lookup(func, self._own_rules, home=self.tracker.home_thread)
        plan = Plan(func, str(func), kernel(func), rule)
        plan.reads_data = meta_tensors.reads_data(func)
        plan.varies_in_shape = meta_tensors.varies_in_shape(func)
        plan.numbers = number_keys(func, rule)
        plan.calls = KnownCalls(func, plan.numbers)
        if runs_operators(func):
            plan.call = _torch.with_conjugates(_torch.with_autocast(plan.call, func), func)
        plan.is_adapted = plan.call is not _torch.kernel_of(func)
        plan.strategy = strategy_for(func, rule)
        if plan.strategy is decompose:
            plan.parts = self._parts_of(func)
            if func is meta_rms_norm.FUSED and self.conventions.target == "cuda":
                plan.strategy = meta_rms_norm.normalize
        elif func is meta_rms_norm.FUSED and rule is not None and rule.builtin:
            plan.parts, plan.is_whole = self._parts_of(func), meta_rms_norm.is_whole
        if rule is None:
            plan.fixed = KnownCall(cost=CallCost(plan.name, "unknown"))
        elif rule.kind == "free" and (func.is_view or not rule.moves):
            plan.fixed = KnownCall(cost=CallCost(plan.name, "free", None, ZERO))
            if differs_in_numbers(func):
                plan.fixed.to_be_run(func)
        return plan

    def _parts_of(self, func: OpOverload) -> Callable[..., Any]:
        """Return what runs the operators that a composite operator consists of."""
        parts = partial(_torch.run_taken_apart, func)
        if func in _CHOSEN_BY_TARGET:
            parts = partial(_CHOSEN_BY_TARGET[func], self.conventions.target)
        in_program = _torch.with_conjugates(_torch.with_autocast(parts, func), func)
        if is_of_extension(func):
            return partial(run_composite, self, func, in_program)
        return in_program

    def _plan_higher_order(self, func: HigherOrderOperator) -> Plan:
        rule = registry.lookup(func, self._own_rules, home=self.tracker.home_thread)
        plan = Plan(func, name_of(func), func, rule)
        if rule is None:
            plan.fixed = KnownCall(cost=CallCost(plan.name, "unknown"))
            if func.name() in HANDLERS:
                plan.strategy = handle_higher_order
        return plan

    # -- strategies and tensor subclasses -------------------------------------------------------

    def _dispatch_specially(self, plan: Plan, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._timer is not None:
            self._timer.disregard_reach()
        if plan.by_thread is not None:
            plan = self._plan_of_thread(plan)
        if types and plan.strategy is not call_through:
            if not self._are_plain(types):
                return self._dispatch_on_subclass(plan, types, args, kwargs)
            if self._subclass.depth and in_sharding_propagation():
                return plan.func(*args, **kwargs)
        if plan.strategy is not None:
            return plan.strategy(self, plan, args, kwargs)
        return self.run_and_record(plan, args, kwargs)

    def _are_plain(self, types: tuple[type, ...]) -> bool:
        if types in self._plain_types:
            return True
        is_plain = not is_wrapper(types)
        if is_plain:
            self._plain_types.add(types)
        return is_plain

    def _dispatch_on_subclass(
        self, plan: Plan, types: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator on a wrapper subclass and count the operators on its inner tensors.

        With ``subclass="logical"``, or where the user registered a formula, the operator itself is
        recorded. Otherwise the mode enters itself again and returns NotImplemented, which hands
        the operator over to the subclass while the mode is on.
        """
        func = plan.func
        if is_traced(types):
            return func(*args, **kwargs)
        self.tracker.join_thread().param_sink.update(
            id(t) for t in tensors_in((args, kwargs)) if isinstance(t, _Parameter)
        )
        if plan.rule is not None and not plan.rule.builtin:
            return self.run_and_record(plan, args, kwargs)
        if self._subclass.handed_over is func:
            self._subclass.handed_over = None
            return NotImplemented
        is_nested = any(issubclass(cls, NestedTensor) for cls in types)
        if plan.strategy is decompose and not is_nested:
            with self:
                out = plan.parts(*args, **kwargs)
            if out is not NotImplemented:
                self._subclass.ran_parts = True
                return out
        if self.conventions.subclass == "logical" and not is_nested:
            return self.run_and_record(plan, args, kwargs)
        self._subclass.depth += 1
        self._subclass.handed_over = func
        try:
            with self:
                out = func(*args, **kwargs)
        finally:
            self._subclass.depth -= 1
            self._subclass.handed_over = None
        self._subclass.ran_parts = True
        return out

    def handle_higher_order(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator by its handler."""
        if self.higher_order.before_call is not None:
            self.higher_order.before_call()
        context = HigherOrderContext(
            self, self.tracker, self.conventions, self._own_rules, self.higher_order
        )
        return HANDLERS[func.name()](context, func, args, kwargs)

    # -- recording --------------------------------------------------------------------------------

    def run_and_record(self, plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operator and record its cost; return its result."""
        if plan.is_whole is not None and not plan.is_whole(args, self.conventions.target):
            with self:
                return plan.parts(*args, **kwargs)
        out = plan.call(*args, **kwargs)
        self._record(plan, args, kwargs, out)
        return out

    def _record(
        self,
        plan: Plan,
        args: Any,
        kwargs: dict[str, Any],
        out: Any,
        module_phase: ModulePhase | None = None,
    ) -> CallCost:
        """Record a call that has just returned ``out``; return its cost.

        module_phase: where its cost belongs; None for what the thread runs now.
        """
        thread = self.tracker.join_thread()
        cost = None if plan.fixed is None else plan.fixed.cost
        if cost is None:
            with untraced():  # to torch.jit.trace a size is a tensor, and asking for it an operator
                cost = self._cost_of(plan, thread, args, kwargs, out)
        elif args and isinstance(args[0], _Parameter):
            thread.param_sink.add(id(args[0]))
        module_phase = module_phase or self.tracker.here(args)
        module_phase.counts[cost] += 1
        thread.recorded_in = module_phase
        if self._timer is not None:
            self._timer.record(module_phase, cost)
        thread.last_seq = _sequence_nr()
        return cost

    def communicate(self, plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a communication operator; record its cost and what it sends; return its result."""
        out = plan.call(*args, **kwargs)
        module_phase = self.communication.record(plan.func, args, kwargs, out)
        self._record(plan, args, kwargs, out, module_phase)
        return out

    def _cost_of(
        self, plan: Plan, thread: ThreadState, args: Any, kwargs: dict[str, Any], out: Any
    ) -> CallCost:
        """Return the cost of a call, by its signature where it has one."""
        assert plan.rule is not None
        key: Any = None
        try:
            key = call_signature(args, kwargs, thread.param_sink, plan.numbers)
            if plan.varies_in_shape:
                # The size of its result depends on values. A key with the signature of the result
                # is never asked for in ``__torch_dispatch__``: every call comes here.
                key = (key, signature_of(out, set(), [], BY_TYPE))
            if key in plan.calls.by_signature:
                known: CallCost = plan.calls.by_signature[key].cost
                return known
            if plan.is_shared and (plan.func, key) in self._own_costs:
                return self._own_costs[plan.func, key]
        except (TypeError, RuntimeError) as error:  # not hashable, or without a shape or strides
            if is_of_signal_handler(error):
                raise
            key = None
            thread.param_sink.update(
                id(t) for t in tensors_in((args, kwargs)) if isinstance(t, _Parameter)
            )
        cost = cost_of_call(plan.name, plan.func, plan.rule, args, kwargs, out, self.conventions)
        if self._signatures >= _LIMIT and not self.higher_order.deferring:
            self._forget_signatures()
        self._signatures += 1
        if key is not None and plan.rule.cacheable:
            if not plan.is_shared:
                plan.calls.by_signature[key] = KnownCall(cost=cost)
            elif not SHARED_PLANS.add_cost(plan, key, cost):
                self._own_costs[plan.func, key] = cost
        return cost

    def _forget_signatures(self) -> None:
        for plan in list(self._plans.values()):
            plan.calls.clear()
        self._own_costs.clear()
        self._signatures = 0
        self._on_full()
