"""The formats for other programs: JSON, CSV, collapsed stacks, Chrome trace."""

from __future__ import annotations

import csv as stdlib_csv
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from dispatch_flops.analysis.figures import Key
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import Profile
from dispatch_flops.profile.cost import PHASES
from dispatch_flops.renderers import chrome_trace, collapsed, csv
from dispatch_flops.renderers import json as json_renderer
from tests.helpers.trees import (
    HOSTILE_NAMES,
    SMALL,
    deep,
    encoder,
    lenet5,
    profiles,
    training_step,
    wide,
)

Golden = Callable[[str, str], None]


@pytest.mark.parametrize("name", ["training_step", "hostile", "lower_bound"])
def test_golden(name: str, golden: Golden) -> None:
    profile = SMALL[name]().check()
    golden(f"{name}.json", json_renderer.render(profile) + "\n")
    golden(f"{name}_modules.csv", csv.modules(profile))
    golden(f"{name}_operators.csv", csv.operators(profile))
    golden(f"{name}_collapsed.txt", collapsed.render(profile))
    golden(f"{name}_trace.json", chrome_trace.render(profile) + "\n")


@given(profiles)
def test_json_comes_back_equal(profile: Profile) -> None:
    assert Profile.from_json(json_renderer.render(profile)) == profile


# -- CSV ----------------------------------------------------------------------------------------


def _rows(text: str) -> list[dict[str, str]]:
    return list(stdlib_csv.DictReader(io.StringIO(text, newline="")))


def test_csv_of_modules() -> None:
    rows = {row["fqn"]: row for row in _rows(csv.modules(training_step()))}
    assert list(rows) == ["", "0", "1", "2", "<outside>"]
    assert int(rows["0"]["forward_macs"]) == 4 * 64 * 256
    assert int(rows[""]["total_macs"]) == 5 * 4 * 64 * 256
    assert int(rows[""]["total_params"]) == 2 * 64 * 256 + 64 + 256
    assert rows["0"]["latency_s"] == "3.815e-05"
    assert rows["0"]["backward_latency_s"] == ""  # not measured, which is not 0
    assert float(rows[""]["latency_s"]) == pytest.approx(38.15e-6 + 15.74e-6 + 15.02e-6)
    assert rows["2"]["depth"] == "1"


def test_csv_of_operators() -> None:
    rows = _rows(csv.operators(training_step()))
    assert sum(int(row["macs"]) for row in rows) == 5 * 4 * 64 * 256
    assert {row["phase"] for row in rows} == set(PHASES)
    unknown = [
        row for row in _rows(csv.operators(SMALL["lower_bound"]())) if row["uncounted"] == "4"
    ]
    assert unknown[0]["macs"] == ""
    header = csv.operators(training_step()).splitlines()[0]
    assert csv.operators(SMALL["empty"]()) == f"{header}\n"


def test_csv_keeps_hostile_names() -> None:
    text = csv.modules(SMALL["hostile"]())
    text.encode()  # no lone surrogate is left
    names = [name.replace("\ud800", "\\ud800") for name in HOSTILE_NAMES]
    assert [row["class_name"] for row in _rows(text)[1:-1]] == names


@given(profiles)
def test_csv_holds_everything(profile: Profile) -> None:
    modules = _rows(csv.modules(profile))
    assert len(modules) == len(list(profile.nodes()))
    assert sum(int(row["own_flops"]) for row in modules) == profile.total().flops
    operators = _rows(csv.operators(profile))
    assert sum(int(row["flops"] or 0) for row in operators) == profile.total().flops


# -- collapsed stacks ---------------------------------------------------------------------------


def test_collapsed_stacks() -> None:
    lines = collapsed.render(lenet5(), by="macs").splitlines()
    assert lines[0] == (
        "LeNet5;feature_extractor:Sequential;0:Conv2d;aten.convolution.default "
        f"{1024 * 6 * 25 * 28 * 28}"
    )
    assert len(lines) == 5
    params = collapsed.render(lenet5(), by="params").splitlines()
    assert params[-1] == f"LeNet5;classifier:Sequential;2:Linear {84 * 10 + 10}"
    latency = collapsed.render(lenet5(), by="latency").splitlines()
    assert "LeNet5;classifier:Sequential;2:Linear 62700" in latency


@pytest.mark.parametrize("by", ["macs", "flops", "bytes", "params"])
@given(profile=profiles)
def test_collapsed_weights_add_up(by: Key, profile: Profile) -> None:
    lines = collapsed.render(profile, by=by).splitlines()
    expected = {
        "macs": profile.total().macs,
        "flops": profile.total().flops,
        "bytes": profile.total().bytes_total,
        "params": profile.total_params,
    }[by]
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == expected


def test_collapsed_phase() -> None:
    text = collapsed.render(training_step(), by="macs", phase="backward")
    assert sum(int(line.rpartition(" ")[2]) for line in text.splitlines()) == 3 * 4 * 64 * 256


def test_collapsed_frames_are_no_separators() -> None:
    lines = collapsed.render(SMALL["hostile"]()).splitlines()
    assert len(lines) == len(HOSTILE_NAMES)
    assert all(line.count(";") == 2 for line in lines)
    "\n".join(lines).encode()


# -- Chrome trace -------------------------------------------------------------------------------


def _spans(text: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]


def test_trace_by_latency() -> None:
    spans = {span["args"]["fqn"]: span for span in _spans(chrome_trace.render(lenet5()))}
    assert spans[""]["dur"] == pytest.approx(216.68e3)
    conv, tanh = spans["feature_extractor.0"], spans["feature_extractor.1"]
    assert conv["ts"] == 0
    assert tanh["ts"] == pytest.approx(conv["dur"])
    assert conv["args"]["macs"] == 1024 * 6 * 25 * 28 * 28


def test_trace_by_flops_has_a_track_per_phase() -> None:
    spans = _spans(chrome_trace.render(training_step(), by="flops"))
    roots = {span["cat"]: span for span in spans if span["args"]["fqn"] == ""}
    assert set(roots) == {"forward", "backward", "recompute"}
    assert roots["recompute"]["dur"] == pytest.approx(4 * 256 / 1e6)
    assert len({span["tid"] for span in roots.values()}) == 3


def test_trace_by_anything_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="macs"):
        chrome_trace.render(lenet5(), by="macs")  # type: ignore[arg-type]


def test_trace_falls_back_to_flops() -> None:
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


def test_trace_spans_nest_though_children_outlast_their_parent() -> None:
    _assert_nested(_spans(chrome_trace.render(encoder(3))))


@given(profiles)
def test_trace_of_any_profile(profile: Profile) -> None:
    for by in ("latency", "flops"):
        spans = _spans(chrome_trace.render(profile, by=by))
        assert all(span["dur"] > 0 for span in spans)


def test_deep_and_wide_trees() -> None:
    assert len(_spans(chrome_trace.render(deep(5_000)))) == 5_000
    assert len(_spans(chrome_trace.render(wide(10_000)))) == 10_001
    assert len(collapsed.render(wide(10_000)).splitlines()) == 10_000
    assert len(_rows(csv.modules(wide(10_000)))) == 10_002
    assert len(collapsed.render(deep(1_500)).splitlines()) == 1_500
