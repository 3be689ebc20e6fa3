"""A tree of modules as rows of plain data, and back.

One flat list of nodes per tree, each naming its children by position: nesting would meet the
recursion limits of json on deep models.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dispatch_flops.profile.cost import OpCost
from dispatch_flops.profile.tree import ModuleNode, OpTotal

T = TypeVar("T")


def build(cls: type[T], data: Any, **given: Any) -> T:
    """Return ``cls(**data, **given)``; the values in ``data`` are plain: numbers, strings, None.

    Raises ValueError naming the class, and the field that is missing, unknown, or of the wrong
    type.
    """
    try:
        check_fields(cls, data)
        return cls(**data, **given)
    except (TypeError, ValueError) as error:  # TypeError: a field is missing
        raise ValueError(f"{cls.__name__}: {error}") from None


def check_fields(cls: Any, data: Any) -> None:
    """Raise ValueError naming an unknown field, or one with a value of the wrong type."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{data!r:.60} is not a table of fields")
    hints = _hints(cls)
    for name, value in data.items():
        if name not in hints:
            raise ValueError(f"unknown field {name!r}; expected {', '.join(hints)}")
        if not _fits(hints[name], value):
            raise ValueError(f"{name} is {value!r:.60}; expected {_describe(hints[name])}")


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """Return ``{field: annotation}``."""
    # By ``__init__``, for ``__module__`` is the path that users import the class by.
    hints = get_type_hints(cls, globalns=cls.__init__.__globals__)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(part, value) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def _describe(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_describe, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if hint is float:
        return "a finite float"
    return "null" if hint is types.NoneType else hint.__name__


def node_to_rows(root: ModuleNode) -> list[dict[str, Any]]:
    nodes = list(root.walk())
    position = {id(node): index for index, node in enumerate(nodes)}
    rows = []
    for node in nodes:
        row: dict[str, Any] = {
            f.name: getattr(node, f.name)
            for f in dataclasses.fields(node)
            if f.name not in ("ops", "children")
        }
        row["ops"] = [dataclasses.asdict(op) for op in node.ops]
        row["children"] = [position[id(child)] for child in node.children]
        rows.append(row)
    return rows


def node_from_rows(rows: list[dict[str, Any]]) -> ModuleNode:
    built: dict[int, ModuleNode] = {}
    for index in reversed(range(len(rows))):
        row = dict(rows[index])
        ops = tuple(_op_from_row(op) for op in row.pop("ops"))
        below = row.pop("children")
        if not built.keys() >= set(below) or len(set(below)) < len(below):
            raise ValueError(f"the children {below} of node {index} are no later nodes of its own")
        children = tuple(built.pop(child) for child in below)
        built[index] = build(ModuleNode, row, ops=ops, children=children)
    root = built.pop(0)
    if built:
        raise ValueError(f"the nodes {sorted(built)} are nobody's children")
    return root


def _op_from_row(row: dict[str, Any]) -> OpTotal:
    values = dict(row)
    cost = values.pop("cost")
    return build(OpTotal, values, cost=None if cost is None else build(OpCost, cost))


def upgraded_from_1(data: dict[str, Any]) -> dict[str, Any]:
    """Return data of schema version 1 in the form of version 2: ``scope`` became ``run``."""
    return {("run" if key == "scope" else key): value for key, value in data.items()}
