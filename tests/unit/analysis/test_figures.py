"""Figures of modules on hand-built profiles; expected values are products of their sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given

from dispatch_flops import analysis
from dispatch_flops.analysis.figures import Figures, top_modules
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import Profile, add_costs
from dispatch_flops.profile.cost import PHASES, ZERO
from tests.helpers.trees import (
    deep,
    encoder,
    lenet5,
    linear,
    lower_bound,
    module,
    place,
    profiles,
    training_step,
    unmeasured,
    wide,
)

MACS = 4 * 64 * 256  # of each Linear of training_step, forward


def test_inclusive_of_a_phase_sums_module_and_children() -> None:
    figures = analysis.inclusive(training_step().root, "forward")
    assert list(figures) == ["", "0", "1", "2"]
    assert figures["0"].cost.macs == MACS
    assert figures[""].cost.macs == 2 * MACS
    assert figures[""].params == 2 * 64 * 256 + 64 + 256
    backward = analysis.inclusive(training_step().root, "backward")
    assert backward[""].cost.macs == 3 * MACS
    assert backward["0"].latency_s is None


def test_inclusive_does_not_return_what_a_caller_changed() -> None:
    root = training_step().root
    analysis.inclusive(root, "forward").clear()
    assert analysis.inclusive(root, "forward")[""].cost.macs == 2 * MACS


def test_inclusive_of_an_unmeasured_container_sums_latencies_of_children() -> None:
    root = unmeasured().root
    figures = analysis.inclusive(root)
    assert figures["layers.0"].latency_s == 4e-3  # measured: not the sum of 1 ms below
    assert figures["layers.1"].latency_s is None
    assert figures["layers"].latency_s == 4e-3
    assert figures["head"].latency_s == 0.0  # measured, and not None
    assert figures[""].latency_s == 4e-3
    assert analysis.latency_of(root) == 4e-3
    assert analysis.latency_of(root.children[0].children[1]) is None
    assert analysis.latency_of(root, "backward") is None


def test_exclusive_latency_is_what_the_children_leave() -> None:
    alone = analysis.exclusive(encoder(3).root)
    assert alone["layer.1"].latency_s == pytest.approx(2e-3 - 2e-3)
    assert alone["layer.2"].latency_s == pytest.approx(3e-3 - 2e-3)
    assert alone["layer.0"].latency_s == 0.0  # its children took longer: noise, not negative time
    assert alone["layer"].latency_s is None


def test_inclusive_lower_bound_is_of_the_phase_and_above() -> None:
    forward = analysis.inclusive(lower_bound().root, "forward")
    assert {fqn: f.lower_bound for fqn, f in forward.items()} == {
        "": True,
        "known": False,
        "partly": True,
    }
    assert not analysis.inclusive(lower_bound().root, "backward")[""].lower_bound


def test_by_depth_has_at_most_the_parameters_of_the_model() -> None:
    """Two blocks hold one layer of 3*3 weights and 3 biases."""
    blocks = (module("Block", linear("fc", 3, 3), name=name) for name in "ab")
    root = place(dataclasses.replace(module("Net", *blocks), total_params=3 * 3 + 3))
    depths = analysis.by_depth(root)
    assert [f.params for level in depths for f in level.values()] == 3 * [3 * 3 + 3]


def test_by_depth_adds_up_classes() -> None:
    depths = analysis.by_depth(encoder(12).root, "forward")
    assert [list(level) for level in depths] == [
        ["Encoder"],
        ["Embedding", "ModuleList"],
        ["Layer"],
        ["Linear", "Sequential"],
        ["Linear"],
    ]
    layer = depths[2]["Layer"]
    assert layer.modules == 12
    assert layer.cost.macs == 12 * (2 * 3 * 5 * 7 + 2 * 3 * 7 * 5)
    assert layer.latency_s == pytest.approx(sum(range(1, 13)) * 1e-3)
    assert depths[3]["Linear"].cost.macs == 12 * 2 * 3 * 5 * 7
    assert depths[3]["Sequential"].latency_s is None


def test_by_type_adds_up_to_the_total() -> None:
    types = analysis.by_type(encoder(12))
    assert next(iter(types)) == "Linear"
    assert types["Linear"].modules == 12 * 4
    assert types["Linear"].cost.macs == 12 * 4 * 3 * 5 * 7
    assert types["Layer"].cost == ZERO
    assert types["Embedding"].params == 11 * 5


def test_top_keeps_order_of_equals_and_puts_unknown_last() -> None:
    groups = {
        "a": Figures(params=1),
        "b": Figures(params=2, latency_s=0.0),
        "c": Figures(params=2),
    }
    assert [name for name, _ in analysis.top(groups, "params", 3)] == ["b", "c", "a"]
    assert [name for name, _ in analysis.top(groups, "latency", 1)] == ["b"]
    assert analysis.top(groups, "flops", 0) == []
    assert analysis.top(groups, "flops", -1) == []


@pytest.mark.parametrize(
    ("key", "winner", "value"),
    [
        ("params", "feature_extractor.6", 16 * 120 * 25 + 120),
        ("macs", "feature_extractor.3", 1024 * 16 * 6 * 25 * 100),
        ("flops", "feature_extractor.3", 1024 * 16 * 100 * (2 * 6 * 25 + 1)),
    ],
)
def test_top_modules_of_a_key_are_ranked_by_it(key: analysis.Key, winner: str, value: int) -> None:
    ranked = analysis.top_modules(lenet5(), key, 3)
    assert len(ranked) == 3
    assert ranked[0][0].fqn == winner
    assert ranked[0][1].value(key) == value


def test_top_modules_omits_those_that_have_none() -> None:
    assert len(analysis.top_modules(lenet5(), "params", 100)) == 5
    assert analysis.top_modules(lenet5(), "bytes", 100) == []
    assert analysis.top_modules(lenet5(), "latency", 1)[0][0].fqn == "feature_extractor.0"
    assert analysis.top_modules(lenet5(), "macs", 5, "backward") == []


def test_top_modules_of_an_unknown_key_raises() -> None:
    with pytest.raises(ConfigError, match="'time' is not a figure of a module; choose .*'latency'"):
        top_modules(lenet5(), "time")  # type: ignore[arg-type]


@given(profiles)
def test_exclusive_figures_of_any_profile_add_up_to_the_total(profile: Profile) -> None:
    for phase in (None, *PHASES):
        alone = analysis.exclusive(profile.root, phase)
        whole = analysis.inclusive(profile.root, phase)[""]
        assert add_costs(f.cost for f in alone.values()) == whole.cost == profile.root.total(phase)
        assert sum(f.params for f in alone.values()) == whole.params
        assert any(f.lower_bound for f in alone.values()) == whole.lower_bound
        by_type = analysis.by_type(profile, phase)
        assert add_costs(f.cost for f in by_type.values()) == whole.cost
        rows = analysis.operator_rows(profile, phase)
        assert add_costs(row.cost for row in rows) == profile.total(phase)
        by_dtype = analysis.cost_by_dtype(profile, phase)
        assert add_costs(by_dtype.values()) == profile.total(phase)


@given(profiles)
def test_by_depth_of_any_profile_has_every_module_once(profile: Profile) -> None:
    depths = analysis.by_depth(profile.root)
    modules = [figures.modules for level in depths for figures in level.values()]
    assert sum(modules) == len(list(profile.root.walk()))


@pytest.mark.slow
def test_figures_of_deep_and_wide_trees_are_computed() -> None:
    chain = deep(5_000)
    assert len(analysis.by_depth(chain.root)) == 5_000
    assert analysis.latency_of(chain.root) is None
    assert analysis.diff(chain, chain).changed_modules() == []
    flat = wide(10_000)
    best = analysis.top_modules(flat, "macs", 2)
    assert [figures.cost.macs for _, figures in best] == [10_000, 9_999]


@pytest.mark.parametrize("k", ["all", 1.5, None])
def test_top_of_a_number_that_is_no_int_names_it(k: Any) -> None:
    with pytest.raises(ConfigError, match="k=.*: pass how many to return, an int"):
        top_modules(encoder(), k=k)
