"""Assertions on what a model costs, with figures and with stored baselines."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import diff
from dispatch_flops.errors import ProfileFormatError, TargetError
from dispatch_flops.integrations.pytest_plugin import _path_of
from dispatch_flops.integrations.testing import assert_as_baseline, assert_flops, profile_of
from tests.helpers.interpreters import run_python
from tests.helpers.paths import REPOSITORY

B, D, H = 2, 3, 5
MACS = B * D * H


def linear(width: int = H) -> nn.Linear:
    return nn.Linear(D, width, bias=False)


X = torch.ones(B, D)


@pytest.mark.parametrize(
    "inputs", [X, [X], (X,), {"input": X}], ids=["tensor", "list", "tuple", "dict"]
)
def test_assert_flops_accepts_what_is_expected(inputs: object) -> None:
    profile = assert_flops(linear(), inputs, macs=MACS, flops=2 * MACS, params=D * H)
    assert profile.total().bytes_total == 4 * (B * D + D * H + B * H)
    assert_flops(linear(), inputs, bytes=4 * (B * D + D * H + B * H))


def test_assert_flops_names_each_figure_that_differs() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_flops(linear(), X, macs=MACS // 2, flops=2 * MACS, params=1)
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        f"macs: {MACS}, expected {MACS // 2} (2 x)",
        f"params: {D * H}, expected 1 ({D * H} x)",
    ]
    assert lines[3].startswith("Linear: 15 parameters")


@pytest.mark.parametrize(("expected", "passes"), [(MACS, True), (27, False), (28, True)])
def test_assert_flops_allows_the_relative_difference(expected: int, passes: bool) -> None:
    """30 of 28 is 7.1 % more, 30 of 27 is 11 % more."""
    if passes:
        assert_flops(linear(), X, macs=expected, rtol=0.1)
    else:
        with pytest.raises(AssertionError):
            assert_flops(linear(), X, macs=expected, rtol=0.1)


def test_assert_flops_with_backward_counts_it() -> None:
    assert_flops(linear(), X, macs=2 * MACS, backward=True)


def test_assert_flops_without_a_figure_is_refused() -> None:
    with pytest.raises(TargetError, match="nothing to assert; pass one of macs, flops, bytes"):
        assert_flops(linear(), X)


def test_convention_in_place_of_a_figure_is_refused() -> None:
    with pytest.raises(TargetError, match="flops='contractions': pass the number"):
        assert_flops(linear(), X, flops="contractions")  # type: ignore[arg-type]


def test_error_of_a_damaged_baseline_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text("{")
    with pytest.raises(ProfileFormatError, match=r"cost\.json: this is not JSON"):
        assert_as_baseline(profile_of(linear(), X), path, rtol=0, update=False)


def test_each_test_has_a_baseline_of_its_own() -> None:
    ids = ["a b", "a/b", "a_b", "x" * 300 + "1", "x" * 300 + "2", "é" * 300]
    nodes = [
        SimpleNamespace(nodeid=f"test_net.py::test_cost[{i}]", path="test_net.py") for i in ids
    ]
    names = [_path_of(SimpleNamespace(node=node), 12).name for node in nodes]  # type: ignore[arg-type]
    assert len(set(names)) == len(ids)
    assert names[2] == "test_cost[a_b].12.json"
    assert max(len(name.encode()) for name in names) <= 255


def test_baseline_is_written_compared_and_missed(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "cost.json"
    once, twice = profile_of(linear(), X), profile_of(linear(2 * H), X)
    with pytest.raises(AssertionError, match="run pytest --update-flops to write it"):
        assert_as_baseline(once, path, rtol=0, update=False)
    assert_as_baseline(once, path, rtol=0, update=True)
    assert_as_baseline(once, path, rtol=0, update=False)
    with pytest.raises(AssertionError) as caught:
        assert_as_baseline(twice, path, rtol=0.5, update=False)
    message = str(caught.value)
    assert f"macs: {2 * MACS}, expected {MACS} (2 x)" in message
    assert "Module" in message and f"{MACS} -> {2 * MACS}" in message
    assert "Forward" not in message and "Forward" in str(diff(once, twice))
    assert_as_baseline(twice, path, rtol=1, update=False)


TEST = """
import pytest
from torch import nn, ones

@pytest.mark.parametrize("bias", [False, True])
def test_cost(assert_flops, bias):
    assert_flops(nn.Linear(3, WIDTH, bias=bias), [ones(2, 3)])
    assert_flops(nn.Linear(WIDTH, 3, bias=bias), [ones(2, WIDTH)], macs=None)

def test_figures(assert_flops):
    assert_flops(nn.Linear(3, 5), [ones(2, 3)], macs=30)
"""


@pytest.mark.slow
def test_plugin_turns_red_when_a_model_doubles(tmp_path: Path) -> None:
    def pytest_in_a_folder(width: int, *options: str) -> tuple[int, str]:
        (tmp_path / "test_net.py").write_text(TEST.replace("WIDTH", str(width)))
        plugin = ("-p", "dispatch_flops.integrations.pytest_plugin", "-p", "no:cacheprovider")
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = run_python("-m", "pytest", "-q", *plugin, *options, cwd=tmp_path, env=env)
        return done.returncode, done.stdout

    assert pytest_in_a_folder(5, "--update-flops")[0] == 0
    written = sorted(path.name for path in (tmp_path / "flops_baselines" / "test_net").iterdir())
    assert written == [
        "test_cost[False].2.json",
        "test_cost[False].json",
        "test_cost[True].2.json",
        "test_cost[True].json",
    ]
    assert pytest_in_a_folder(5)[0] == 0
    code, out = pytest_in_a_folder(10)
    assert code == 1
    assert "2 failed, 1 passed" in out
    assert "macs: 60, expected 30 (2 x)" in out and "Module" in out


def test_assert_flops_without_tolerance_tells_counts_apart_that_floats_do_not() -> None:
    vast = nn.Linear(2**30, 2**30, bias=False, device="meta")
    inputs, macs = torch.ones(1, 2**30, device="meta"), 2**60
    assert_flops(vast, inputs, macs=macs)
    with pytest.raises(AssertionError, match="macs"):
        assert_flops(vast, inputs, macs=macs + 1)
    assert_flops(vast, inputs, macs=macs + 1, rtol=1e-9)


@pytest.mark.parametrize("option", [{"macs": float("nan")}, {"rtol": -1}, {"rtol": "1%"}], ids=str)
def test_assert_flops_with_an_unusable_number_names_it(option: dict[str, Any]) -> None:
    with pytest.raises(TargetError, match=f"{next(iter(option))}=.*: pass "):
        assert_flops(linear(), X, **{"macs": MACS, **option})


@pytest.mark.parametrize("rtol", [float("nan"), -1, "1%"])
def test_baseline_with_an_unusable_tolerance_names_it(rtol: Any, tmp_path: Path) -> None:
    profile, path = profile_of(linear(), X), tmp_path / "linear.json"
    assert_as_baseline(profile, path, rtol=0, update=True)
    with pytest.raises(TargetError, match="rtol=.*: pass "):
        assert_as_baseline(profile, path, rtol=rtol, update=False)
