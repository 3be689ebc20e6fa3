"""Several ranks side by side: two stages of two ranks, each rank with figures of its own."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from dispatch_flops.errors import ConfigError, ProfileFormatError
from dispatch_flops.profile import OUTSIDE, ModuleNode, Profile, StepTiming
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profile.cost import OpCost, Phase
from dispatch_flops.profile.mesh_positions import (
    coordinates_of,
    mesh_dims,
    named_ranks,
    ranks_text,
)
from tests.helpers.clusters import MACS, MESH, PAYLOAD, SECONDS, four_ranks, of_rank
from tests.helpers.trees import module, op, timed


def in_another_run(**run: object) -> Profile:
    """Return the profile of rank 1 with other facts of the run."""
    profile = of_rank(1)
    return dataclasses.replace(profile, run=dataclasses.replace(profile.run, **run))  # type: ignore[arg-type]


def test_merge_keeps_every_rank() -> None:
    merged = four_ranks()
    assert list(merged.ranks) == [0, 1, 2, 3]
    assert merged.ranks[2] == of_rank(2)
    assert merged.world_size == 4
    assert merged.missing == ()
    assert merged.mesh == MESH


def test_total_is_the_sum_over_ranks() -> None:
    assert four_ranks().total().macs == sum(MACS)
    assert four_ranks().total("forward").flops == 2 * sum(MACS)
    assert four_ranks().total("backward").flops == 0
    assert four_ranks().communication().payload_bytes == sum(PAYLOAD)
    assert four_ranks().communication("backward").calls == 4
    assert four_ranks().communication("forward").calls == 0


def test_spread_names_least_most_and_straggler() -> None:
    merged = four_ranks()
    assert merged.minimum("macs") == min(MACS)
    assert merged.maximum("flops") == 2 * max(MACS)
    assert merged.straggler("flops") == 3
    assert merged.imbalance("macs") == 22 / (sum(MACS) / 4)
    assert merged.maximum("bytes") == merged.minimum("bytes") == 12
    assert merged.imbalance("bytes") == 1.0
    assert merged.maximum("communication") == 320
    assert merged.straggler("time") == 3
    assert merged.maximum("time") == 1.0
    assert merged.minimum("params") == 10


def test_params_of_a_rank_are_those_that_it_holds() -> None:
    """13 rows of 7 are sharded over two ranks in parts of 7 and 6 rows."""
    merged = ClusterProfile.merge(holding(rank, rows * 7) for rank, rows in enumerate((7, 6)))
    spread = merged.spread("params")
    assert spread is not None
    assert (spread.minimum, spread.maximum, spread.total) == (6 * 7, 7 * 7, 13 * 7)
    assert merged.by_module("params")[0, "layers.0"] == spread


def holding(rank: int, local_params: int) -> Profile:
    """Return the profile of a rank that holds as many of 13 * 7 parameters."""

    def shard(node: ModuleNode) -> ModuleNode:
        return dataclasses.replace(node, total_params=13 * 7, local_params=local_params)

    return of_rank(rank).map_nodes(shard)


def test_phase_of_some_ranks_is_0_on_the_others() -> None:
    extra = dataclasses.replace(of_rank(1), outside=with_setup())
    merged = ClusterProfile.merge([of_rank(0), extra])
    assert four_ranks().total("setup") == OpCost()
    assert merged.total("setup").macs == 13
    assert merged.minimum("macs", "setup") == 0  # type: ignore[arg-type]
    assert merged.straggler("macs", "setup") == 1  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'warm-up' is not a phase"):
        merged.total("warm-up")  # type: ignore[arg-type]


def with_setup() -> ModuleNode:
    ops = (op("aten.mm.default", "setup", macs=13),)  # type: ignore[arg-type]
    return ModuleNode(fqn=OUTSIDE, name=OUTSIDE, class_name="outside", ops=ops)


def test_figure_that_was_not_measured_is_none() -> None:
    untimed = [dataclasses.replace(of_rank(rank), timing=StepTiming()) for rank in range(4)]
    merged = ClusterProfile.merge(untimed)
    assert merged.spread("time") is None
    assert merged.straggler("time") is merged.imbalance("time") is None


def test_time_of_a_forward_pass_may_be_that_of_the_model() -> None:
    """A counter with ``latency=True`` times the forward of modules, and all that ran together."""

    def seconds_of(node: ModuleNode) -> ModuleNode:
        return dataclasses.replace(node, seconds=timed(forward=0.25, backward=0.75))

    profile = dataclasses.replace(of_rank(0).map_nodes(seconds_of), timing=StepTiming())
    merged = ClusterProfile.merge([profile])
    assert merged.maximum("time", "forward") == merged.maximum("time") == 0.25
    assert merged.by_module("time", "forward")[0, ""].maximum == 0.25


def test_time_of_a_module_is_not_known_where_a_phase_that_ran_in_it_was_not_measured() -> None:
    """Forward alone is timed; backward runs in one of the two modules."""
    trained = (op("aten.mm.default", macs=6), op("aten.mm.default", "backward", macs=6))
    frozen = module("Linear", name="0", ops=trained[:1])
    root = module("Net", frozen, module("Linear", name="1", ops=trained))
    timed_root = dataclasses.replace(of_rank(0), root=root).map_nodes(
        lambda node: dataclasses.replace(node, seconds=timed(forward=0.25))
    )
    merged = ClusterProfile.merge([timed_root])
    assert {fqn for _, fqn in merged.by_module("time")} == {"0"}
    assert {fqn for _, fqn in merged.by_module("time", "forward")} == {"", "0", "1"}


def test_time_of_phases_is_not_known_where_one_that_ran_was_not_measured() -> None:
    """Rank 1 ran a setup that was not timed. Recomputation takes part of the backward's time."""
    extra = dataclasses.replace(of_rank(1), outside=with_setup())
    timing = StepTiming(seconds=timed(forward=0.25, backward=0.5))
    recomputing = dataclasses.replace(of_rank(2), outside=with_recomputation(), timing=timing)
    merged = ClusterProfile.merge([of_rank(0), extra, recomputing])
    times = [merged.value(rank, "time") for rank in (0, 1, 2)]
    assert times == [SECONDS[0], None, 0.25 + 0.5]
    assert merged.value(1, "time", "forward") == SECONDS[1]
    assert merged.value(2, "time", "backward") == 0.5
    assert merged.spread("time", "recompute") is None
    without_operators = Profile(root=ModuleNode(fqn="", class_name="Net"), timing=timing)
    assert ClusterProfile.merge([without_operators]).value(0, "time") == 0.25 + 0.5


def with_recomputation() -> ModuleNode:
    ops = (op("aten.mm.default", "recompute", macs=17), op("aten.mm.default", "backward", macs=34))
    return ModuleNode(fqn=OUTSIDE, name=OUTSIDE, class_name="outside", ops=ops)


def test_time_of_a_phase_that_a_formula_named_is_not_measured() -> None:
    ops = (op("lib.scan.default", "warm-up", macs=19),)  # type: ignore[arg-type]
    outside = ModuleNode(fqn=OUTSIDE, name=OUTSIDE, class_name="outside", ops=ops)
    merged = ClusterProfile.merge([dataclasses.replace(of_rank(0), outside=outside)])
    phase: Phase = "warm-up"  # type: ignore[assignment]
    assert merged.maximum("macs", phase) == 19
    assert merged.spread("time", phase) is None


def test_along_a_mesh_dimension_has_the_ranks_at_each_position() -> None:
    stages = four_ranks().along("pp")
    assert {at: list(part.ranks) for at, part in stages.items()} == {0: [0, 1], 1: [2, 3]}
    assert stages[1].maximum("macs") == 22
    replicas = four_ranks().along("dp")
    assert {at: list(part.ranks) for at, part in replicas.items()} == {0: [0, 2], 1: [1, 3]}
    with pytest.raises(ConfigError, match="choose one of pp, dp"):
        four_ranks().along("tp")


def test_rank_that_knows_no_mesh_has_its_position_in_that_of_the_others() -> None:
    """The stage of ranks 2 and 3 has no sharded parameters, which would name the mesh."""
    merged = ClusterProfile.merge(with_mesh(rank, None if rank > 1 else MESH) for rank in range(4))
    assert merged.mesh == MESH
    assert merged.coordinates(3) == {"pp": 1, "dp": 1}
    assert merged.along("pp")[1].total().macs == MACS[2] + MACS[3]
    assert ClusterProfile.merge([with_mesh(0, None), with_mesh(2, MESH)]).mesh == MESH


def test_ranks_may_have_meshes_of_their_own() -> None:
    """Tensor parallelism in the first stage, context parallelism in the second."""
    meshes = ({"tp": 2}, {"tp": 2}, {"cp": 2}, {"cp": 2})
    merged = ClusterProfile.merge(map(with_mesh, range(4), meshes))
    assert merged.mesh is None
    assert merged.coordinates(1) == {"tp": 1}
    assert merged.coordinates(2) == {"cp": 0}
    assert merged.total().macs == sum(MACS)


def with_mesh(rank: int, mesh: dict[str, int] | None) -> Profile:
    profile = of_rank(rank)
    dims = None if mesh is None else mesh_dims(rank % math.prod(mesh.values()), mesh)
    return dataclasses.replace(profile, run=dataclasses.replace(profile.run, mesh=dims))


def test_by_module_keys_stages_apart() -> None:
    modules = four_ranks().by_module("macs")
    assert (modules[0, "layers.0"].minimum, modules[0, "layers.0"].maximum) == (6, 10)
    assert (modules[1, "layers.0"].minimum, modules[1, "layers.0"].maximum) == (14, 22)
    assert modules[1, ""].straggler == 3
    assert four_ranks().by_module("communication")[1, "layers.0"].total == 64 + 320


@pytest.mark.parametrize("method", ["communication", "by_module", "spread"])
def test_what_is_not_a_phase_is_an_error(method: str) -> None:
    with pytest.raises(ConfigError, match="'training' is not a phase; choose one of forward"):
        getattr(four_ranks(), method)(phase="training")


def test_what_is_not_a_figure_of_modules_is_an_error() -> None:
    with pytest.raises(ConfigError, match="by='speed': choose one of macs, flops"):
        four_ranks().by_module("speed")  # type: ignore[arg-type]


def test_represented_ranks_count_as_their_representative() -> None:
    merged = ClusterProfile(
        profiles={0: of_rank(0), 2: of_rank(2)}, represented={1: 0, 3: 2}, world_size=4
    )
    assert merged.total().macs == 2 * (MACS[0] + MACS[2])
    assert list(merged.ranks) == [0, 1, 2, 3]
    assert merged.ranks[3] is merged.profiles[2]
    assert merged.missing == ()
    spread = merged.spread("macs")
    assert spread is not None
    assert (spread.ranks, spread.straggler) == (4, 2)
    part = merged.along("dp")[1]
    assert (list(part.ranks), part.total().macs) == ([1, 3], MACS[0] + MACS[2])
    assert part.stage(3) == 1
    assert part.coordinates(1) == {"pp": 0, "dp": 1}
    assert part.along("pp")[1].straggler() == 3
    assert merged.coordinates(3) == {"pp": 1, "dp": 1}


def test_represented_rank_may_come_before_its_representative() -> None:
    merged = ClusterProfile(
        profiles={2: of_rank(2), 3: of_rank(3)}, represented={0: 2, 1: 3}, world_size=4
    )
    spread = merged.spread("macs")
    assert spread is not None
    most = max((2, 3), key=MACS.__getitem__)
    assert (spread.maximum, spread.straggler) == (MACS[most], most - 2)
    part = merged.along("dp")[1]
    assert (list(part.profiles), dict(part.represented)) == ([3], {1: 3})


def test_time_of_all_phases_is_that_of_the_iteration_if_it_was_measured() -> None:
    timing = StepTiming(seconds=timed(forward=1.0, backward=2.0), iteration_s=5.0)
    profile = dataclasses.replace(of_rank(0), timing=timing)
    merged = ClusterProfile(profiles={0: profile}, world_size=1)
    assert (merged.value(0, "time"), merged.value(0, "time", "backward")) == (5.0, 2.0)


def test_missing_ranks_are_named() -> None:
    merged = ClusterProfile.merge([of_rank(0), of_rank(3)])
    assert merged.missing == (1, 2)
    assert merged.total().macs == MACS[0] + MACS[3]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"world_size": 8}, "world_size is 4 on rank 0 and 8 on rank 1"),
        ({"mesh": mesh_dims(1, {"dp": 4})}, "mesh is .* on rank 0 and {'dp': 4} on rank 1"),
        ({"causal": "half"}, "causal is full on rank 0 and half on rank 1"),
        ({"subclass": "logical"}, "subclass is executed on rank 0 and logical on rank 1"),
        ({"step": 7}, "step is 1 on rank 0 and 7 on rank 1"),
        ({"rank": 0}, "two profiles are of rank 0"),
        ({"rank": 4}, "rank 4 is not below world_size=4"),
    ],
)
def test_profiles_of_different_runs_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterProfile.merge([of_rank(0), in_another_run(**changed)])


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        (None, "profiles is of type NoneType; pass a list"),
        ("rank0.json", "profiles is of type str; pass a list"),
        (of_rank(0), "profiles is of type Profile; pass a list"),
        ([of_rank(0), "rank1.json"], "one of the profiles is of type str; pass a Profile"),
    ],
)
def test_merging_what_is_not_a_list_of_profiles_is_refused(profiles: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterProfile.merge(profiles)


@pytest.mark.parametrize("rank", [-1, 4, "0", None])
def test_coordinates_of_a_rank_outside_the_run_are_refused(rank: Any) -> None:
    merged = ClusterProfile.merge(map(with_mesh, range(4), [MESH] * 4))
    assert merged.coordinates(3) == {"pp": 1, "dp": 1}
    with pytest.raises(ConfigError, match="out of range; the run has ranks 0 to 3"):
        merged.coordinates(rank)


def test_merging_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to merge"):
        ClusterProfile.merge([])


def test_json_gives_back_an_equal_four_ranks() -> None:
    for merged in (
        four_ranks(),
        ClusterProfile(
            profiles={0: of_rank(0), 2: of_rank(2)},
            represented={1: 0, 3: 2},
            world_size=4,
            notes=("a note",),
        ),
    ):
        assert ClusterProfile.from_json(merged.to_json()) == merged


@pytest.mark.parametrize("text", [None, 7, of_rank(0)])
def test_what_is_not_text_is_a_format_error(text: Any) -> None:
    with pytest.raises(ProfileFormatError, match="is of type .*; pass the text of its file"):
        ClusterProfile.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "dispatch_flops.profile"},
        {"version": 2},
        {"profiles": []},
        {"profiles": [{"rank": 5, "profile": of_rank(0).to_dict()}]},
        {"profiles": [{"rank": -1, "profile": of_rank(0).to_dict()}]},
        {"profiles": [{"rank": 4, "profile": of_rank(0).to_dict()}], "represented": []},
        {"represented": [{"by": 9, "ranks": [1]}]},
        {"represented": [{"by": 0, "ranks": [0]}]},
        {"world_size": "4"},
        {"notes": "not a list"},
    ],
)
def test_damaged_data_is_a_format_error(change: dict[str, object]) -> None:
    data = json.loads(four_ranks().to_json()) | change
    with pytest.raises(ProfileFormatError):
        ClusterProfile.from_dict(data)


def test_ranks_text_joins_neighbours() -> None:
    assert ranks_text([5, 0, 1, 2]) == "0-2, 5"
    assert ranks_text([]) == ""


def test_named_ranks_agree_with_their_number() -> None:
    assert named_ranks([3]) == "rank 3"
    assert named_ranks([5, 0, 1, 2]) == "ranks 0-2, 5"


def test_coordinates_of_counts_the_last_dimension_fastest() -> None:
    assert coordinates_of(777, {"pp": 2, "dp": 64, "tp": 8}) == {"pp": 1, "dp": 33, "tp": 1}
