"""Plain data as dataclasses: every value is held against its field's annotation."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def build(cls: type[T], data: Any, **given: Any) -> T:
    """``cls(**data, **given)``, the values in ``data`` being plain: numbers, strings, None.

    Raises ValueError naming the field that is missing, unknown, or of the wrong type.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{cls.__name__} is {data!r:.60}, no table of fields")
    known = _checks(cls)  # type: ignore[arg-type]
    for name, value in data.items():
        if name not in known:
            raise ValueError(f"{cls.__name__} has no field {name!r}")
        if not known[name](value):
            raise ValueError(f"{cls.__name__}.{name} is {value!r:.60}")
    try:
        return cls(**data, **given)
    except TypeError as error:  # a field is missing
        raise ValueError(str(error)) from None


@functools.cache
def _checks(cls: Any) -> dict[str, Callable[[Any], bool]]:
    """For each field, what says whether a value fits its annotation."""
    hints = get_type_hints(cls)
    return {
        field.name: functools.partial(_fits, hints[field.name])
        for field in fields(cls)
        if field.init
    }


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(part, value) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint
