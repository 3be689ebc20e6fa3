"""Check at registration that a formula can be called with its operators' arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops.errors import FormulaError
from dispatch_flops.operators.operator_keys import name_of, overloads_of

Formula = Callable[..., Any]
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def check_formula(formula: Formula, keys: Iterable[Any], *, by_name: bool) -> None:
    """Raise FormulaError if no call of an operator among ``keys`` can reach the formula.

    keys: registry keys. An operator whose library is not loaded has no schema yet; what is known
        then is that the formula gets the result as ``out``.
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
        if of_key:
            _refuse_uncallable(signature, key, of_key, by_name=by_name)
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


def _refuse_uncallable(
    signature: Signature,
    key: Any,
    schemas: Sequence[torch.FunctionSchema],
    *,
    by_name: bool,
) -> None:
    """Raise if not a single form of call, of any overload, fits the formula."""
    refusal = ""
    for schema in schemas:
        for positional, named in _forms_of_call(schema, by_name=by_name):
            try:
                signature.bind(*positional, **{**dict.fromkeys(named), "out": None})
                return
            except TypeError as error:
                refusal = refusal or f"called as formula({_call(positional, named)}): {error}"
    if refusal:
        raise FormulaError(
            f"the function {_written(signature)} does not fit {name_of(key)}, {refusal}; accept "
            "the operator's arguments, or `*_` and `**_` for those that it does not need"
        )


def _forms_of_call(
    schema: torch.FunctionSchema, *, by_name: bool
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the positional and the named arguments of each form: defaults may be omitted."""
    inputs = [argument for argument in schema.arguments if not argument.is_out]
    positional = [a for a in inputs if not (a.kwarg_only or by_name)]
    named = [a for a in inputs if a.kwarg_only or by_name]
    required = sum(not a.has_default_value() for a in positional)
    needed = [a.name for a in named if not a.has_default_value()]
    for names in ([a.name for a in named], needed):
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
