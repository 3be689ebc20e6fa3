"""Check at registration that a formula can be called with its operators' arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import torch

from dispatch_flops import _torch
from dispatch_flops.errors import FormulaError
from dispatch_flops.operators.operator_keys import name_of, overloads_of

Formula = Callable[..., Any]
_Form = tuple[list[str], list[str]]  # names of positional arguments, and of named ones
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_ANY = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class _Argument(NamedTuple):
    """An argument of an operator or of a module's forward."""

    name: str
    has_default: bool
    is_named: bool


def check_formula(formula: Formula, keys: Iterable[Any], *, by_name: bool) -> None:
    """Raise FormulaError if no call of an operator among ``keys`` can reach the formula.

    keys: registry keys. An operator whose library is not loaded has no schema yet, nor has a
        Triton kernel; what is known then is that the formula gets the result as ``out``.
    by_name: arguments are passed under the schemas' names, so that each parameter must be one.
    """
    signature = _signature_of(formula)
    if signature is None:
        return
    _refuse_without_out(signature)
    schemas: list[torch.FunctionSchema] = []
    are_all_known = True
    for key in keys:
        of_key = [_torch.schema_of(overload) for overload in overloads_of(key)]
        forms = (
            _forms_of_forward(key, signature)
            if isinstance(key, type)
            else _forms_of(of_key, signature, by_name=by_name)
        )
        _refuse_uncallable(signature, key, forms)
        are_all_known = are_all_known and bool(of_key)
        schemas += of_key
    if by_name and are_all_known:
        _refuse_unknown_names(signature, schemas)


def required_defaults(formula: Formula, schema: torch.FunctionSchema) -> dict[str, Any]:
    """Return the schema's defaults of the parameters for which the formula has none."""
    signature = _signature_of(formula)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return {
        name: defaults[name]
        for name, parameter in (signature.parameters.items() if signature else ())
        if parameter.default is Parameter.empty and name in defaults
    }


def _signature_of(formula: Formula) -> Signature | None:
    try:
        return inspect.signature(formula)
    except (TypeError, ValueError):  # of a function written in C
        return None


def _refuse_without_out(signature: Signature) -> None:
    named = signature.parameters.get("out")
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in signature.parameters.values())
    if not takes_any and (named is None or named.kind not in _NAMED):
        raise FormulaError(
            f"the function {_written(signature)} does not accept the operator's result; "
            "add a parameter `*, out`"
        )


def _refuse_uncallable(signature: Signature, key: Any, forms: Iterable[_Form]) -> None:
    """Raise if not a single form of call fits the formula."""
    refusal = ""
    for positional, named in forms:
        try:
            signature.bind(*positional, **{**dict.fromkeys(named), "out": None})
            return
        except TypeError as error:
            refusal = refusal or f"called as formula({_call(positional, named)}): {error}"
    if refusal:
        raise FormulaError(
            f"the function {_written(signature)} does not fit {name_of(key)}, {refusal}; accept "
            "its arguments, or `*_` and `**_` for those that the function does not need"
        )


def _forms_of(
    schemas: Iterable[torch.FunctionSchema], formula: Signature, *, by_name: bool
) -> Iterator[_Form]:
    """Yield the forms of calls of operators with these schemas."""
    for schema in schemas:
        inputs = [argument for argument in schema.arguments if not argument.is_out]
        yield from _forms_of_call(
            [_Argument(a.name, a.has_default_value(), a.kwarg_only or by_name) for a in inputs],
            formula,
        )


def _forms_of_forward(cls: type, formula: Signature) -> Iterator[_Form]:
    """Yield the forms of calls of a module of that class; none where that is not known.

    It is known of a function that takes the module and certain arguments. One that another wraps
    is not what is called, and one without arguments may stand for those of instances.
    """
    forward = inspect.getattr_static(cls, "forward")
    if not inspect.isfunction(forward):  # such as a staticmethod: it does not take the module
        return
    parameters = [*inspect.signature(forward, follow_wrapped=False).parameters.values()]
    if len(parameters) < 2 or any(p.kind in _ANY for p in parameters):
        return
    for count in range(len(parameters), 0, -1):  # by position, the module among them
        yield from _forms_of_call(
            [
                _Argument(
                    p.name,
                    p.default is not Parameter.empty,
                    position >= count or p.kind is Parameter.KEYWORD_ONLY,
                )
                for position, p in enumerate(parameters)
            ],
            formula,
        )


def _forms_of_call(arguments: Sequence[_Argument], formula: Signature) -> Iterator[_Form]:
    """Yield the forms of a call with these arguments, of which defaults may be omitted."""
    positional = [a for a in arguments if not a.is_named]
    named = [a for a in arguments if a.is_named]
    required = sum(not a.has_default for a in positional)
    needed = [a.name for a in named if not a.has_default]
    accepted = [a.name for a in named if not a.has_default or a.name in formula.parameters]
    for names in ([a.name for a in named], accepted, needed):
        for count in range(len(positional), required - 1, -1):
            yield [a.name for a in positional[:count]], names


def _refuse_unknown_names(signature: Signature, schemas: Iterable[torch.FunctionSchema]) -> None:
    known = {argument.name for schema in schemas for argument in schema.arguments} | {"out"}
    for name, parameter in signature.parameters.items():
        if parameter.kind in _NAMED and name not in known:
            raise FormulaError(
                f"the function's parameter {name!r} is not an argument of its operators; "
                f"choose from {', '.join(sorted(known))}"
            )


def _call(positional: Iterable[str], named: Iterable[str]) -> str:
    return ", ".join((*positional, *(f"{name}=..." for name in named), "out=..."))


def _written(signature: Signature) -> str:
    """Return the parameters without annotations, such as ``(x, w, *, out)``."""
    bare = [p.replace(annotation=Parameter.empty) for p in signature.parameters.values()]
    return str(Signature(bare))
