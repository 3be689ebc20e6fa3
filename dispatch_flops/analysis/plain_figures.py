"""Figures of plans as plain data: every public field and property under its own name.

Names, units and the order of a range are those of the objects. An unknown figure is None, and so is
one that exceeds a float. A profile is given by its totals; ``Profile.to_dict`` has its modules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Any

from dispatch_flops.profile import MemoryProfile, Profile


class PlainFigures:
    """Base of what states its figures as plain data."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def to_json(self, *, indent: int | None = None) -> str:
        """Return ``to_dict`` as JSON text, without NaN or Infinity.

        indent: spaces of each level; None (the default) for one line.
        """
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)


def figures_of(item: Any, **instead: Any) -> dict[str, Any]:
    """Return ``{name: plain value}`` of the fields and properties of a dataclass.

    The machine is left out: a plan has one, which it states itself. instead: values of names that
    are written in another way.
    """
    return {
        name: instead[name] if name in instead else _plain_figure(name, getattr(item, name))
        for name in _names_of(item)
        if name != "machine"
    }


def _names_of(item: Any) -> Iterator[str]:
    yield from (field.name for field in fields(item))
    properties = {
        name: None
        for cls in reversed(type(item).__mro__)
        for name, member in vars(cls).items()
        if isinstance(member, property) and not name.startswith("_")
    }
    yield from properties


def _plain_figure(name: str, value: Any) -> Any:
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole and name.endswith("_bytes") else plain(value)


def plain(value: Any) -> Any:
    """Return a value as dicts, lists, strings, numbers, booleans and None."""
    match value:
        case None | bool() | str():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value) if isfinite(value) else None
        case Profile():
            return _totals_of(value)
        case MemoryProfile():
            return {
                "peak_bytes": value.peak_bytes,
                "peak_at": plain(value.peak_at),
                "by_role": value.by_role(),
                "is_lower_bound": value.is_lower_bound,
                "is_approximate": value.is_approximate,
                "rounding": value.rounding,
            }
        case Mapping():
            return {str(key): plain(each) for key, each in value.items()}
        case tuple() | list():
            return [plain(each) for each in value]
        case _:
            return figures_of(value) if is_dataclass(value) else str(value)


def _totals_of(profile: Profile) -> dict[str, Any]:
    return {
        "root": {"class_name": profile.root.class_name},
        "total_params": profile.total_params,
        "local_params": profile.local_params,
        "total": plain(profile.total()),
        "model_total": plain(profile.model_total()),
        "is_lower_bound": profile.is_lower_bound,
        "uncounted_ops": profile.uncounted_ops(),
        "memory": plain(profile.memory),
        "timing": plain(profile.timing),
        "run": plain(profile.run),
        "notes": list(profile.notes),
    }
