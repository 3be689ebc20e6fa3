"""Plans as plain data: what is unknown is None, lower bounds say so, and JSON has no NaN."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dispatch_flops.analysis.machine_files import load_machine
from dispatch_flops.analysis.machines import MACHINES, Link, Machine
from dispatch_flops.analysis.memory_fit import LARGEST_SEARCHED
from dispatch_flops.analysis.plain_figures import PlainFigures, plain
from dispatch_flops.analysis.planned import Plan, planned_step
from dispatch_flops.analysis.planned_generation import (
    GenerationPlan,
    GenerationStep,
    PlannedGeneration,
)
from dispatch_flops.analysis.step_bounds import step_bounds
from dispatch_flops.profile import Profile
from dispatch_flops.profile.cost import OpCost
from tests.helpers.trees import training_step, unknown

MACHINE = Machine(name="mine", flops_per_s={"float32": 1e9}, memory_bytes=7e9)


def row_of(profile: Profile, machine: Machine = MACHINE, **given: Any) -> dict[str, Any]:
    step = planned_step(profile, machine, {"batch": 3}, **given)
    (row,) = json.loads(Plan(machine=machine, steps=(step,)).to_json())["steps"]
    found: dict[str, Any] = row
    return found


def test_figures_that_are_not_known_are_null() -> None:
    row = row_of(training_step())
    assert row["bounds"]["memory_s"] is None and row["bounds"]["least_s"] is None
    assert row["bounds"]["mfu_ceiling"][0] is None and row["bounds"]["bound"] is None
    assert row["tokens"] is None and row["tokens_per_s"] == [None, None]
    assert row["largest_batch"] is None and row["cluster"] is None


def test_memory_that_was_not_followed_is_null_and_not_0() -> None:
    profile = training_step()
    assert profile.memory is None
    row = row_of(profile)
    names = ("memory", "peak_bytes", "memory_by_role", "headroom_bytes", "fits")
    assert [row[name] for name in names] == [None] * 5

    step = GenerationStep(
        machine=MACHINE, profile=profile, bounds=step_bounds(profile, MACHINE),
        cache_bytes=5, read_bytes=7, tokens=(3, 3),
    )  # fmt: skip
    choice = PlannedGeneration(
        sizes={"batch": 3}, machine=MACHINE, prefill=None, decode=step, last=None, steps=(1, 1)
    )
    (row,) = GenerationPlan(machine=MACHINE, choices=(choice,)).to_dict()["choices"]
    assert [row[name] for name in ("peak_bytes", "headroom_bytes", "fits")] == [None] * 3
    assert [row["decode"][name] for name in ("peak_bytes", "memory_by_role")] == [None] * 2
    assert (row["passes"], row["highest"], row["prefill"]) == (["decode"], "decode", None)


@pytest.mark.parametrize(("batch", "is_bound"), [(LARGEST_SEARCHED, True), (11, False)])
def test_largest_batch_at_the_end_of_the_search_is_a_lower_bound(batch: int, is_bound) -> None:
    row = row_of(training_step(), largest_batch=batch)
    assert row["largest_batch"] == batch and row["largest_batch_is_lower_bound"] is is_bound


def test_cost_that_leaves_out_an_operator_is_a_lower_bound() -> None:
    profile = training_step()
    assert row_of(profile)["profile"]["is_lower_bound"] is False
    fused = unknown("mylib.fused.default", calls=3)
    outside = dataclasses.replace(profile.outside, ops=(*profile.outside.ops, fused))
    row = row_of(dataclasses.replace(profile, outside=outside))
    assert row["profile"]["is_lower_bound"] is True
    assert row["profile"]["uncounted_ops"] == {"mylib.fused.default": 3}


def test_machine_is_as_a_file_describes_it(tmp_path) -> None:
    links = {"node_link": Link(bytes_per_s=7e6, latency_s=1e-3), "devices_per_node": 2}
    mine = dataclasses.replace(MACHINE, aliases=("m",), **links)
    for machine in (mine, dataclasses.replace(mine, memory_bytes=2.5), *MACHINES.values()):
        written = Plan(machine=machine, steps=()).to_dict()["machine"]
        (tmp_path / "machine.json").write_text(json.dumps(written))
        assert load_machine(tmp_path / "machine.json") == machine
    assert type(written["memory_bytes"]) is int


def test_numbers_that_json_does_not_know_are_null() -> None:
    assert plain([float("nan"), float("inf"), -float("inf"), 2.5, 10**400]) == [
        None, None, None, 2.5, 10**400,
    ]  # fmt: skip

    class Unknown(PlainFigures):
        def to_dict(self) -> dict[str, Any]:
            return {"s": float("nan")}

    with pytest.raises(ValueError):
        Unknown().to_json()


def test_arithmetic_intensity_that_exceeds_a_float_is_null() -> None:
    assert plain(OpCost(flops=10**400, bytes_read=1))["arithmetic_intensity"] is None


def test_sizes_of_other_types_are_their_texts() -> None:
    assert plain({"dtype": complex(1, 2), 3: True}) == {"dtype": "(1+2j)", "3": True}
