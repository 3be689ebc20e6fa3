"""A tree of modules as rows of plain data, and back.

Each tree is one flat list of nodes that name their children by position. Nesting would meet the
recursion limits of json on deep models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

from dispatch_flops.profile.communication import CommGroup, CommTotal
from dispatch_flops.profile.cost import OpCost, Phase
from dispatch_flops.profile.fields import build, fits, table
from dispatch_flops.profile.memory_rows import module_memory_from_row, module_memory_to_row
from dispatch_flops.profile.seconds import PhaseSeconds
from dispatch_flops.profile.tree import ModuleNode, OpTotal

T = TypeVar("T")


def build_timed(cls: type[T], data: Mapping[str, Any], **given: Any) -> T:
    """Return ``build(cls, data, **given)`` for a class whose field ``seconds`` is per phase."""
    values = table(data)
    seconds = values.pop("seconds")
    if not isinstance(seconds, Mapping) or not all(
        type(phase) is str and fits(float, s) for phase, s in seconds.items()
    ):
        raise ValueError(f"{cls.__name__}.seconds is {seconds!r:.60}")
    return build(cls, values, **given, seconds=PhaseSeconds(cast("Mapping[Phase, float]", seconds)))


def to_row(item: Any) -> dict[str, Any]:
    """Return the fields of a flat dataclass as plain data, seconds per phase as a dict."""
    values = {field.name: getattr(item, field.name) for field in fields(item)}
    return {
        name: dict(value) if isinstance(value, PhaseSeconds) else value
        for name, value in values.items()
    }


def node_to_rows(root: ModuleNode) -> list[dict[str, Any]]:
    """Return the tree as rows, parents first; ``node_from_rows`` gives back an equal tree."""
    nodes = list(root.walk())
    position = {id(node): index for index, node in enumerate(nodes)}
    rows = []
    for node in nodes:
        row = to_row(node)
        del row["ops"], row["children"]  # to the end, where a reader of the file expects them
        if node.local_params is None:
            del row["local_params"]
        shapes = row.pop("output_shapes")
        if shapes is not None:
            row["output_shapes"] = [None if shape is None else list(shape) for shape in shapes]
        memory = row.pop("memory")
        if memory is not None:
            row["memory"] = module_memory_to_row(memory)
        row["ops"] = [dataclasses.asdict(op) for op in node.ops]
        row["children"] = [position[id(child)] for child in node.children]
        rows.append(row)
    return rows


def node_from_rows(rows: list[dict[str, Any]]) -> ModuleNode:
    """Return the tree that ``node_to_rows`` wrote.

    Raises ValueError, TypeError or KeyError where the rows are not a tree.
    """
    built: dict[int, ModuleNode] = {}
    for index in reversed(range(len(rows))):
        row = dict(rows[index])
        ops = tuple(_op_from_row(op) for op in row.pop("ops"))
        below = row.pop("children")
        if type(below) is not list or not all(type(child) is int for child in below):
            raise ValueError(f"children of node {index} is {below!r:.60}; expected positions")
        if not built.keys() >= set(below) or len(set(below)) < len(below):
            raise ValueError(f"the children {below} of node {index} are not later nodes of its own")
        children = tuple(built.pop(child) for child in below)
        memory = module_memory_from_row(row.pop("memory")) if "memory" in row else None
        shapes = shapes_from_row(row.pop("output_shapes", None))
        built[index] = build_timed(
            ModuleNode, row, ops=ops, children=children, memory=memory, output_shapes=shapes
        )
    root = built.pop(0)
    if built:
        raise ValueError(f"the nodes {sorted(built)} are not reachable from the root")
    return root


def shapes_from_row(row: Any) -> tuple[tuple[int, ...] | None, ...] | None:
    """Return the shapes that a list of lists holds; raises ValueError for anything else."""
    if row is None:
        return None
    if type(row) is not list:
        raise ValueError(f"shapes are {row!r:.60}; expected a list")
    return tuple(map(shape_from_row, row))


def shape_from_row(row: Any) -> tuple[int, ...] | None:
    """Return the shape that a list holds; raises ValueError for anything else but None."""
    if row is None:
        return None
    if type(row) is not list or not all(type(size) is int and size >= -1 for size in row):
        raise ValueError(f"a shape is {row!r:.60}; expected a list of ints or null")
    return tuple(row)


def _op_from_row(row: dict[str, Any]) -> OpTotal:
    values = dict(row)
    cost = values.pop("cost")
    phase = values.pop("phase")  # of any name: ``Profile.check`` refuses what is not a phase
    return build(OpTotal, values, phase=phase, cost=None if cost is None else build(OpCost, cost))


# -- communication ------------------------------------------------------------------------------


def communication_to_rows(totals: Sequence[CommTotal]) -> dict[str, Any]:
    """Return the totals under "communication", each group once; empty without totals."""
    if not totals:
        return {}
    groups = list(dict.fromkeys(total.group for total in totals))
    position = {group: index for index, group in enumerate(groups)}
    rows = []
    for total in totals:
        row = _lists(to_row(total)) | {"group": position[total.group]}
        for name in ("sent_bytes", "received_bytes"):
            if row[name] is None:
                del row[name]
        rows.append(row)
    return {
        "communication": {"groups": [_lists(to_row(group)) for group in groups], "totals": rows}
    }


def communication_from_rows(data: Any) -> tuple[CommTotal, ...]:
    """Return the totals that ``communication_to_rows`` wrote under "communication".

    Raises ValueError, TypeError or KeyError for other data.
    """
    if data is None:
        return ()
    groups = [
        build(CommGroup, _without(row, "ranks"), ranks=_ints(row["ranks"]))
        for row in data["groups"]
    ]
    return tuple(_comm_from_row(row, groups) for row in data["totals"])


def _comm_from_row(row: Any, groups: Sequence[CommGroup]) -> CommTotal:
    index = row["group"]
    if type(index) is not int or not 0 <= index < len(groups):
        raise ValueError(f"group {index!r:.60} is not one of the {len(groups)} groups")
    shares = {
        name: _ints(row[name])
        for name in ("sent_bytes", "received_bytes")
        if row.get(name) is not None
    }
    values = _without(row, "group", "phase", *shares)
    phase = row["phase"]  # of any name, as an operator's
    return build(CommTotal, values, phase=phase, group=groups[index], **shares)


def _lists(row: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if type(value) is tuple else value for key, value in row.items()}


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in names}


def _ints(data: Any) -> tuple[int, ...]:
    if type(data) is not list or not all(type(number) is int for number in data):
        raise ValueError(f"{data!r:.60} is not a list of ints")
    return tuple(data)


# -- earlier versions of the schema -------------------------------------------------------------


def upgraded_from_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data of schema version 1 in the form of version 2.

    In version 1 ``run`` was ``scope``, and each phase had a field of its own for its seconds.
    """
    upgraded = {("run" if key == "scope" else key): value for key, value in data.items()}
    upgraded["timing"] = _with_seconds(
        data["timing"], forward="forward_s", backward="backward_s", optimizer="step_s"
    )
    for tree in ("root", "outside"):
        upgraded[tree] = [
            _with_seconds(row, forward="latency_s", backward="backward_latency_s")
            for row in data[tree]
        ]
    return upgraded


def _with_seconds(row: Any, **field_of: str) -> dict[str, Any]:
    """Return the row with its fields of seconds as one table; what was not measured is absent."""
    values = table(row)
    seconds = {phase: values.pop(name, None) for phase, name in field_of.items()}
    return values | {"seconds": {phase: s for phase, s in seconds.items() if s is not None}}
