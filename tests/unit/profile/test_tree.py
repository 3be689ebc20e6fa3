"""Modules: totals over phases and children, equality, latency."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import ModuleNode, PhaseSeconds
from dispatch_flops.profile.cost import OpCost
from dispatch_flops.profile.tree import map_tree, new_node
from tests.helpers.trees import (
    SMALL,
    deep,
    module,
    op,
    timed,
    training_step,
    unknown,
    wide,
)

DEEP = 5_000


def test_new_node_is_as_the_constructor_makes_it() -> None:
    fields: dict[str, Any] = {
        "fqn": "a.b", "class_name": "Linear", "calls": 3, "total_params": 5,
        "seconds": PhaseSeconds({"forward": 0.5}), "children": (module("ReLU"),),
    }  # fmt: skip
    made, node = ModuleNode(**fields), new_node(**fields)
    assert type(node) is ModuleNode
    assert node == made
    assert hash(node) == hash(made)
    assert dataclasses.asdict(node) == dataclasses.asdict(made)
    assert dataclasses.replace(node, calls=7) == dataclasses.replace(made, calls=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.calls = 7  # type: ignore[misc]


def test_total_is_the_sum_over_phases_and_children() -> None:
    root = training_step().root
    macs = 4 * 64 * 256
    assert root.total("forward").macs == 2 * macs
    assert root.total("backward").macs == 3 * macs
    assert root.total().macs == 5 * macs
    assert root.model_total().flops == 2 * 5 * macs + 2 * 4 * 256 + 3 * (256 + 64)
    assert root.own() == OpCost()


def test_total_of_a_phase_that_did_not_occur_is_zero() -> None:
    root = training_step().root
    for phase in ("optimizer", "setup"):
        assert root.total(phase) == root.own(phase) == OpCost()  # type: ignore[arg-type]
    assert training_step().total("setup") == OpCost()
    with pytest.raises(ConfigError, match="'warmup' is not a phase"):
        root.total("warmup")  # type: ignore[arg-type]


def test_total_of_a_tree_deeper_than_the_stack_is_computed() -> None:
    root = deep(DEEP).root
    assert root.total().flops == DEEP
    assert not root.is_lower_bound
    assert len(repr(root)) < 2_000
    assert hash(root) == hash(deep(DEEP).root)
    assert root == deep(DEEP).root


@pytest.mark.slow
def test_total_of_ten_thousand_modules_is_computed() -> None:
    assert wide(10_000).root.total().macs == 10_000 * 10_001 // 2


def test_unknown_operator_marks_every_module_above_it() -> None:
    marks = {node.fqn: node.is_lower_bound for node in SMALL["lower_bound"]().root.walk()}
    assert marks == {"": True, "known": False, "partly": True}


def test_root_of_several_models_was_not_called_itself() -> None:
    several, one = (module("models", module("A", name="a"), calls=calls) for calls in (0, 1))
    assert several.is_several_models and not one.is_several_models
    assert not module("models", name="a", calls=0).is_several_models


def test_unknown_cost_is_not_in_the_sum() -> None:
    node = module("Net", ops=(unknown("lib.a", calls=2),))
    assert node.own() == OpCost()
    assert node.is_lower_bound


def test_latency_is_none_where_not_measured() -> None:
    node = ModuleNode(fqn="", class_name="Net", seconds=timed(forward=0.0, backward=2.0))
    assert (node.latency_s, node.latency(), node.latency("forward")) == (0.0, 0.0, 0.0)
    assert node.latency("backward") == 2.0
    assert node.latency("recompute") is None
    assert ModuleNode(fqn="", class_name="Net").latency_s is None


def test_node_that_differs_anywhere_is_not_equal() -> None:
    root = training_step().root
    first, middle, last = root.children
    for changes in ({"extra_repr": "other"}, {"seconds": timed(forward=1.0)}, {"ops": ()}):
        other = dataclasses.replace(middle, **changes)
        assert root != dataclasses.replace(root, children=(first, other, last))
    assert root != dataclasses.replace(root, children=(first, middle))
    assert root != "Sequential"


def test_node_with_the_same_nodes_nested_otherwise_is_not_equal() -> None:
    chain = module("A", module("B", module("C", name="c"), name="b"))
    flat = module("A", module("B", name="b"), module("C", name="c"))
    assert chain != flat


def test_map_tree_replaces_children_before_parents() -> None:
    order: list[str] = []

    def change(node: ModuleNode) -> ModuleNode:
        order.append(node.fqn)
        return dataclasses.replace(node, ops=(*node.ops, op("lib.a", macs=len(node.children))))

    root = training_step().root
    changed = map_tree(root, change)
    assert sorted(order) == ["", "0", "1", "2"]
    assert order[-1] == ""
    assert changed.total().macs == root.total().macs + 3
