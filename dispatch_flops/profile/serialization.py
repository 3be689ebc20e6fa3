"""A tree of modules as rows of plain data, and back.

One flat list of nodes per tree, each naming its children by position: nesting would meet the
recursion limits of json on deep models.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dispatch_flops.profile.cost import OpCost
from dispatch_flops.profile.tree import ModuleNode, OpTotal

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
    # By ``__init__``, for ``__module__`` is the path that users import the class by.
    hints = get_type_hints(cls, globalns=cls.__init__.__globals__)
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
