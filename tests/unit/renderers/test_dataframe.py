"""Data frames."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from dispatch_flops.profile import OpTotal, Profile
from dispatch_flops.profile.cost import OpCost
from dispatch_flops.renderers import dataframe
from tests.helpers.trees import empty, lower_bound, training_step

pd = pytest.importorskip("pandas")


def test_modules_have_typed_columns_that_add_up() -> None:
    profile = training_step()
    found = dataframe.modules(profile)
    assert list(found["fqn"]) == [node.fqn for node in profile.nodes()]
    assert found["total_flops"].dtype == "Int64"
    assert found["own_flops"].sum() == profile.total().flops
    assert found["lower_bound"].dtype == bool
    assert found.loc[1, "latency_s"] == 38.15e-6
    assert found["backward_latency_s"].isna().all()


def test_operators_without_a_cost_are_missing_values() -> None:
    found = dataframe.operators(lower_bound()).set_index("op")
    assert found["flops"].isna()["lib.mystery.default"]
    assert found.loc["lib.scan.default", "flops"] == 22
    assert found.loc["lib.scan.default", "error"] == "ValueError: no\nlength | here"
    assert found.loc["aten.addmm.default", "error"] is None


def test_counts_beyond_64_bits_stay_exact_integers() -> None:
    cost = OpCost(macs=3**45, flops=2 * 3**45)
    op = OpTotal(op="lib.huge", phase="forward", calls=1, cost=cost)
    profile = Profile(root=dataclasses.replace(empty().root, ops=(op,)))
    assert dataframe.operators(profile).loc[0, "macs"] == 3**45
    assert dataframe.modules(profile).loc[0, "total_flops"] == 2 * 3**45


def test_frames_of_an_empty_run_have_no_operators() -> None:
    assert len(dataframe.operators(empty())) == 0
    assert dataframe.operators(empty())["flops"].sum() == 0
    assert len(dataframe.modules(empty())) == 2


def test_frames_without_pandas_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'dispatch-flops\[pandas\]'"):
        dataframe.modules(empty())
