"""Folding keeps every sum and merges only what is alike."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from dispatch_flops.analysis.folding import fold
from dispatch_flops.profile import ModuleNode, OpTotal, Profile
from dispatch_flops.profile.cost import PHASES
from tests.helpers.trees import (
    SMALL,
    deep,
    encoder,
    linear,
    module,
    place,
    profiles,
    training_step,
    wide,
)


def _names(*siblings: ModuleNode) -> list[str]:
    folded = fold(place(module("Net", *siblings)))
    return [f"{child.name}: {child.class_name}" for child in folded.children]


def test_fold_of_identical_layers_is_one_layer() -> None:
    layers = fold(encoder(12).root).children[1]
    (layer,) = layers.children
    assert (layer.name, layer.class_name, layer.fqn) == ("0-11", "12 x Layer", "layer.0")
    assert layer.calls == 12
    assert layer.total_params == 12 * (2 * (5 * 7 + 7) + 2 * (7 * 5 + 5))
    assert layer.total().macs == 12 * 4 * 3 * 5 * 7
    assert layer.latency_s == pytest.approx(sum(range(1, 13)) * 1e-3)
    query, key, mlp = layer.children
    assert (query.name, query.class_name) == (
        "query",
        "12 x Linear",
    )  # a sum; not numbered: kept apart
    assert query.latency_s == pytest.approx(12e-3)
    assert key.total().macs == 12 * 3 * 5 * 7
    assert mlp.children[0].class_name == "12 x 2 x Linear"
    assert mlp.children[0].ops[0].calls == 12 * 2
    assert mlp.children[0].latency_s is None


def test_fold_of_layers_that_differ_keeps_them_apart() -> None:
    same = [linear(str(i), 3, 5) for i in range(5)]
    assert _names(*same) == ["0-4: 5 x Linear"]
    first = linear("0", 3, 7)  # as a stack whose first layer is wider
    assert _names(first, *same[1:]) == ["0: Linear", "1-4: 4 x Linear"]
    idle = dataclasses.replace(same[4], ops=(), calls=0)  # built but not run
    assert _names(*same[:4], idle) == ["0-3: 4 x Linear", "4: Linear"]
    for change in (
        {"class_name": "Other"},
        {"extra_repr": "other"},
        {"calls": 2},
        {"tokens": 3},
        {"output_shapes": ((3, 5),)},
        {"active_params": 2},
        {"trainable_params": 2},
        {"children": (module("Tanh", name="act"),)},
    ):
        odd = dataclasses.replace(same[2], **change)
        names = _names(*same[:2], odd, *same[3:])
        assert [name.split(":")[0] for name in names] == ["0-1", "2", "3-4"]


def test_fold_of_layers_that_differ_in_latency_sums_it() -> None:
    slow = linear("1", 3, 5, latency_s=2.0)
    unmeasured = linear("2", 3, 5)
    (child,) = fold(
        place(module("Net", linear("0", 3, 5, latency_s=1.0), slow, unmeasured))
    ).children
    assert child.latency_s == 3.0


def test_fold_of_layers_whose_operators_differ_in_latency_sums_it() -> None:
    first, second = (
        dataclasses.replace(layer, ops=tuple(replace_latency(op, seconds) for op in layer.ops))
        for layer, seconds in ((linear("0", 3, 5), 1.0), (linear("1", 3, 5), 2.0))
    )
    (child,) = fold(place(module("Net", first, second))).children
    assert child.name == "0-1"
    assert [op.latency_s for op in child.ops] == [3.0] * len(first.ops)


def test_fold_of_layers_sums_their_tokens() -> None:
    layers = [dataclasses.replace(linear(str(i), 3, 5), tokens=7) for i in range(4)]
    (child,) = fold(place(module("Net", *layers))).children
    assert child.tokens == 4 * 7


def replace_latency(op: OpTotal, seconds: float) -> OpTotal:
    return dataclasses.replace(op, latency_s=seconds)


def test_fold_of_names_that_do_not_count_up_keeps_them_apart() -> None:
    named = [linear(name, 3, 5) for name in ("block1", "block2", "block4", "other5", "6")]
    assert [name.split(":")[0] for name in _names(*named)] == [
        "block1-block2",
        "block4",
        "other5",
        "6",
    ]


def test_fold_of_layers_that_share_parameters_counts_them_once() -> None:
    tied = [linear(str(i), 3, 5) for i in range(4)]
    parent = dataclasses.replace(module("Net", *tied), total_params=20)
    (child,) = fold(parent).children
    assert child.total_params == 20


@pytest.mark.parametrize("name", SMALL)
def test_fold_of_any_small_profile_is_consistent(name: str) -> None:
    Profile(root=fold(SMALL[name]().root)).check()


@given(profiles)
def test_fold_of_any_profile_keeps_the_sums(profile: Profile) -> None:
    folded = fold(profile.root)
    Profile(root=folded).check()
    for phase in PHASES:
        assert folded.total(phase) == profile.root.total(phase)
    assert folded.total_params == profile.root.total_params
    assert sum(n.calls for n in folded.walk()) == sum(n.calls for n in profile.root.walk())
    assert folded.is_lower_bound == profile.root.is_lower_bound
    assert fold(folded) == folded


@pytest.mark.slow
def test_fold_of_deep_and_wide_trees_is_computed() -> None:
    chain = deep(5_000).root
    assert fold(chain) == chain
    twins = tuple(
        dataclasses.replace(module("Twin", name=str(i)), fqn=f"t{i}", children=(_below(i),))
        for i in range(2)
    )
    (merged,) = fold(ModuleNode(fqn="", class_name="Net", children=twins)).children
    assert merged.total().flops == 2 * 2_000
    assert len(fold(wide(10_000).root).children) == 10_000


def _below(index: int) -> ModuleNode:
    top: ModuleNode | None = None
    for node in reversed(list(deep(2_000).root.walk())):
        children = () if top is None else (top,)
        top = dataclasses.replace(node, fqn=f"{index}.{node.fqn}", children=children)
    assert top is not None
    return top


def test_fold_changes_nothing_in_place() -> None:
    profile = training_step()
    before = profile.to_json()
    fold(profile.root)
    assert profile.to_json() == before
