"""Strategies for operators that are not simply run and recorded."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.counting.plans import Plan, Strategy
from dispatch_flops.operators.communication import is_communication
from dispatch_flops.operators.composites import is_composite
from dispatch_flops.operators.registry import Rule
from dispatch_flops.operators.tensors import tensors_in

_TIMES_NUMBER = torch.ops.aten.mul.Scalar
# torch infers the shape of a sum or product with a zero tangent by these, on the meta device,
# while the mode is on.
_SHAPES_OF_ZEROS = frozenset(("prims.add.default", "prims.mul.default", "prims.div.default"))
# Kernels that run whole layers; those of composite operators and of libraries are told apart.
_RUNS_OPERATORS = frozenset(
    ("aten._transformer_encoder_layer_fwd.default", "aten._native_multi_head_attention.default")
)


class Mode(Protocol):
    """Dispatch mode that counts, as strategies use it; a ``with`` block enters it again."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...

    def run_and_record(self, plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operator and record its cost; return its result."""

    def communicate(self, plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a communication operator; record its cost and what it sends; return its result."""

    def handle_higher_order(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator by its handler."""


def strategy_for(func: OpOverload, rule: Rule | None) -> Strategy | None:
    """Return the strategy for an operator of that rule; None: it is run and recorded."""
    if is_communication(func) or func.namespace == "fsdp":
        return communicate
    if rule is not None and not rule.is_recorded:
        return call_through
    if (rule is None or rule.builtin) and is_composite(func):
        return decompose
    if func is _TIMES_NUMBER:
        return multiply
    if str(func) in _SHAPES_OF_ZEROS:
        return infer_shape
    return None


def runs_operators(func: OpOverload) -> bool:
    """Return True if the operator's kernel may run other operators, which autocast may cast."""
    if func.is_view:  # most of them have no kernel of a device's own, and run nothing
        return False
    name = func.name()
    return (
        str(func) in _RUNS_OPERATORS
        or func.namespace not in ("aten", "prim", "prims")
        or _torch.has_kernel(name, "CompositeExplicitAutograd")
        or not any(_torch.has_kernel(name, key) for key in ("CPU", "CUDA"))
    )


def call_through(mode: Mode, plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Answer a question about a tensor's metadata; such calls are not recorded."""
    return plan.func(*args, **kwargs)


def communicate(mode: Mode, plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator that sends or receives, or packs what FSDP2 sends."""
    return mode.communicate(plan, args, kwargs)


def decompose(mode: Mode, plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run the operators that a composite operator consists of under the mode."""
    if not _has_nested_kernel(plan.func, args, kwargs):
        with mode:
            out = plan.parts(*args, **kwargs)
        if out is not NotImplemented:
            return out
    return mode.run_and_record(plan, args, kwargs)


def multiply(mode: Mode, plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Multiply a tensor by a number; the product with a zero tangent computes nothing."""
    tensor, number = args
    if not tensor._is_zerotensor():
        return mode.run_and_record(plan, args, kwargs)
    # Below a mode torch recurses infinitely in this call.
    return _torch.efficient_zeros(
        tensor.shape, dtype=torch.result_type(tensor, number), device=tensor.device
    )


def infer_shape(mode: Mode, plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator by which torch infers the shape of a zero tangent: it computes nothing."""
    if all(tensor.is_meta for tensor in tensors_in(args)):
        return plan.func(*args)
    return mode.run_and_record(plan, args, kwargs)


def handle_higher_order(mode: Mode, plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a higher-order operator so that the functions given to it are counted."""
    return mode.handle_higher_order(plan.func, args, kwargs)


def _has_nested_kernel(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Return True if a nested tensor takes part and the operator has a kernel for it."""
    if not any(t.is_nested for t in tensors_in((args, kwargs))):
        return False
    keys = ("NestedTensorCPU", "NestedTensorCUDA")
    return any(_torch.has_kernel(func.name(), key) for key in keys)
