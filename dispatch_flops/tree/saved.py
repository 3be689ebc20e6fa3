"""A tree of modules as rows of plain data, and back.

One flat list of nodes per tree, each naming its children by position: nesting would meet the
recursion limits of json on deep models.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dispatch_flops.cost import OpCost
from dispatch_flops.plain import build
from dispatch_flops.tree.node import ModuleNode, OpTotal


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
