"""Build flat dataclasses from plain data, each field of the type that its annotation names."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def build(cls: type[T], data: Any, **given: Any) -> T:
    """Return ``cls(**data, **given)``; the values in ``data`` are numbers, strings or None.

    Raises ValueError naming the class, and the field that is missing, unknown, or of the wrong
    type.
    """
    try:
        check_fields(cls, data)
        return cls(**data, **given)
    except ValueError as error:
        raise ValueError(f"{cls.__name__}: {error}") from None
    except TypeError as error:
        missing = [repr(name) for name in _required(cls) if name not in {**data, **given}]
        reason = f"the field {missing[0]} is missing" if missing else error
        raise ValueError(f"{cls.__name__}: {reason}") from None


def check_fields(cls: Any, data: Any) -> None:
    """Raise ValueError naming an unknown field, or one with a value of the wrong type."""
    hints = _hints(cls)
    for name, value in table(data).items():
        if name not in hints:
            raise ValueError(f"unknown field {name!r}; expected {', '.join(hints)}")
        if not fits(hints[name], value):
            raise ValueError(f"{name} is {value!r:.60}; expected {_describe(hints[name])}")


def table(data: Any) -> dict[str, Any]:
    """Return a copy of a table of fields; raises ValueError for other data."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{data!r:.60} is not a table of fields")
    return dict(data)


def texts(data: Any) -> tuple[str, ...]:
    """Return the texts of a list; raises ValueError for other data."""
    if type(data) is not list or not all(type(text) is str for text in data):
        raise ValueError(f"{data!r:.60} is not a list of texts")
    return tuple(data)


def _required(cls: Any) -> Iterator[str]:
    for field in fields(cls):
        if field.init and field.default is MISSING and field.default_factory is MISSING:
            yield field.name


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """Return ``{field: annotation}``."""
    # The namespace of ``__init__``: ``__module__`` is the path that users import the class by.
    hints = get_type_hints(cls, globalns=cls.__init__.__globals__)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}


def fits(hint: Any, value: Any) -> bool:
    """Return True if the value is of the type that an annotation names."""
    if get_origin(hint) in (Union, types.UnionType):
        return any(fits(part, value) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # False for NaN
    return type(value) is hint


def _describe(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_describe, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if hint is float:
        return "a finite float"
    return "null" if hint is types.NoneType else hint.__name__
