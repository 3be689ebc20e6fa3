"""Operators that touch less, or other memory, than all of their arguments and results.

By default an operator reads its arguments and writes its results. A declaration says which memory
a call touches instead; it changes no MAC and no FLOP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.operators.operator_keys import find

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a call differs from reading all of its arguments and writing its results.

    unread: names of arguments that are not read.
    picked: bytes read of arguments that are read only in part; each one is also in ``unread``.
    written: tensors that are written in place besides the results.
    unneeded: results that the call does not ask for, whatever the kernel returns in their place.
    kept: bytes of the results that keep what they held.
    """

    unread: Iterable[str] = ()
    picked: int = 0
    written: tuple[Any, ...] = ()
    unneeded: tuple[Any, ...] = ()
    kept: int = 0


Declaration = Callable[[Arguments, Any], Access | None]
_DECLARED: dict[Any, Declaration] = {}
_STATES_BYTES = "states_bytes"
F = TypeVar("F", bound=Callable[..., Any])


def declare_access(targets: Iterable[Any]) -> Callable[[Declaration], Declaration]:
    """Declare what the operators in ``targets`` touch by the decorated function.

    targets: names as the registry's keys, such as "lib::op".

    It is called with the arguments by their names in the schema (None where a call omits one
    without a default) and the result, and returns an ``Access``, or None for a call that touches
    all. In-place variants share the declaration of the functional operator.
    """

    def decorate(declaration: Declaration) -> Declaration:
        _DECLARED.update(dict.fromkeys(targets, declaration))
        return declaration

    return decorate


def states_bytes(formula: F) -> F:
    """Declare that a formula states the bytes of every call: 0 if it touches nothing."""
    setattr(formula, _STATES_BYTES, True)
    return formula


def has_stated_bytes(formula: Callable[..., Any]) -> bool:
    """Return True if ``states_bytes`` was declared for the formula."""
    return getattr(formula, _STATES_BYTES, False)


def access_of(op: Any, args: tuple[Any, ...], kwargs: Arguments, out: Any) -> Access | None:
    """Return what a call of ``op`` touches, or None where that is all."""
    if not isinstance(op, OpOverload):
        return None
    declaration = declaration_of(op)
    return declaration(named_arguments(op, args, kwargs), out) if declaration else None


def declaration_of(op: OpOverload) -> Declaration | None:
    """Return what was declared for the operator, or for the functional form of it."""
    return find(_DECLARED, op)


def named_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: Arguments) -> dict[str, Any]:
    """Return the arguments of a call by their names in the schema, with the defaults."""
    arguments = _torch.schema_of(op).arguments
    named = {argument.name: argument.default_value for argument in arguments}
    named.update(zip(named, args, strict=False))
    return {**named, **kwargs}


def split_outs(func: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the keyword arguments that are inputs, and those that receive results."""
    if not kwargs or not isinstance(func, OpOverload):
        return kwargs, ()
    names = {argument.name for argument in _torch.schema_of(func).arguments if argument.is_out}
    outs = tuple(value for name, value in kwargs.items() if name in names)
    if not outs:
        return kwargs, ()
    return {name: value for name, value in kwargs.items() if name not in names}, outs
