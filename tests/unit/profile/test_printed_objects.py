"""What Python and notebooks show of profiles' parts, of differences and of counters."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re

import torch
from torch import nn

from dispatch_flops import (
    FlopCounterMode,
    FlopsProfiler,
    OpCost,
    Profile,
    StepProfiler,
    diff,
    plan,
)
from dispatch_flops.analysis import MACHINES
from dispatch_flops.profile import OpTotal
from dispatch_flops.renderers import cluster_table, plan_table
from tests.helpers.clusters import four_ranks
from tests.helpers.trees import lower_bound, module, unknown

B, D, H = 2, 3, 5
MACS = B * D * H + B * H * D


def counted(rows: int = B) -> FlopCounterMode:
    model = nn.Sequential(nn.Linear(D, H, bias=False), nn.Linear(H, D, bias=False))
    x = torch.ones(rows, D)
    with FlopCounterMode(model, display=False) as counter:
        model(x)
    return counter


def test_by_module_prints_a_line_per_module() -> None:
    costs = counted().profile.by_module()
    lines = str(costs).splitlines()
    assert lines[0].split() == ["Module", "MACs", "FLOPs", "Bytes"]
    assert [line.split()[:2] for line in lines[2:]] == [
        ["(model)", str(MACS)],
        ["0", str(B * D * H)],
        ["1", str(B * H * D)],
    ]
    assert costs._repr_html_().count("<tr>") == 1 + 3


def test_by_module_marks_costs_that_leave_out_an_operator() -> None:
    """The operator is in the model's forward, and in no layer."""
    profile = counted().profile
    unknown = OpTotal(op="lib.a", phase="forward", calls=1, uncounted=1, cost=None, kind="unknown")
    root = dataclasses.replace(profile.root, ops=(*profile.root.ops, unknown))
    bound = dataclasses.replace(profile, root=root)

    for phase, of_model in ((None, f">= {MACS}"), ("forward", f">= {MACS}"), ("backward", "0")):
        rows = [re.split("  +", line.strip()) for line in str(bound.by_module(phase)).splitlines()]
        assert rows[2][:2] == ["(model)", of_model]
        assert not any(cell.startswith(">=") for row in rows[3:] for cell in row)
    assert f"&gt;= {MACS}" in bound.by_module()._repr_html_()


def test_by_module_marks_the_modules_above_an_operator_without_a_cost() -> None:
    partly = module("B", name="b", parent="a", ops=(unknown("lib.a"),))
    block = module("A", partly, module("B", name="c", parent="a"), name="a")
    profile = Profile(root=module("Net", block, module("A", name="d")))
    assert profile.by_module().lower_bounds == {"", "a", "a.b"}


def test_profile_that_leaves_out_an_operator_says_at_least() -> None:
    assert repr(counted().profile).startswith(f"<Profile of Sequential: {MACS} MACs, ")
    assert repr(lower_bound()).startswith("<Profile of Net: at least ")


def test_by_operator_prints_a_line_per_operator() -> None:
    operators = counted().profile.by_operator()
    line = next(line for line in str(operators).splitlines() if line.startswith("aten.mm"))
    assert line.split()[:4] == ["aten.mm.default", "2", str(MACS), str(2 * MACS)]
    assert "<td" in operators._repr_html_()


def test_costs_remain_a_plain_dict_for_users() -> None:
    costs = counted().profile.by_module()
    plain = dict(costs)
    assert isinstance(costs, dict) and costs == plain and repr(costs) == repr(plain)
    assert type(pickle.loads(pickle.dumps(costs))) is dict
    assert copy.deepcopy(costs) == plain
    assert json.dumps({fqn: cost.macs for fqn, cost in costs.items()})


def test_long_table_in_a_notebook_says_how_many_rows_follow() -> None:
    class Deep(nn.Sequential):
        pass

    with FlopCounterMode(Deep(*[nn.Identity() for _ in range(120)]), display=False) as counter:
        pass
    page = counter.profile.by_module()._repr_html_()
    assert "… 21 more" in page and page.count("<tr>") == 1 + 100 + 1


def test_module_node_prints_its_own_tree() -> None:
    node = counted().profile.node("1")
    assert str(node).startswith(f"Linear: {H * D} parameters, {B * H * D} MACs")
    assert "Sequential" not in str(node)
    assert repr(node) == (
        f"ModuleNode(fqn='1', class_name='Linear', calls=1, total_params={H * D}, children=0)"
    )
    assert "<table" in node._repr_html_()


def test_diff_prints_what_changed() -> None:
    compared = diff(counted().profile, counted(2 * B).profile)
    flops = 2 * MACS
    assert repr(compared) == (
        f"<Diff: {flops} FLOPs, then {2 * flops}; changed modules: 3, operators: 1>"
    )
    assert f"{MACS} -> {2 * MACS}" in str(compared)
    assert "Module" in str(compared) and "aten.mm.default" in str(compared)
    assert compared._repr_html_().count("<table") == 3


def test_diff_without_a_change_says_so() -> None:
    compared = diff(counted().profile, counted().profile)
    assert str(compared).endswith("No count changed.")
    assert "No count changed." in compared._repr_html_()
    assert not compared.has_changed


def test_diff_of_empty_profiles_is_printed() -> None:
    profile = Profile.from_json(counted().profile.to_json())
    assert OpCost() == diff(profile, profile, "backward").total.after.cost  # type: ignore[union-attr]


def test_counter_shows_its_models_and_state() -> None:
    model = nn.Linear(D, H, bias=False)
    counter = FlopCounterMode({"G": model}, display=False)
    assert repr(counter) == str(counter) == "<FlopCounterMode of G: not entered>"
    assert counter._repr_html_() is None
    with counter:
        model(torch.ones(B, D))
        counts = f"{B * D * H} MACs, {2 * B * D * H} FLOPs"
        assert repr(counter) == f"<FlopCounterMode of G: counting, {counts}>"
        assert f"{B * D * H} MACs" in str(counter)
    assert repr(counter) == f"<FlopCounterMode of G: {counts}>"
    assert repr(FlopCounterMode([model])) == "<FlopCounterMode of Linear: not entered>"
    assert repr(FlopCounterMode()) == "<FlopCounterMode: not entered>"
    assert str(counter).startswith("models: 15 parameters")
    assert "<table" in (counter._repr_html_() or "")


def test_plan_shows_its_size_and_prints_its_table() -> None:
    planned = plan(
        lambda batch: (nn.Linear(D, H), (torch.ones(batch, D),)),
        MACHINES["NVIDIA H200"],
        sizes={"batch": [2, 3]},
        search_batch=False,
    )
    assert repr(planned) == "<Plan for NVIDIA H200; choices: 2>"
    assert str(planned) == plan_table.render(planned)


def test_cluster_shows_its_size_and_prints_its_tables() -> None:
    cluster = four_ranks()
    first = dataclasses.replace(
        cluster, profiles={0: cluster.profiles[0]}, represented={1: 0, 2: 0}
    )
    assert repr(cluster) == "<ClusterProfile of 4 ranks: 4 profiled>"
    assert repr(first) == "<ClusterProfile of 4 ranks: 1 profiled, 2 represented, 1 missing>"
    assert str(cluster) == cluster_table.render(cluster)


def test_profilers_show_their_profile_or_why_there_is_none() -> None:
    model = nn.Linear(D, H, bias=False)
    profiler = FlopsProfiler(model)
    steps = StepProfiler(model, torch.optim.SGD(model.parameters()), {"profile_step": 1})
    assert repr(profiler).startswith("<FlopsProfiler: nothing is profiled yet: call start_prof")
    assert repr(steps).startswith("<StepProfiler: nothing is profiled: `enabled` is false")
    profiler.start_profile()
    model(torch.ones(B, D))
    profiler.end_profile()
    assert repr(profiler) == f"<FlopsProfiler: {profiler.profile!r}>"
