"""Higher-order operators: the functions given to them run under the mode, so what runs counts.

A handler is called as ``handler(host, op, args, kwargs)`` with the mode off, in place of the
operator, and returns its result. What the operator itself does between the functions' calls
(stacking, slicing) is no arithmetic. An operator without a handler runs as it is and is listed
as unknown; one with a formula needs no handler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import DispatchKey, FakeTensor, HigherOrderOperator, TorchDispatchMode
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.operators import registry
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost, cost_of_call
from dispatch_flops.operators.registry import Rule
from dispatch_flops.operators.tensors import has_no_data

Body = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Tally:
    """Calls held back until it is known how often they count."""

    def __init__(self) -> None:
        self._calls: list[tuple[ModulePhase, CallCost, int]] = []

    def take(self, place: ModulePhase) -> None:
        self._calls += [(place, entry, calls) for entry, calls in place.counts.items()]

    def flops(self) -> int:
        return sum(
            calls * cost.flops
            for place, entry, calls in self._calls
            for _, _, cost in entry.parts(place.phase)
        )

    def book(self, times: int = 1) -> None:
        for place, entry, calls in self._calls:
            place.counts[entry] += calls * times


class HigherOrderContext:
    """What handlers need of the counting host.

    aside: tallies that are being taken just now. notes: what the profile's reader should know.
    """

    def __init__(
        self,
        mode: TorchDispatchMode,
        tracker: Tracker,
        conventions: Conventions,
        own_rules: Mapping[Any, Rule],
    ) -> None:
        self.aside = 0
        self.notes: dict[str, None] = {}
        self._mode = mode
        self._tracker = tracker
        self._conventions = conventions
        self._own_rules = own_rules

    def under(self, body: Body) -> Body:
        """``body``, counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._tracker.in_bodies += 1
            try:
                with self._mode:
                    return body(*args, **kwargs)
            finally:
                self._tracker.in_bodies -= 1

        return counted

    @contextmanager
    def set_aside(self) -> Iterator[Tally]:
        """What this thread counts inside goes into a tally, not into the books."""
        thread = self._tracker.join_thread()
        saved = {place: place.counts for place in thread.places.values()}
        for place in saved:
            place.counts = defaultdict(int)
        tally = Tally()
        self.aside += 1
        try:
            yield tally
        finally:
            self.aside -= 1
            for place in thread.places.values():
                tally.take(place)
                place.counts = saved.get(place) or defaultdict(int)

    def book_unknown(self, name: str, error: str) -> None:
        """An operator ran whose cost is not known."""
        self._book(CallCost(name, "unknown", error=error))

    def book_kernel(self, kernel: Any, kwargs: dict[str, Any], out: Any) -> None:
        """A user's kernel ran; its formula, if there is one, is called with its arguments."""
        inner = getattr(kernel, "fn", kernel)  # what an autotuner wraps
        rule = registry.lookup(kernel, self._own_rules) or registry.lookup(inner, self._own_rules)
        name = f"triton.{getattr(kernel, '__name__', None) or registry.name_of(inner)}"
        if rule is None:
            self._book(CallCost(name, "unknown"))
        else:
            self._book(cost_of_call(name, kernel, rule, (), kwargs, out, self._conventions))

    def _book(self, entry: CallCost) -> None:
        self._tracker.here().counts[entry] += 1


Handler = Callable[[HigherOrderContext, HigherOrderOperator, Args, Kwargs], Any]


# -- operators that call the functions given to them -------------------------------------------


def _counting(*positions: int) -> Handler:
    """The operator itself, with the functions at these positions counted."""

    def handler(host: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
        counted = list(args)
        for position in positions:
            counted[position] = host.under(args[position])
        return op(*counted, **kwargs)

    return handler


def _inlined(call: Body) -> Handler:
    """``call``, counted, in place of an operator that does nothing beside it."""

    def handler(host: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
        return host.under(call)(*args, **kwargs)

    return handler


def _by_its_own_kernel(host: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
    """The operator's own implementation, all of it counted."""
    return host.under(op.py_kernels[DispatchKey.CompositeExplicitAutograd])(*args, **kwargs)


def _invoke_subgraph(subgraph: Body, _identifier: Any, *operands: Any) -> Any:
    if getattr(subgraph, "_boxed_call", False):
        return subgraph(list(operands))
    return subgraph(*operands)


def _quantised(subgraph: Body, *operands: Any, **_options: Any) -> Any:
    return subgraph(*operands)


# -- control flow --------------------------------------------------------------------------------


def _cond(host: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
    """The branch taken; where the predicate has no data, the costlier of the two."""
    pred, on_true, on_false, operands = args
    if not has_no_data(pred):
        return op(pred, host.under(on_true), host.under(on_false), operands)
    tallies: list[Tally] = []

    def aside(branch: Body) -> Body:
        def run(*values: Any) -> Any:
            with host.set_aside() as tally:
                out = host.under(branch)(*values)
            tallies.append(tally)
            return out

        return run

    if isinstance(pred, FakeTensor):
        out = op(pred, aside(on_true), aside(on_false), operands)  # runs both to compare them
    else:
        out = aside(on_true)(*operands)
        aside(on_false)(*operands)
    max(tallies, key=lambda tally: tally.flops()).book()
    host.notes["cond without data: the costlier branch is counted"] = None
    return out


def _while_loop(host: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Every turn; where the condition has no data, one turn, as a lower bound."""
    condition, body, carried, additional = args[:4]
    values = (*carried, *additional)
    if not any(has_no_data(value) for value in values):
        return op(host.under(condition), host.under(body), *args[2:], **kwargs)
    host.book_unknown(
        "higher_order.while_loop", "the number of turns needs data: one turn is counted"
    )
    if any(isinstance(value, FakeTensor) for value in values):
        host.under(condition)(*values)
        return op(condition, host.under(body), *args[2:], **kwargs)
    host.under(condition)(*values)
    out = host.under(body)(*values)
    return _stacked_once(out) if "stack" in op.name() else out


def _stacked_once(values: Any) -> tuple[Any, ...]:
    return tuple(v.unsqueeze(0) if isinstance(v, torch.Tensor) else v for v in values)


def _repeated(position: int) -> Handler:
    """Every turn of scan and map, over the tensors at that position; fakes run one turn, which is
    counted as often as it stands for.
    """

    def handler(host: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
        body = args[0]
        lists = [value for value in args[1:] if isinstance(value, (list, tuple))]
        if not any(isinstance(value, FakeTensor) for values in lists for value in values):
            return op(host.under(body), *args[1:], **kwargs)
        with host.set_aside() as tally:
            out = op(host.under(body), *args[1:], **kwargs)
        tally.book(int(args[position][0].shape[0]))
        return out

    return handler


# -- Triton ---------------------------------------------------------------------------------------


def _triton_kernel(host: HigherOrderContext, op: Any, args: Args, kwargs: Kwargs) -> Any:
    """A Triton kernel is priced by the formula registered on it, called with its arguments by name.

    The formula also gets ``grid``, the programs launched.
    """
    out = op(*args, **kwargs)
    kernels = _torch.triton_kernels()
    kernel = kernels.get_kernel(kwargs["kernel_idx"])
    constants = kernels.get_constant_args(kwargs["constant_args_idx"])
    host.book_kernel(kernel, {**constants, **kwargs["kwargs"], "grid": kwargs["grid"]}, out)
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
