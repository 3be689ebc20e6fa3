"""Higher-order operators: the functions given to them run under the mode, so what runs counts.

A handler is called as ``handler(mode, op, args, kwargs)`` with the mode off, in place of the
operator, and returns its result. What the operator itself does between the functions' calls
(stacking, slicing) is no arithmetic. An operator without a handler runs as it is and is listed
as unknown; one with a formula needs no handler.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch._C import DispatchKey  # type: ignore[attr-defined]
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor

Body = Callable[..., Any]


class Tally(Protocol):
    """Calls that were counted, and not booked."""

    def flops(self) -> int: ...

    def book(self, times: int = 1) -> None: ...


class Mode(Protocol):
    """What handlers need of the counting mode."""

    def under(self, body: Body) -> Body:
        """``body``, counted."""

    def set_aside(self) -> AbstractContextManager[Tally]:
        """What is counted inside goes into a tally, not into the books."""

    def book_unknown(self, name: str, error: str) -> None:
        """An operator ran whose cost is not known."""

    def book_kernel(self, kernel: Any, kwargs: dict[str, Any], out: Any) -> None:
        """A user's kernel ran; its formula, if there is one, is called with its arguments."""

    def note(self, text: str) -> None:
        """What the reader of the profile should know."""


Handler = Callable[[Mode, HigherOrderOperator, tuple[Any, ...], dict[str, Any]], Any]


def has_no_data(value: Any) -> bool:
    """True for tensors that have a shape and nothing else."""
    return isinstance(value, torch.Tensor) and (value.is_meta or isinstance(value, FakeTensor))


# -- operators that call the functions given to them -------------------------------------------


def _counting(*positions: int) -> Handler:
    """The operator itself, with the functions at these positions counted."""

    def handler(mode: Mode, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counted = list(args)
        for position in positions:
            counted[position] = mode.under(args[position])
        return op(*counted, **kwargs)

    return handler


def _inlined(call: Body) -> Handler:
    """``call``, counted, in place of an operator that does nothing beside it."""

    def handler(mode: Mode, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return mode.under(call)(*args, **kwargs)

    return handler


def _by_its_own_kernel(mode: Mode, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator's own implementation, all of it counted."""
    return mode.under(op.py_kernels[DispatchKey.CompositeExplicitAutograd])(*args, **kwargs)


def _invoke_subgraph(subgraph: Body, _identifier: Any, *operands: Any) -> Any:
    if getattr(subgraph, "_boxed_call", False):
        return subgraph(list(operands))
    return subgraph(*operands)


def _quantised(subgraph: Body, *operands: Any, **_options: Any) -> Any:
    return subgraph(*operands)


# -- control flow --------------------------------------------------------------------------------


def _cond(mode: Mode, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The branch taken; where the predicate has no data, the costlier of the two."""
    pred, on_true, on_false, operands = args
    if not has_no_data(pred):
        return op(pred, mode.under(on_true), mode.under(on_false), operands)
    tallies: list[Tally] = []

    def aside(branch: Body) -> Body:
        def run(*values: Any) -> Any:
            with mode.set_aside() as tally:
                out = mode.under(branch)(*values)
            tallies.append(tally)
            return out

        return run

    if isinstance(pred, FakeTensor):
        out = op(pred, aside(on_true), aside(on_false), operands)  # runs both to compare them
    else:
        out = aside(on_true)(*operands)
        aside(on_false)(*operands)
    max(tallies, key=lambda tally: tally.flops()).book()
    mode.note("cond without data: the costlier branch is counted")
    return out


def _while_loop(mode: Mode, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every turn; where the condition has no data, one turn, as a lower bound."""
    condition, body, carried, additional = args[:4]
    values = (*carried, *additional)
    if not any(has_no_data(value) for value in values):
        return op(mode.under(condition), mode.under(body), *args[2:], **kwargs)
    mode.book_unknown(
        "higher_order.while_loop", "the number of turns needs data: one turn is counted"
    )
    if any(isinstance(value, FakeTensor) for value in values):
        mode.under(condition)(*values)
        return op(condition, mode.under(body), *args[2:], **kwargs)
    mode.under(condition)(*values)
    out = mode.under(body)(*values)
    return _stacked_once(out) if "stack" in op.name() else out


def _stacked_once(values: Any) -> tuple[Any, ...]:
    return tuple(v.unsqueeze(0) if isinstance(v, torch.Tensor) else v for v in values)


def _repeated(find_lengths: Callable[..., int]) -> Handler:
    """Every turn of scan and map; fakes run one turn, which is counted as often as it stands for."""

    def handler(mode: Mode, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        body = args[0]
        lists = [value for value in args[1:] if isinstance(value, (list, tuple))]
        if not any(isinstance(value, FakeTensor) for values in lists for value in values):
            return op(mode.under(body), *args[1:], **kwargs)
        with mode.set_aside() as tally:
            out = op(mode.under(body), *args[1:], **kwargs)
        tally.book(find_lengths(*args[1:]))
        return out

    return handler


def _scan_length(_init: Any, xs: Any, *_: Any) -> int:
    return int(xs[0].shape[0])


def _map_length(xs: Any, *_: Any) -> int:
    return int(xs[0].shape[0])


# -- Triton ---------------------------------------------------------------------------------------


def _triton_kernel(mode: Mode, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A Triton kernel is priced by the formula registered on it, called with its arguments by name.

    The formula also gets ``grid``, the programs launched.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    out = op(*args, **kwargs)
    kernel = kernel_side_table.get_kernel(kwargs["kernel_idx"])
    constants = kernel_side_table.get_constant_args(kwargs["constant_args_idx"])
    mode.book_kernel(kernel, {**constants, **kwargs["kwargs"], "grid": kwargs["grid"]}, out)
    return out


HANDLERS: dict[str, Handler] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "while_loop_stack_output": _while_loop,
    "scan": _repeated(_scan_length),
    "map_impl": _repeated(_map_length),
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
