"""Count the functions that higher-order operators such as ``torch.cond`` and ``scan`` run.

A handler is called as ``handler(context, op, args, kwargs)`` in place of the operator, with the
mode off, and returns the operator's result. It runs the functions under the mode. What the
operator does between them (stacking, slicing) is not arithmetic. An operator without a handler
runs as it is and is listed as unknown; one with a formula needs no handler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import DispatchKey, FakeTensor, HigherOrderOperator, TorchDispatchMode
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.operators import registry
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost, cost_of_call
from dispatch_flops.operators.operator_keys import name_of
from dispatch_flops.operators.registry import Rule
from dispatch_flops.operators.tensors import has_no_data

Body = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class DeferredCalls:
    """Calls that are recorded once it is known how often they count."""

    def __init__(self) -> None:
        self._calls: list[tuple[ModulePhase, CallCost, int]] = []

    def take(self, module_phase: ModulePhase) -> None:
        """Add the calls that are recorded there."""
        self._calls += [(module_phase, cost, calls) for cost, calls in module_phase.counts.items()]

    def flops(self) -> int:
        """Return the FLOPs of all calls, each counted once."""
        return sum(
            calls * cost.flops
            for module_phase, call_cost, calls in self._calls
            for _, _, cost in call_cost.parts(module_phase.phase)
        )

    def unknown(self) -> set[str]:
        """Return the names of the operators whose cost is not known."""
        return {cost.op for _, cost, _ in self._calls if cost.cost is None}

    def record(self, times: int = 1) -> None:
        """Record every call ``times`` times."""
        for module_phase, cost, calls in self._calls:
            module_phase.counts[cost] += calls * times


@dataclass(slots=True)
class HigherOrderState:
    """What the higher-order operators of a run leave behind.

    deferring: blocks of ``HigherOrderContext.defer`` that are open. notes: for the profile.
    before_call: called before each operator that runs functions.
    """

    deferring: int = 0
    notes: dict[str, None] = field(default_factory=dict)
    before_call: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class HigherOrderContext:
    """What the handler of one higher-order operator call works with."""

    mode: TorchDispatchMode
    tracker: Tracker
    conventions: Conventions
    own_rules: Mapping[Any, Rule]
    state: HigherOrderState

    def counted(self, body: Body) -> Body:
        """Return ``body`` so that its operators are counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.tracker.subgraph_depth += 1
            try:
                with self.mode:
                    return body(*args, **kwargs)
            finally:
                self.tracker.subgraph_depth -= 1

        return run

    def note(self, text: str) -> None:
        """Add a note to the profile, once."""
        self.state.notes[text] = None

    @contextmanager
    def defer(self) -> Iterator[DeferredCalls]:
        """Collect the calls that this thread makes in the block instead of recording them."""
        thread = self.tracker.join_thread()
        saved = {found: found.counts for found in thread.module_phases.values()}
        for module_phase in saved:
            module_phase.counts = defaultdict(int)
        deferred = DeferredCalls()
        self.state.deferring += 1
        try:
            yield deferred
        finally:
            self.state.deferring -= 1
            for module_phase in thread.module_phases.values():
                deferred.take(module_phase)
                module_phase.counts = saved.get(module_phase) or defaultdict(int)

    def record_unknown(self, name: str, error: str) -> None:
        """Record a call of an operator whose cost is not known."""
        self._record(CallCost(name, "unknown", error=error))

    def record_kernel(self, kernel: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Record a launch of a user's kernel; its formula is called with the kernel's arguments."""
        inner = getattr(kernel, "fn", kernel)  # what an autotuner wraps
        rule = self._rule_of(kernel) or self._rule_of(inner)
        name = f"triton.{getattr(kernel, '__name__', None) or name_of(inner)}"
        if rule is None:
            self._record(CallCost(name, "unknown"))
        else:
            self._record(cost_of_call(name, kernel, rule, (), kwargs, out, self.conventions))

    def _rule_of(self, kernel: Any) -> Rule | None:
        return registry.lookup(kernel, self.own_rules, home=self.tracker.home_thread)

    def _record(self, cost: CallCost) -> None:
        self.tracker.here().counts[cost] += 1


Handler = Callable[[HigherOrderContext, HigherOrderOperator, Args, Kwargs], Any]


# -- operators that call the functions given to them -------------------------------------------


def _counting(*positions: int) -> Handler:
    """Run the operator, and count the functions at these positions of its arguments."""

    def handler(context: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
        counted = list(args)
        for position in positions:
            counted[position] = context.counted(args[position])
        return op(*counted, **kwargs)

    return handler


def _inlined(call: Body) -> Handler:
    """Run ``call`` and count it, for an operator that does nothing else."""

    def handler(context: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
        return context.counted(call)(*args, **kwargs)

    return handler


def _by_its_own_kernel(context: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run the operator's own implementation and count all of it."""
    return context.counted(op.py_kernels[DispatchKey.CompositeExplicitAutograd])(*args, **kwargs)


def _invoke_subgraph(subgraph: Body, _identifier: Any, *operands: Any) -> Any:
    if getattr(subgraph, "_boxed_call", False):
        return subgraph(list(operands))
    return subgraph(*operands)


def _quantised(subgraph: Body, *operands: Any, **_options: Any) -> Any:
    return subgraph(*operands)


# -- control flow --------------------------------------------------------------------------------


def _cond(context: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Count the branch taken; without data in the predicate, the branch with more FLOPs."""
    pred, on_true, on_false, operands = args
    if not has_no_data(pred):
        return op(pred, context.counted(on_true), context.counted(on_false), operands)
    branches: list[DeferredCalls] = []

    def deferred(branch: Body) -> Body:
        def run(*values: Any) -> Any:
            with context.defer() as calls:
                out = context.counted(branch)(*values)
            branches.append(calls)
            return out

        return run

    if isinstance(pred, FakeTensor):
        out = op(pred, deferred(on_true), deferred(on_false), operands)  # runs both
    else:
        out = deferred(on_true)(*operands)
        deferred(on_false)(*operands)
    counted = max(branches, key=DeferredCalls.flops)
    counted.record()
    others = [branch for branch in branches if branch is not counted]
    unknown = {name for branch in others for name in branch.unknown()}
    if unknown:
        names = ", ".join(sorted(unknown))
        context.record_unknown(
            name_of(op), f"the branch that is not counted runs {names}, whose cost is not known"
        )
    context.note("cond without data: the costlier branch is counted")
    return out


def _while_loop(context: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Count every iteration; without data in the condition one, which is a lower bound."""
    condition, body, carried, additional = args[:4]
    values = (*carried, *additional)
    if not any(has_no_data(value) for value in values):
        return op(context.counted(condition), context.counted(body), *args[2:], **kwargs)
    context.record_unknown(
        "higher_order.while_loop",
        "the number of iterations depends on data: one iteration is counted",
    )
    context.counted(condition)(*values)
    if any(isinstance(value, FakeTensor) for value in values):
        return op(condition, context.counted(body), *args[2:], **kwargs)
    out = context.counted(body)(*values)
    return _stacked_once(out) if "stack" in op.name() else out


def _stacked_once(values: Any) -> tuple[Any, ...]:
    return tuple(v.unsqueeze(0) if isinstance(v, torch.Tensor) else v for v in values)


def _repeated(position: int) -> Handler:
    """Count every iteration of scan and map over the tensors at that position.

    Fake tensors run one iteration, which counts as many times as it stands for.
    """

    def handler(context: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
        body = args[0]
        lists = [value for value in args[1:] if isinstance(value, (list, tuple))]
        if not any(isinstance(value, FakeTensor) for values in lists for value in values):
            return op(context.counted(body), *args[1:], **kwargs)
        with context.defer() as deferred:
            out = op(context.counted(body), *args[1:], **kwargs)
        deferred.record(int(args[position][0].shape[0]))
        return out

    return handler


# -- Triton ---------------------------------------------------------------------------------------


def _triton_kernel(context: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Count a Triton kernel by the formula registered on it.

    The formula is called with the kernel's arguments by name, and with ``grid``, the number of
    programs launched.
    """
    out = op(*args, **kwargs)
    kernels = _torch.triton_kernels()
    kernel = kernels.get_kernel(kwargs["kernel_idx"])
    constants = kernels.get_constant_args(kwargs["constant_args_idx"])
    context.record_kernel(kernel, {**constants, **kwargs["kwargs"], "grid": kwargs["grid"]}, out)
    return out


HANDLERS: dict[str, Handler] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "while_loop_stack_output": _while_loop,
    "scan": _repeated(2),
    "map_impl": _repeated(1),
    "associative_scan": _by_its_own_kernel,
    "out_dtype": _by_its_own_kernel,
    "auto_functionalized": _by_its_own_kernel,
    "auto_functionalized_v2": _by_its_own_kernel,
    "with_effects": _by_its_own_kernel,
    "run_and_save_rng_state": _counting(0),
    "run_with_rng_state": _counting(1),
    "graphsafe_run_with_rng_state": _counting(0),
    "run_dtensor_rng_op": _counting(2),
    "invoke_subgraph": _inlined(_invoke_subgraph),
    "invoke_quant": _inlined(_quantised),
    "invoke_quant_packed": _inlined(_quantised),
    "strict_mode": _inlined(lambda body, operands: body(*operands)),
    "hints_wrapper": _inlined(lambda body, args, kwargs, _hints: body(*args, **kwargs)),
    "local_map_hop": _inlined(lambda body, *args, **kwargs: body(*args, **kwargs)),
    "foreach_map": _inlined(lambda body, *args, **kwargs: body(*args, **kwargs)),
    "run_const_graph": _inlined(lambda graph, args: graph(*args)),
    "triton_kernel_wrapper_mutation": _triton_kernel,
    "triton_kernel_wrapper_functional": _triton_kernel,
}
