"""The dispatch mode: every operator that really runs, seen once, priced and booked.

Never raises into the user's run, never keeps a tensor. What an overload needs is decided once,
in ``_decide``; afterwards a call costs one look-up by signature and one increment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import HigherOrderOperator, NestedTensor, OpOverload, TorchDispatchMode
from dispatch_flops.counting import meta_tensors
from dispatch_flops.counting.higher_order import HANDLERS, Handler, HigherOrderContext
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.signatures import all_strided, call_signature, signature_of
from dispatch_flops.counting.tensor_subclasses import in_sharding_propagation, is_traced, is_wrapper
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.operators import registry
from dispatch_flops.operators.composites import is_composite
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost, cost_of_call
from dispatch_flops.operators.registry import Rule
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.profile.cost import ZERO

_sequence_nr = _torch.sequence_nr
_graph_task = _torch.graph_task_id
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_TIMES_NUMBER = torch.ops.aten.mul.Scalar
# torch finds the shape of a sum or product with a tangent that is all zero by these, on the meta
# device, while the mode is on.
_SHAPES_OF_ZEROS = frozenset(("prims.add.default", "prims.mul.default", "prims.div.default"))
_LIMIT = 8192  # signatures kept before the books are folded


@dataclass(slots=True, eq=False)
class Plan:
    """What is to be done when one overload reaches the mode.

    call: runs it. special: needs more than being run and booked (see ``_special``).
    fixed: the entry of every call, where signatures make no difference.
    """

    func: Any
    name: str
    call: Callable[..., Any]
    rule: Rule | None
    fixed: CallCost | None = None
    cache: dict[Any, CallCost] = field(default_factory=dict)
    special: bool = False
    metadata: bool = False
    of_zeros: bool = False
    composite: bool = False
    reads_data: bool = False
    handler: Handler | None = None


class _Wrapper(threading.local):
    """Where a thread is at operators on wrapper subclasses: how deep, and which is handed over."""

    depth = 0
    desugaring: Any = None


class CountingMode(TorchDispatchMode):
    """Books every operator under the place that ``tracker`` names.

    on_full: called when many signatures have been met, to fold the books.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        tracker: Tracker,
        conventions: Conventions,
        own_rules: Mapping[Any, Rule],
        on_full: Callable[[], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.times_operators = False  # of the instance: asked at every operator, and found sooner
        self._tracker = tracker
        self._local = tracker.local
        self._conventions = conventions
        self._own_rules = own_rules
        self._on_full = on_full
        self._plans: dict[Any, Plan] = {}
        registry.watch(self)
        self._signatures = 0
        self._plain_types: set[tuple[type, ...]] = set()
        self._wrapper = _Wrapper()
        self.higher_order = HigherOrderContext(self, tracker, conventions, own_rules)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps __torch_dispatch__ so that torch._dynamo is imported on the first
        # operator. The stance that the counter sets does what that wrapper is for.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Else torch.compile, where the stance lets it work at all, gives its code up for good.
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plan = self._plans.get(func)
        if plan is None:
            plan = self._decide(func)
        if plan.special or (types and (self._wrapper.depth or types not in self._plain_types)):
            done, out = self._special(plan, types, args, kwargs or {})
            if done:
                return out
        else:
            out = plan.call(*args, **kwargs) if kwargs else plan.call(*args)
        try:
            thread = self._local.thread
        except AttributeError:
            thread = self._tracker.join_thread()
        entry = plan.fixed
        if entry is None:
            try:
                # Written out for the commonest call: two tensors, as in every residual and product.
                if (
                    len(args) == 2
                    and not kwargs
                    and (a := args[0]).__class__ is _Tensor
                    and (b := args[1]).__class__ is _Tensor
                ):
                    key: Any = (a.shape, a.dtype, a.layout, b.shape, b.dtype, b.layout)
                else:
                    key = call_signature(args, kwargs, thread.param_sink)
                entry = plan.cache[key]
            except KeyError:
                entry = self._price(plan, key, args, kwargs or {}, out)
            except (TypeError, RuntimeError):  # no hash, or (nested tensors) no shape
                entry = self._price(plan, None, args, kwargs or {}, out)
        elif args and args[0].__class__ is _Parameter:
            thread.param_sink.add(id(args[0]))
        task = _graph_task()
        place = thread.current
        if task != -1 or place is None:
            place = self._tracker.locate(thread, task)
        place.counts[entry] += 1
        if self.times_operators:
            self._book_time(place, entry)
        thread.last_seq = _sequence_nr()
        return out

    def _book_time(self, place: ModulePhase, entry: CallCost) -> None:
        """Book the time of the operator that just ran, where it is taken."""

    def leave(self) -> None:
        """Leave, also from under modes that were entered later: they stay.

        ``TorchDispatchMode.__exit__`` takes off whichever mode is on top.
        """
        stack = _torch.modes_in_force()
        place = next(i for i, mode in enumerate(stack) if mode is self)
        above = stack[place + 1 :]
        for mode in reversed(above):
            TorchDispatchMode.__exit__(mode, None, None, None)
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for mode in above:
            TorchDispatchMode.__enter__(mode)

    # -- deciding -------------------------------------------------------------------------------

    def rules_changed(self) -> None:
        """Rules were added or removed: plans have to be made anew."""
        self._plans.clear()

    def _decide(self, func: Any) -> Plan:
        """The plan of an overload met for the first time."""
        if isinstance(func, HigherOrderOperator):
            plan = self._plan_higher_order(func)
        else:
            plan = self._plan_operator(func)
        self._plans[func] = plan
        return plan

    def _plan_operator(self, func: OpOverload) -> Plan:
        rule = registry.lookup(func, self._own_rules)
        plan = Plan(func, str(func), meta_tensors.kernel(func), rule)
        plan.metadata = rule is not None and not rule.is_recorded
        if rule is None or rule.builtin:
            plan.composite = is_composite(func)
        plan.reads_data = meta_tensors.reads_data(func)
        plan.of_zeros = func is _TIMES_NUMBER or plan.name in _SHAPES_OF_ZEROS
        plan.special = plan.metadata or plan.composite or plan.reads_data or plan.of_zeros
        if rule is None:
            plan.fixed = CallCost(plan.name, "unknown")
        elif rule.kind == "free" and (func.is_view or not rule.moves):
            plan.fixed = CallCost(plan.name, "free", None, ZERO)
        return plan

    def _plan_higher_order(self, func: HigherOrderOperator) -> Plan:
        rule = registry.lookup(func, self._own_rules)
        plan = Plan(func, registry.name_of(func), func, rule)
        plan.handler = HANDLERS.get(func.name()) if plan.rule is None else None
        plan.special = True
        if plan.rule is None:
            plan.fixed = CallCost(plan.name, "unknown")
        return plan

    # -- everything that is not an operator on plain tensors ---------------------------------------

    def _special(
        self, plan: Plan, types: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Runs the call; (True, result) if nothing is left to book."""
        func = plan.func
        if plan.metadata:
            return True, func(*args, **kwargs)
        if types and not self._are_plain(types):
            if is_traced(types):
                return True, func(*args, **kwargs)
            return self._on_wrapper(plan, types, args, kwargs)
        if self._wrapper.depth and types and in_sharding_propagation():
            return True, func(*args, **kwargs)
        if plan.handler is not None:
            return True, plan.handler(self.higher_order, func, args, kwargs)
        if plan.composite and not _has_nested_kernel(func, args, kwargs):
            with self:
                out = _torch.run_taken_apart(func, args, kwargs)
            if out is not NotImplemented:
                return True, out
        if plan.of_zeros and (zeros := _of_zeros(func, args)) is not None:
            return True, zeros
        if plan.reads_data:
            return False, meta_tensors.run(
                plan.call, func, args, kwargs, self._conventions.meta_value
            )
        return False, plan.call(*args, **kwargs)

    def _are_plain(self, types: tuple[type, ...]) -> bool:
        if types in self._plain_types:
            return True
        plain = not is_wrapper(types)
        if plain:
            self._plain_types.add(types)
        return plain

    def _on_wrapper(
        self, plan: Plan, types: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """A wrapper subclass runs on tensors of its own: those operators are what counts,
        unless the user asks for the logical one.

        The subclass sees the operator because this mode, entered again, steps aside for it.
        """
        func = plan.func
        logical = self._conventions.subclass == "logical" and not _is_nested(types)
        self._tracker.join_thread().param_sink.update(
            id(t) for t in tensors_in((args, kwargs)) if isinstance(t, _Parameter)
        )
        if plan.rule is not None and not plan.rule.builtin:
            return False, plan.call(*args, **kwargs)
        if self._wrapper.desugaring is func:
            self._wrapper.desugaring = None
            return True, NotImplemented
        if plan.composite and not _is_nested(types):
            with self:
                out = _torch.run_taken_apart(func, args, kwargs)
            if out is not NotImplemented:
                return True, out
        if logical:
            return False, plan.call(*args, **kwargs)
        self._wrapper.depth += 1
        self._wrapper.desugaring = func
        try:
            with self:
                return True, func(*args, **kwargs)
        finally:
            self._wrapper.depth -= 1
            self._wrapper.desugaring = None

    # -- pricing ----------------------------------------------------------------------------------

    def _price(self, plan: Plan, key: Any, args: Any, kwargs: dict[str, Any], out: Any) -> CallCost:
        rule = plan.rule
        assert rule is not None
        if plan.reads_data and key is not None:
            # What it read and wrote hangs on how large its result is: such a key is never asked
            # for without that, so that every call comes here.
            key = (key, signature_of(out, set()))
            if key in plan.cache:
                return plan.cache[key]
        entry = cost_of_call(plan.name, plan.func, rule, args, kwargs, out, self._conventions)
        if self._signatures >= _LIMIT and not self.higher_order.aside:
            self._forget_signatures()
        self._signatures += 1
        if key is not None and rule.cacheable and all_strided(args, kwargs):
            plan.cache[key] = entry
        return entry

    def _forget_signatures(self) -> None:
        for plan in list(self._plans.values()):
            plan.cache.clear()
        self._signatures = 0
        self._on_full()


def _has_nested_kernel(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """True if a nested tensor takes part and the operator has a kernel for it."""
    if not any(t.is_nested for t in tensors_in((args, kwargs))):
        return False
    has_kernel = _torch.has_kernel
    return any(has_kernel(func.name(), key) for key in ("NestedTensorCPU", "NestedTensorCUDA"))


def _of_zeros(func: OpOverload, args: Any) -> torch.Tensor | None:
    """The result of a call that forward-mode differentiation makes with tangents that are zero
    throughout, and that computes nothing; None for any other call.
    """
    if func is not _TIMES_NUMBER:
        out: torch.Tensor | None = func(*args) if all(t.is_meta for t in tensors_in(args)) else None
        return out
    zeros, number = args
    if not zeros._is_zerotensor():
        return None
    # Below a mode torch itself dies of this call: it hands it on to itself without end.
    return _torch.efficient_zeros(
        zeros.shape, dtype=torch.result_type(zeros, number), device=zeros.device
    )


def _is_nested(types: tuple[type, ...]) -> bool:
    return any(issubclass(cls, NestedTensor) for cls in types)
