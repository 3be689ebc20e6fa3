"""Timelines in Chrome's trace format."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import Profile
from dispatch_flops.renderers import View, chrome_trace
from tests.helpers.trees import (
    HOSTILE_NAMES,
    SMALL,
    deep,
    encoder,
    lenet5,
    lower_bound,
    profiles,
    training_step,
    wide,
)

Golden = Callable[[str, str], None]


@pytest.mark.parametrize("name", ["training_step", "hostile", "lower_bound"])
def test_trace_of_small_profiles_matches_golden_files(name: str, golden: Golden) -> None:
    golden(f"{name}_trace.json", chrome_trace.render(SMALL[name]().check()) + "\n")


def _spans(text: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]


def test_trace_by_latency_has_spans_in_the_models_order() -> None:
    spans = {span["args"]["fqn"]: span for span in _spans(chrome_trace.render(lenet5()))}
    assert spans[""]["dur"] == pytest.approx(216.68e3)
    conv, tanh = spans["feature_extractor.0"], spans["feature_extractor.1"]
    assert conv["ts"] == 0
    assert tanh["ts"] == pytest.approx(conv["dur"])
    assert conv["args"]["macs"] == 1024 * 6 * 25 * 28 * 28


def test_trace_by_flops_has_a_track_per_phase() -> None:
    spans = _spans(chrome_trace.render(training_step(), View(by="flops")))
    roots = {span["cat"]: span for span in spans if span["args"]["fqn"] == ""}
    assert set(roots) == {"forward", "backward", "recompute"}
    assert roots["recompute"]["dur"] == pytest.approx(4 * 256 / 1e6)
    assert len({span["tid"] for span in roots.values()}) == 3


def test_costs_that_are_lower_bounds_say_so() -> None:
    spans = {
        span["args"]["fqn"]: span["args"] for span in _spans(chrome_trace.render(lower_bound()))
    }
    assert {fqn: args.get("is_lower_bound") for fqn, args in spans.items()} == {
        "": True, "known": None, "partly": True,
    }  # fmt: skip


def test_trace_by_another_figure_is_refused() -> None:
    with pytest.raises(ConfigError, match="macs"):
        chrome_trace.render(lenet5(), View(by="macs"))


def test_trace_without_latency_shows_flops() -> None:
    macs = sum(range(1, len(HOSTILE_NAMES) + 1))
    assert _spans(chrome_trace.render(SMALL["hostile"]()))[0]["dur"] == pytest.approx(
        2 * macs / 1e6
    )
    assert _spans(chrome_trace.render(SMALL["empty"]())) == []


def _assert_nested(spans: list[dict[str, Any]]) -> None:
    stack: list[float] = []
    for span in spans:
        end = span["ts"] + span["dur"]
        slack = 1e-9 + 1e-9 * end
        while stack and span["ts"] >= stack[-1] - slack:
            stack.pop()
        assert not stack or end <= stack[-1] + slack
        stack.append(end)


def test_spans_of_children_slower_than_their_parent_are_nested() -> None:
    _assert_nested(_spans(chrome_trace.render(encoder(3))))


@given(profiles)
def test_spans_of_any_profile_have_a_width(profile: Profile) -> None:
    for by in ("latency", "flops"):
        spans = _spans(chrome_trace.render(profile, View(by=by)))
        assert all(span["dur"] > 0 for span in spans)


@pytest.mark.slow
def test_spans_of_deep_and_wide_trees_are_complete() -> None:
    assert len(_spans(chrome_trace.render(deep(5_000)))) == 5_000
    assert len(_spans(chrome_trace.render(wide(10_000)))) == 10_001


def test_trace_says_that_its_layout_is_synthetic() -> None:
    (process,) = [
        event
        for event in json.loads(chrome_trace.render(lenet5()))["traceEvents"]
        if event["name"] == "process_name"
    ]
    assert "synthetic layout: start times are not measured" in process["args"]["name"]
