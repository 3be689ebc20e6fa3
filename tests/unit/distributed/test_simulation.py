"""A simulated rank equals the real one, and both equal closed forms."""

from __future__ import annotations

import copy
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dispatch_flops import FlopCounterMode, Profile
from dispatch_flops.distributed import ClusterProfile, gather, simulate
from dispatch_flops.distributed.simulation import _verification_notes
from dispatch_flops.errors import ConfigError, TargetError
from tests.helpers.paths import REPOSITORY
from tests.helpers.profiling import TORCH
from tests.helpers.ranks import ATTEMPTS, figures, peaks, run_on_ranks
from tests.helpers.trees import training_step
from tests.models import parallel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    # of torch.export, which traces models for pipelines
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
]

FOUR_RANKS = {
    "ddp": [("dp", 4)],
    "plain_ddp": [("dp", 4)],
    "clipped_ddp": [("dp", 4)],
    "partly_used_ddp": [("dp", 4)],
    "partly_used_static_ddp": [("dp", 4)],
    "fsdp1_unsharded": [("dp", 4)],
    "fsdp_from_meta": [("dp", 4)],
    "fsdp_even": [("dp", 4)],
    "fsdp_steady": [("dp", 4)],
    "fsdp_resharding": [("dp", 4)],
    "fsdp_tp": [("dp", 2), ("tp", 2)],
    "pipeline": [("pp", 2), ("dp", 2)],
    "traced_pipeline": [("pp", 2), ("dp", 2)],
}
if TORCH >= (2, 12):  # before, stages send tensors as metadata, which a simulated rank cannot
    FOUR_RANKS["dynamic_pipeline"] = [("pp", 2), ("dp", 2)]
    FOUR_RANKS["interleaved"] = [("pp", 4)]


def run_jobs() -> dict[str, list[str]]:
    """Run every job as one of the real ranks; rank 0 returns its merged profiles as JSON."""
    clusters: dict[str, list[str]] = {}
    for name, dims in FOUR_RANKS.items():
        mesh = init_device_mesh(
            "cpu", tuple(size for _, size in dims), mesh_dim_names=tuple(dim for dim, _ in dims)
        )
        for _ in range(ATTEMPTS):
            built = getattr(parallel, name)(mesh)
            model, step = built if isinstance(built, tuple) else (None, built)
            with FlopCounterMode(model, display=False, memory=True, mesh=mesh) as counter:
                step()
            cluster = gather(counter.profile, timeout_s=60)
            if cluster is not None:
                clusters.setdefault(name, []).append(cluster.to_json())
    return clusters


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[ClusterProfile]]:
    results = run_on_ranks(__file__, ["run_jobs"], 4, tmp_path_factory.mktemp("ranks"))
    attempts: dict[str, list[str]] = results.of("run_jobs")[0]
    return {name: [*map(ClusterProfile.from_json, texts)] for name, texts in attempts.items()}


@functools.cache
def simulated(name: str, **options: Any) -> ClusterProfile:
    return simulate(getattr(parallel, name), dict(FOUR_RANKS[name]), **options)


@pytest.mark.parametrize("name", FOUR_RANKS)
@pytest.mark.slow
def test_simulated_ranks_equal_real_ranks(real: dict[str, list[ClusterProfile]], name: str) -> None:
    """Memory, which is measured of the real ranks too, changes no count of a simulated one."""
    cluster = simulated(name, ranks=range(4), memory=True)
    for attempt in real[name]:
        assert cluster.ranks.keys() == attempt.ranks.keys() == set(range(4))
        for rank in range(4):
            assert figures(cluster.ranks[rank]) == figures(attempt.ranks[rank])
    without_memory = simulated(name, ranks=(3,)).ranks[3]
    assert figures(without_memory) == figures(cluster.ranks[3])


@pytest.mark.parametrize("name", FOUR_RANKS)
@pytest.mark.slow
def test_simulated_ranks_have_the_peaks_of_real_ranks(
    real: dict[str, list[ClusterProfile]], name: str
) -> None:
    cluster = simulated(name, ranks=range(4), memory=True)
    roles_of = peaks_with_what_a_hook_made if name == "ddp" else peaks
    for rank in range(4):
        expected = [roles_of(attempt.ranks[rank]) for attempt in real[name]]
        assert roles_of(cluster.ranks[rank]) in expected


def peaks_with_what_a_hook_made(profile: Profile) -> dict[str, dict[str, int]]:
    """Return the peaks with temporaries among the gradients.

    A compressed gradient is a temporary, unless gloo's thread holds it until backward has ended.
    """
    found = peaks(profile)
    for roles in found.values():
        roles["gradients"] = roles.pop("gradients", 0) + roles.pop("temporaries", 0)
    return found


def reducing(is_async: bool) -> Callable[[Any], Callable[[], None]]:
    """Return a job that reduces one tensor after the other and drops each."""

    def step() -> None:
        x = torch.ones(7, 11)
        for _ in range(5):
            y = x * 2
            work = distributed.all_reduce(y, async_op=is_async)
            if work is not None:
                work.wait()
            del y, work

    return lambda mesh: step


@pytest.mark.parametrize("is_async", [False, True])
def test_simulated_rank_frees_what_was_reduced(is_async: bool) -> None:
    memory = simulate(reducing(is_async), {"dp": 3}, ranks=[1], memory=True).ranks[1].memory
    assert memory is not None
    assert memory.peak_bytes == 4 * (7 * 11 + 7 * 11)


def test_simulated_rank_holds_what_it_received_as_long_as_the_handle() -> None:
    def step() -> None:
        for _ in range(3):
            y = torch.empty(7, 11)
            work = distributed.irecv(y, src=0)
            assert work is not None and work.wait()
            del y

    memory = simulate(lambda mesh: step, {"pp": 2}, ranks=[1], memory=True).ranks[1].memory
    assert memory is not None
    assert memory.peak_bytes == 2 * 4 * 7 * 11


def test_simulated_rank_drops_the_last_that_it_sent() -> None:
    """No operator follows, before which the simulation lets go of the handle."""

    def step() -> None:
        work = distributed.isend(torch.ones(7, 11), dst=1)
        assert work is not None and work.wait()

    memory = simulate(lambda mesh: step, {"pp": 2}, ranks=[0], memory=True).ranks[0].memory
    assert memory is not None
    assert memory.by_role("forward") == {"temporaries": 4 * 7 * 11}


def test_elements_that_share_memory_are_all_sent() -> None:
    def step() -> None:
        world = distributed.group.WORLD
        functional.all_reduce(torch.ones(1).expand(5), "sum", world).add(1)
        functional.all_to_all_single(torch.ones(1, 3).expand(4, 3), None, None, world).add(1)

    profile = simulate(lambda mesh: step, {"dp": 2}, ranks=[0]).ranks[0]
    assert {kind: cost.payload_bytes for kind, cost in profile.comm_by("kind").items()} == {
        "all_reduce": 4 * 5,
        "all_to_all": 4 * 4 * 3,
    }


def test_gradient_of_a_sum_is_reduced_as_a_whole() -> None:
    def job(mesh: DeviceMesh) -> Callable[[], None]:
        def step() -> None:
            leaf = torch.ones(5, 3, requires_grad=True)
            x = DTensor.from_local(leaf, mesh, [Replicate()])
            x.redistribute(placements=[Replicate()]).to_local(
                grad_placements=[Partial()]
            ).sum().backward()

        return step

    (reduced,) = simulate(job, {"dp": 2}, ranks=[0]).ranks[0].communication
    assert (reduced.kind, reduced.phase) == ("all_reduce", "backward")
    assert reduced.payload_bytes == 4 * 5 * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_receiving_from_any_rank_is_simulated(rank: int) -> None:
    senders = []

    def step() -> None:
        senders.append(distributed.recv(torch.zeros(5)))

    profile = simulate(lambda mesh: step, {"pp": 3}, ranks=[rank]).ranks[rank]
    assert profile.comm_by("kind")["recv"].payload_bytes == 4 * 5
    assert senders == [1 - rank]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_job_may_convert_its_model(dtype: torch.dtype) -> None:
    def job(mesh: DeviceMesh) -> Any:
        model = nn.Linear(17, 19, bias=False).to(dtype)
        return model, lambda: model(torch.ones(3, 17, dtype=dtype))

    ops = simulate(job, {"dp": 2}, ranks=[0]).ranks[0].op_totals()
    products = [(op.dtype, op.cost.macs) for op in ops if op.cost is not None and op.cost.macs]
    assert products == [(str(dtype).removeprefix("torch."), 3 * 17 * 19)]


def test_mesh_of_one_dimension_names_the_group_of_all_ranks() -> None:
    def job(mesh: DeviceMesh) -> Any:
        model = DistributedDataParallel(nn.Linear(3, 5))
        return model, lambda: model(torch.ones(2, 3)).sum().backward()

    profile = simulate(job, {"dp": 2}, ranks=[0]).ranks[0]
    assert {total.group.label for total in profile.communication} == {"dp"}


def test_gradients_of_a_replicated_model_are_reduced_by_the_model() -> None:
    from torch.distributed._composable.replicate import replicate

    def job(mesh: DeviceMesh) -> Any:
        model = replicate(nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False)))
        return model, lambda: model(torch.ones(2, 3)).sum().backward()

    profile = simulate(job, {"dp": 2}, ranks=[0]).ranks[0]
    reduced = [total for total in profile.communication if total.kind == "all_reduce"]
    assert [(total.fqn, total.phase) for total in reduced] == [("", "backward")]
    assert reduced[0].payload_bytes == 4 * (3 * 5 + 5 * 7)


def test_gradients_of_a_model_that_is_met_later_are_reduced_by_the_model() -> None:
    def job(mesh: DeviceMesh) -> Any:
        models = [DistributedDataParallel(nn.Sequential(nn.Linear(3, n))) for n in (5, 7)]

        def step() -> None:
            for model in models:  # the second is unknown while the first reduces
                model(torch.ones(2, 3)).sum().backward()

        return step

    profile = simulate(job, {"dp": 2}, ranks=[0]).ranks[0]
    reduced = {total.fqn: total.payload_bytes for total in profile.communication}
    assert reduced == {
        "DistributedDataParallel": 4 * (3 + 1) * 5,
        "DistributedDataParallel_2": 4 * (3 + 1) * 7,
    }


def test_simulated_rank_pins_memory_that_fsdp2_offloads() -> None:
    """Without an accelerator no real rank can."""

    def offloading(pin_memory: bool) -> Profile:
        def job(mesh: DeviceMesh) -> Any:
            policy = CPUOffloadPolicy(pin_memory=pin_memory)
            model = fully_shard(nn.Linear(7, 5), mesh=mesh["dp"], offload_policy=policy)
            return model, lambda: model(torch.ones(3, 7)).sum().backward()

        return simulate(job, {"dp": 2}, ranks=[1], memory=True).ranks[1]

    pinned, plain = offloading(True), offloading(False)
    assert pinned.total("forward").macs == 3 * 7 * 5
    assert figures(pinned) == figures(plain)
    assert peaks(pinned) == peaks(plain)


def test_copied_module_is_in_memory_once() -> None:
    def job(mesh: Any) -> Any:
        layer = nn.Linear(7, 11, bias=False)
        x = torch.ones(5, 7)
        model = copy.deepcopy(layer)
        return model, lambda: model(x)

    memory = simulate(job, {"dp": 2}, ranks=[1], memory=True).ranks[1].memory
    assert memory is not None
    held = {"parameters": 4 * 7 * 11, "inputs": 4 * 5 * 7}
    assert memory.by_role() == {**held, "activations": 4 * 5 * 11}


def macs(profile: Profile) -> list[int]:
    return [profile.total(phase).macs for phase in ("forward", "backward", "recompute")]


def expected(forward: int, layers: int, tp: int = 1, times: int = 1) -> list[int]:
    """Backward is twice forward; the fused attention's backward recomputes the scores."""
    scores = layers * parallel.attention_macs(tp) // 2
    return [times * forward, times * 2 * forward, times * scores]


@pytest.mark.parametrize(("name", "tp"), [("ddp", 1), ("fsdp_from_meta", 1), ("fsdp_tp", 2)])
def test_simulated_rank_has_the_macs_of_the_closed_form(name: str, tp: int) -> None:
    cluster = simulated(name, ranks=(3,))
    forward = parallel.forward_macs(tp=tp)
    assert macs(cluster.ranks[3]) == expected(forward, parallel.LAYERS, tp)


@pytest.mark.parametrize("rank", range(4))
def test_simulated_pipeline_rank_has_the_macs_of_its_stage(rank: int) -> None:
    cluster = simulated("pipeline", ranks=(rank,))
    forward = parallel.forward_macs(layers=1, has_head=rank >= 2)
    counted = macs(cluster.ranks[rank])
    assert counted == expected(forward, 1, times=parallel.MICROBATCHES)
    assert cluster.stage(rank) == rank // 2


def test_representatives_stand_for_ranks_with_equal_shards() -> None:
    # 50 rows on 4 ranks: 13, 13, 13, 11. 24 and 40 rows are even.
    cluster = simulated("fsdp_from_meta")
    assert sorted(cluster.profiles) == [0, 3]
    assert cluster.represented == {1: 0, 2: 0}
    every = simulated("fsdp_from_meta", ranks=range(4), memory=True)
    assert cluster.total("optimizer") == every.total("optimizer")
    assert cluster.total() == every.total()
    assert cluster.straggler() == every.straggler() == 0
    given = "2 ranks were not simulated: each has the figures of one of 2 simulated ranks of"
    assert any(given in note for note in cluster.notes)


def test_one_representative_is_not_called_one_of_several() -> None:
    def job(mesh: DeviceMesh) -> Any:
        model = nn.Linear(3, 5)
        return model, lambda: model(torch.ones(2, 3))

    cluster = simulate(job, {"dp": 2})
    assert list(cluster.profiles) == [0]
    given = "1 rank was not simulated: each has the figures of the simulated rank of the same"
    assert any(given in note for note in cluster.notes)


def test_representatives_compute_with_equal_shards() -> None:
    """5 rows over tp are 3 and 2; halves of both have 1 row on 3 of the 4 ranks."""

    def job(mesh: DeviceMesh) -> Any:
        model = nn.Sequential(nn.Linear(7, 5, bias=False))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        return lambda: model(torch.ones(3, 7))

    cluster = simulate(job, {"dp": 2, "tp": 2})
    assert cluster.represented == {3: 1}
    assert cluster.total("forward").macs == 2 * 3 * 7 * 5


@pytest.mark.parametrize("is_given", [True, False])
def test_gradients_of_an_earlier_step_are_those_of_the_ranks_shards(is_given: bool) -> None:
    """FSDP2 has whole weights in place of the shards from the call of the model on."""

    def job(mesh: DeviceMesh) -> Any:
        model = fully_shard(nn.Linear(7, 6, bias=False), mesh=mesh["dp"])

        def step() -> None:
            model(torch.ones(3, 7)).sum().backward()

        step()
        return (model, step) if is_given else step

    memory = simulate(job, {"dp": 2}, ranks=[1], memory=True).ranks[1].memory
    assert memory is not None
    assert memory.by_role("forward")["gradients"] == 7 * 3 * 4


def sharding_over_a_mesh_of_its_own(mesh: DeviceMesh) -> Any:
    """5 rows on 4 ranks: 2, 2, 1, 0."""
    own = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    model = fully_shard(nn.Linear(7, 5, bias=False), mesh=own)
    return model, lambda: model(torch.ones(3, 7)).sum().backward()


def test_job_may_make_a_mesh_of_its_own() -> None:
    cluster = simulate(sharding_over_a_mesh_of_its_own, {"dp": 4}, ranks=range(4))
    shares = [profile.root.local_params for profile in cluster.ranks.values()]
    assert shares == [7 * rows for rows in (2, 2, 1, 0)]


def test_representatives_over_a_mesh_of_the_jobs_own_are_noted() -> None:
    cluster = simulate(sharding_over_a_mesh_of_its_own, {"dp": 4})
    assert any("sharded over shard, which mesh= does not name" in note for note in cluster.notes)
    assert not any("which mesh= does not name" in note for note in simulated("fsdp_tp").notes)


def test_representatives_of_flat_parameters_are_noted() -> None:
    """FSDP1 cuts 5 + 3 weights together in parts of 3, 3 and 2: one rank stands for all."""

    def job(mesh: DeviceMesh) -> Any:
        layers = nn.Sequential(nn.Linear(5, 1, bias=False), nn.Linear(1, 3, bias=False))
        model = FullyShardedDataParallel(layers, device_id=torch.device("cpu"))
        return model, lambda: model(torch.ones(2, 5)).sum().backward()

    each = simulate(job, {"dp": 3}, ranks=range(3))
    assert [profile.local_params for profile in each.ranks.values()] == [3, 3, 2]
    cluster = simulate(job, {"dp": 3})
    assert cluster.represented == {1: 0, 2: 0}
    assert any("FSDP1 shards the parameters of a module together" in n for n in cluster.notes)
    assert not any("FSDP1" in note for note in simulate(linear, {"dp": 3}).notes)


def test_flat_parameters_of_one_stage_are_noted() -> None:
    def job(mesh: DeviceMesh) -> Any:
        model: nn.Module = nn.Linear(5, 1, bias=False)
        if mesh["pp"].get_local_rank() == 0:
            group, device = mesh["dp"].get_group(), torch.device("cpu")
            model = FullyShardedDataParallel(model, process_group=group, device_id=device)
        return model, lambda: model(torch.ones(2, 5)).sum().backward()

    cluster = simulate(job, {"pp": 2, "dp": 2})
    assert cluster.represented == {1: 0, 3: 2}
    assert any("FSDP1 shards the parameters of a module together" in n for n in cluster.notes)


def test_representatives_are_of_every_stage() -> None:
    cluster = simulate(parallel.pipeline, {"pp": 2, "dp": 2})
    assert sorted(cluster.profiles) == [0, 2]
    assert cluster.represented == {1: 0, 3: 2}


def test_verified_representatives_are_those_of_a_random_rank_of_each_kind() -> None:
    # 50 rows on 4 ranks: 13, 13, 13, 11
    cluster = simulated("fsdp_from_meta", verify=True, memory=True)
    (chosen,) = cluster.profiles.keys() - {0, 3}
    assert cluster.represented == {rank: 0 for rank in (1, 2) if rank != chosen}
    note = f"verified: the counts of rank {chosen}, chosen at random,"
    assert any(text.startswith(note) for text in cluster.notes)
    assert cluster.total() == simulated("fsdp_from_meta").total()


def test_note_of_several_verified_ranks_names_them_all() -> None:
    profile = training_step()
    notes = _verification_notes(dict.fromkeys(range(4), profile), {1: 0, 3: 2})
    assert [note.partition(", chosen")[0] for note in notes] == [
        "verified: the counts of ranks 1, 3"
    ]


def uneven_rows(mesh: Any) -> Callable[[], Any]:
    """Code that asks for its rank: rank 0 has 11 rows, the others have 13."""
    model = nn.Linear(3, 5)
    rows = 11 if distributed.get_rank() == 0 else 13
    return lambda: model(torch.ones(rows, 3))


def test_verification_notes_what_a_rank_does_otherwise() -> None:
    cluster = simulate(uneven_rows, {"dp": 7}, verify=True)
    assert any(
        "differs from rank 0, which represents it: MACs 195 instead of 165" in note
        for note in cluster.notes
    )
    (other,) = cluster.profiles.keys() - {0}
    assert cluster.value(other, "macs") == 13 * 3 * 5
    assert not any("verified" in note for note in cluster.notes)
    assert not any("differs" in note for note in simulate(uneven_rows, {"dp": 7}).notes)


def test_verification_notes_a_module_that_differs_where_totals_are_equal() -> None:
    def job(mesh: Any) -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        layer = model[0 if distributed.get_rank() == 0 else 1]
        return model, lambda: layer(torch.ones(7, 3))

    notes = simulate(job, {"dp": 2}, verify=True).notes
    text = "differs from rank 0, which represents it: equal totals, but not those of aten"
    assert any(text in note and " in 0, forward" in note for note in notes), notes


def test_verification_of_given_ranks_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="verify=True needs representatives"):
        simulate(linear, {"dp": 2}, [0], verify=True)


def test_progress_is_printed_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(parallel.plain_ddp, {"dp": 4}, ranks=[2])
    assert capsys.readouterr() == ("", "simulating rank 2 of 4\n")


# -- values and messages --------------------------------------------------------------------------


def test_values_that_are_read_are_noted() -> None:
    def job(mesh: Any) -> Callable[[], Any]:
        model = nn.Linear(3, 5)
        return lambda: model(torch.ones(7, 3)).sum().item()

    for ranks, often in (([0], "once"), ([0, 1], "2 times")):
        notes = simulate(job, {"dp": 2}, ranks=ranks).notes
        assert any(f"values were read {often}, as by" in note for note in notes)


def test_objects_that_are_gathered_are_noted() -> None:
    def job(mesh: Any) -> Callable[[], Any]:
        rows: list[Any] = [None] * 3

        def step() -> None:
            distributed.all_gather_object(rows, 2 + distributed.get_rank())
            nn.functional.linear(torch.ones(sum(rows), 5), torch.ones(7, 5))

        return step

    cluster = simulate(job, {"dp": 3}, ranks=[0, 1])
    assert [profile.total().macs for profile in cluster.ranks.values()] == [6 * 5 * 7, 9 * 5 * 7]
    note = "objects of all ranks were gathered 2 times, and those of other ranks taken as equal"
    assert any(text.startswith(note) for text in cluster.notes)
    assert not any("gathered" in text for text in simulate(linear, {"dp": 3}, [0]).notes)


def test_objects_are_delivered_between_simulated_ranks() -> None:
    """Each rank tells the next one how many rows to compute."""

    def job(mesh: Any) -> Callable[[], Any]:
        rank = distributed.get_rank()
        rows = [2]
        if rank:
            distributed.recv_object_list(rows, src=rank - 1)
        if rank < 2:
            distributed.send_object_list([rows[0] * 3], dst=rank + 1)
        model = nn.Linear(5, 7)
        return lambda: model(torch.ones(rows[0], 5))

    cluster = simulate(job, {"dp": 3}, ranks=[2])
    assert cluster.total("forward").macs == 2 * 3 * 3 * 5 * 7


def test_broadcast_object_is_that_of_its_source() -> None:
    def job(mesh: Any) -> Callable[[], Any]:
        rows = [11 if distributed.get_rank() == 0 else None]
        distributed.broadcast_object_list(rows, src=0)
        model = nn.Linear(5, 7)
        return lambda: model(torch.ones(rows[0], 5))

    cluster = simulate(job, {"dp": 2}, ranks=[1])
    assert cluster.total("forward").macs == 11 * 5 * 7


@pytest.mark.parametrize("rank", range(3))
def test_scattered_object_is_the_part_of_the_rank(rank: int) -> None:
    def job(mesh: Any) -> Callable[[], Any]:
        own: list[Any] = [None]
        all_rows = [11, 13, 1000] if distributed.get_rank() == 0 else None
        distributed.scatter_object_list(own, all_rows, src=0)
        model = nn.Linear(5, 7)
        return lambda: model(torch.ones(own[0], 5))

    cluster = simulate(job, {"dp": 3}, ranks=[rank])
    assert cluster.total("forward").macs == (11, 13, 1000)[rank] * 5 * 7


# -- bad input ------------------------------------------------------------------------------------


def linear(mesh: Any) -> Callable[[], Any]:
    model = nn.Linear(3, 5)
    return lambda: model(torch.ones(7, 3))


@pytest.mark.parametrize(
    ("mesh", "ranks", "message"),
    [
        ({}, [0], "pass names and sizes"),
        ([2, 2], [0], "pass names and sizes"),
        ({"dp": 0}, [0], "size of at least 1"),
        ({"dp": 2.0}, [0], "size of at least 1"),
        ({"dp": 2}, [2], "rank 2 is out of range; the mesh has ranks 0 to 1"),
        ({"dp": 2}, [-1], "rank -1 is out of range"),
        ({"dp": 2}, [], "ranks is empty"),
        ({"dp": 2}, "all", 'or "representative"'),
    ],
)
def test_unusable_mesh_or_rank_is_a_config_error(mesh: Any, ranks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(linear, mesh, ranks)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_time_limit_that_is_none_is_a_config_error(timeout_s: Any) -> None:
    with pytest.raises(ConfigError, match="pass seconds above 0, or None for no limit"):
        simulate(linear, {"dp": 2}, [0], timeout_s=timeout_s)


def test_time_limit_beyond_the_timers_range_is_their_longest_and_leaves_no_handler() -> None:
    assert list(simulate(linear, {"dp": 2}, [0], timeout_s=1e300).ranks) == [0]
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_job_that_returns_no_step_is_a_target_error() -> None:
    with pytest.raises(TargetError, match="the job returned an object of type Linear"):
        simulate(lambda mesh: nn.Linear(3, 5), {"dp": 2}, [0])


def test_job_that_is_not_a_function_is_a_target_error() -> None:
    with pytest.raises(TargetError, match="the job is of type int; pass a function"):
        simulate(3, {"dp": 2})  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="the job is of type Linear; pass a function"):
        simulate(nn.Linear(3, 5), {"dp": 2})


def test_job_that_does_not_take_one_mesh_is_a_target_error() -> None:
    says = "the job cannot be called with a DeviceMesh alone: {}; pass a function that takes one"
    with pytest.raises(TargetError, match=says.format("too many positional arguments")):
        simulate(lambda: int, {"dp": 2})  # type: ignore[arg-type, misc]
    with pytest.raises(TargetError, match=says.format("missing a required argument: 'ranks'")):
        simulate(lambda mesh, ranks: int, {"dp": 2})  # type: ignore[arg-type, misc]


def test_model_that_was_built_before_the_job_is_not_trained() -> None:
    """The first rank would leave its gradients on it, and the next would add its own to them."""
    model = nn.Sequential(nn.Linear(3, 5))
    with pytest.raises(TargetError, match="trains a Linear .* build the model in the job"):
        simulate(lambda mesh: lambda: model(torch.ones(2, 3)).sum().backward(), {"dp": 2})
    assert model[0].weight.grad is None

    def infer(mesh: DeviceMesh) -> Any:
        return torch.no_grad()(lambda: model(torch.ones(2, 3)))

    assert simulate(infer, {"dp": 2}).total().macs == 2 * (2 * 3 * 5)


def test_error_of_the_job_names_the_rank_and_leaves_nothing_behind() -> None:
    before = dict(os.environ)

    def job(mesh: Any) -> Callable[[], Any]:
        raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer") as caught:
        simulate(job, {"dp": 2}, [1])
    assert caught.value.__notes__ == ["dispatch_flops: raised while rank 1 was simulated"]
    assert not distributed.is_initialized()
    assert dict(os.environ) == before
    assert type(torch.ones(1)) is torch.Tensor


def test_errors_after_a_simulation_are_not_printed_as_those_of_a_rank() -> None:
    before = sys.excepthook
    simulate(linear, {"dp": 2}, [1])
    assert sys.excepthook is before


def test_job_that_does_not_end_is_interrupted() -> None:
    def job(mesh: Any) -> Callable[[], Any]:
        while True:
            time.sleep(0.01)

    with pytest.raises(TargetError, match="rank 0 did not end within 0.3 s"):
        simulate(job, {"dp": 2}, [0], timeout_s=0.3)
    assert not distributed.is_initialized()


def test_job_that_survives_an_interrupt_is_interrupted_again() -> None:
    def job(mesh: Any) -> Callable[[], Any]:
        with suppress(KeyboardInterrupt):
            time.sleep(20)
        time.sleep(20)
        return lambda: None

    with pytest.raises(TargetError, match="rank 0 did not end"):
        simulate(job, {"dp": 2}, [0], timeout_s=0.1)


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    def job(mesh: Any) -> Callable[[], Any]:
        distributed.recv_object_list([None], src=1 - distributed.get_rank())
        return lambda: None

    with pytest.raises(TargetError, match="wait for messages of each other"):
        simulate(job, {"dp": 2}, [0])


def test_process_group_of_the_user_is_kept() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        group = distributed.group.WORLD
        with pytest.raises(TargetError, match="a process group exists already"):
            simulate(linear, {"dp": 2}, [0])
        assert distributed.group.WORLD is group
    finally:
        distributed.destroy_process_group()


def test_environment_names_the_simulated_rank() -> None:
    seen: list[str] = []

    def job(mesh: Any) -> Callable[[], Any]:
        seen.extend(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return linear(mesh)

    simulate(job, {"dp": 6}, [4])
    assert seen == ["4", "6", "0"]


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # importing it raises ImportError
from dispatch_flops.distributed import simulate
from tests.models.parallel import fsdp_tp
print(simulate(fsdp_tp, mesh={"dp": 2, "tp": 2}, ranks=[3]).world_size)
"""


def test_simulation_does_not_need_numpy() -> None:
    """torch does not require it, and the package does not either."""
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_NUMPY]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
