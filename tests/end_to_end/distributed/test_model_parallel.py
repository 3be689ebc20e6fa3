"""Meshes of four real processes: each rank's work and communication against hand truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dispatch_flops import FlopCounterMode, Profile
from tests.helpers.parallel_nets import FLOAT
from tests.helpers.ranks import Results, rows_of, run_on_ranks
from tests.models.parallel_jobs import NormedMlp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

RANKS = 4
BATCH, LENGTH, WIDE, HIDDEN = 3, 8, 12, 20  # divisible by the ranks, so that shards are even
ROWS = BATCH * LENGTH
ACTIVATION = FLOAT * ROWS * WIDE
LAYERS = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([NormedMlp(WIDE, HIDDEN) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


LAYER_MACS = 2 * ROWS * WIDE * HIDDEN
MLP_PARAMS = 2 * WIDE * HIDDEN
MLPS = [f"layers.{i}.mlp" for i in range(LAYERS)]
Rows = dict[Any, tuple[int, int]]


def count(step: Callable[[], Any], model: nn.Module | None, **options: Any) -> Profile:
    with FlopCounterMode(model, display=False, **options) as counter:
        step()
    return counter.profile


def train(model: nn.Module, length: int = LENGTH, **options: Any) -> Profile:
    x = torch.ones(BATCH, length, WIDE, requires_grad=True)
    return count(lambda: model(x).sum().backward(), model, **options)


def mesh_of(**dims: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


# -- workloads ------------------------------------------------------------------------------------


def hsdp() -> Profile:
    from torch.distributed.fsdp import fully_shard

    model, mesh = Net(), mesh_of(replicate=2, shard=2)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return train(fully_shard(model, mesh=mesh))


def fsdp2_resharded_to_pairs() -> Profile:
    from torch.distributed.fsdp import fully_shard

    model, mesh = Net(), mesh_of(dp=4)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    return train(fully_shard(model, mesh=mesh))


def _tensor_parallel(mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = Net()
    for layer in model.layers:
        plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
    return model


def tensor_parallel() -> Profile:
    return train(_tensor_parallel(mesh_of(tp=4)))


def sequence_parallel() -> Profile:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model, mesh = Net(), mesh_of(tp=4)
    for layer in model.layers:
        plan = {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    return train(model, LENGTH // 4)


def tensor_and_data_parallel() -> Profile:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(dp=2, tp=2)
    model = _tensor_parallel(mesh["tp"])
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh["dp"])
    return train(fully_shard(model, mesh=mesh["dp"]))


class Experts(nn.Module):
    """One expert on each rank; rank r sends (r + 1) * (peer + 1) rows to each peer."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        rank = dist.get_rank() + 1
        given = [rank * (peer + 1) for peer in range(RANKS)]
        rows: Any = all_to_all_single_autograd(x, given, given, dist.group.WORLD)
        return self.expert(rows)


def experts() -> Profile:
    model = Experts()
    x = torch.ones(10 * (dist.get_rank() + 1), WIDE, requires_grad=True)
    return count(lambda: model(x).sum().backward(), model)


def redistribute() -> Profile:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(dp=4)
    tensor = distribute_tensor(torch.ones(8, 12), mesh, [Shard(0)])
    return count(lambda: tensor.redistribute(mesh, [Replicate()]), None, mesh=mesh)


def every_kind() -> Profile:
    """Each collective of torch.distributed once, on 6 float64s or on 6 for each rank."""
    rank = dist.get_rank()

    def collectives() -> None:
        x = torch.ones(6, dtype=torch.float64)
        parts = [torch.ones(6, dtype=torch.float64) for _ in range(RANKS)]
        dist.all_reduce(x)
        dist.broadcast(x, 1)
        dist.reduce(x, 1)
        dist.all_gather(parts, x)
        dist.gather(x, parts if rank == 1 else None, dst=1)
        dist.scatter(x, parts if rank == 1 else None, src=1)
        dist.reduce_scatter(x, parts)
        dist.all_to_all_single(torch.ones(24), torch.ones(24))
        dist.barrier()
        if rank == 2:
            dist.send(x, dst=3)
        if rank == 3:
            dist.recv(x, src=2)

    return count(collectives, None, mesh=mesh_of(world=4))


def batched_neighbours() -> Profile:
    """Each rank sends 5 numbers to the next one and receives as many from the one before."""
    rank, given, taken = dist.get_rank(), torch.ones(5), torch.zeros(5)

    def exchange() -> None:
        calls = [
            dist.P2POp(dist.isend, given, (rank + 1) % RANKS),
            dist.P2POp(dist.irecv, taken, (rank - 1) % RANKS),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    return count(exchange, None)


WORKLOADS = ["batched_neighbours", "hsdp", "fsdp2_resharded_to_pairs", "tensor_parallel",
             "sequence_parallel", "tensor_and_data_parallel", "experts", "redistribute",
             "every_kind"]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_on_ranks(__file__, WORKLOADS, RANKS, tmp_path_factory.mktemp("ranks"))


# -- truth ----------------------------------------------------------------------------------------

LAYER = FLOAT * (MLP_PARAMS + WIDE)  # the rows of every weight are a multiple of the ranks


def of_fsdp(layer: int) -> Rows:
    rows: Rows = {}
    for i in range(LAYERS):
        rows[f"layers.{i}", "forward", "all_gather"] = (1, layer)
        rows[f"layers.{i}", "backward", "all_gather"] = (1, layer)
        rows[f"layers.{i}", "backward", "reduce_scatter"] = (1, layer)
    return rows


def of_tensor_parallel() -> Rows:
    """Partial sums are added where the plan says so, their gradients at the other end."""
    rows: Rows = {}
    for mlp in MLPS:
        rows[f"{mlp}.down", "forward", "all_reduce"] = (1, ACTIVATION)
        rows[f"{mlp}.up", "backward", "all_reduce"] = (1, ACTIVATION)
    return rows


def of_sequence_parallel() -> Rows:
    rows: Rows = {}
    for mlp in MLPS:
        rows[mlp, "forward", "all_gather"] = (1, ACTIVATION)
        rows[mlp, "backward", "reduce_scatter"] = (1, ACTIVATION)
        rows[f"{mlp}.down", "forward", "reduce_scatter"] = (1, ACTIVATION)
        rows[f"{mlp}.down", "backward", "all_gather"] = (1, ACTIVATION)
    return rows


TRUTH: dict[str, Rows] = {
    "hsdp": of_fsdp(LAYER)
    | {(f"layers.{i}", "backward", "all_reduce"): (1, LAYER // 2) for i in range(LAYERS)},
    "fsdp2_resharded_to_pairs": of_fsdp(LAYER),
    "tensor_parallel": of_tensor_parallel(),
    "sequence_parallel": of_sequence_parallel(),
    # The norm is whole on both ranks of a pair.
    "tensor_and_data_parallel": of_fsdp(FLOAT * (MLP_PARAMS // 2 + WIDE)) | of_tensor_parallel(),
    "redistribute": {("<outside>", "forward", "all_gather"): (1, FLOAT * 8 * 12)},
}
SHARE = {"tensor_parallel": 4, "sequence_parallel": 4, "tensor_and_data_parallel": 2}


@pytest.mark.parametrize("workload", TRUTH)
def test_communication_on_a_mesh_is_that_of_the_closed_form(
    results: Results, workload: str
) -> None:
    for rank, profile in enumerate(results.of(workload)):
        assert rows_of(profile) == TRUTH[workload], f"rank {rank}"
        assert (profile.run.rank, profile.run.world_size) == (rank, RANKS)
        assert profile.notes == ()


@pytest.mark.parametrize("workload", [name for name in TRUTH if name != "redistribute"])
def test_work_on_a_mesh_is_the_share_of_the_rank(results: Results, workload: str) -> None:
    for profile in results.of(workload):
        macs = LAYERS * LAYER_MACS // SHARE.get(workload, 1)
        assert profile.total("forward").macs == macs
        assert profile.total("backward").macs == 2 * macs
        up = profile.by_module("forward")["layers.0.mlp.up"].macs
        assert up == macs // (2 * LAYERS)


def test_parameters_of_a_mesh_are_whole_and_of_this_rank(results: Results) -> None:
    whole = LAYERS * (MLP_PARAMS + WIDE)
    held = {
        "hsdp": whole // 2,
        "fsdp2_resharded_to_pairs": whole // 4,
        "tensor_parallel": LAYERS * (MLP_PARAMS // 4 + WIDE),
        "sequence_parallel": LAYERS * (MLP_PARAMS // 4 + WIDE),
        "tensor_and_data_parallel": LAYERS * (MLP_PARAMS // 4 + WIDE // 2),
    }
    for workload, local in held.items():
        for profile in results.of(workload):
            assert profile.total_params == whole
            assert profile.local_params == local


def groups_of(profile: Profile) -> set[tuple[str, str, str | None, tuple[int, ...]]]:
    return {
        (total.phase, total.kind, total.group.mesh_dim, total.group.ranks)
        for total in profile.communication
    }


def test_groups_of_hsdp_are_those_of_its_mesh(results: Results) -> None:
    for rank, profile in enumerate(results.of("hsdp")):
        pair = (0, 1) if rank < 2 else (2, 3)
        across = (rank % 2, rank % 2 + 2)
        assert groups_of(profile) == {
            ("forward", "all_gather", "shard", pair),
            ("backward", "all_gather", "shard", pair),
            ("backward", "reduce_scatter", "shard", pair),
            ("backward", "all_reduce", "replicate", across),
        }
        assert profile.run.coordinates == {"replicate": rank // 2, "shard": rank % 2}
        assert [(dim.name, dim.size) for dim in profile.run.mesh or ()] == [
            ("replicate", 2), ("shard", 2),
        ]  # fmt: skip


def test_parameters_resharded_to_pairs_are_gathered_from_pairs(results: Results) -> None:
    for rank, profile in enumerate(results.of("fsdp2_resharded_to_pairs")):
        pair = (0, 1) if rank < 2 else (2, 3)
        sizes = {
            (phase, kind): (len(ranks), ranks == pair)
            for phase, kind, _, ranks in groups_of(profile)
        }
        assert sizes == {
            ("forward", "all_gather"): (4, False),
            ("backward", "all_gather"): (2, True),
            ("backward", "reduce_scatter"): (4, False),
        }


def test_groups_of_a_mesh_of_two_dimensions_are_named_by_it(results: Results) -> None:
    for rank, profile in enumerate(results.of("tensor_and_data_parallel")):
        dims = {total.kind: total.group.mesh_dim for total in profile.communication}
        assert dims == {"all_gather": "dp", "reduce_scatter": "dp", "all_reduce": "tp"}
        assert profile.run.coordinates == {"dp": rank // 2, "tp": rank % 2}


@pytest.mark.parametrize("workload", ["tensor_parallel", "redistribute", "every_kind"])
def test_default_group_is_named_by_a_mesh_of_one_dimension(results: Results, workload: str) -> None:
    name = {"tensor_parallel": "tp", "redistribute": "dp", "every_kind": "world"}[workload]
    for profile in results.of(workload):
        assert {total.group.mesh_dim for total in profile.communication} == {name}


def test_uneven_experts_send_the_rows_of_their_splits(results: Results) -> None:
    for rank, profile in enumerate(results.of("experts")):
        rows = 10 * (rank + 1)
        assert profile.total("forward").macs == rows * WIDE * HIDDEN
        assert profile.total("backward").macs == 2 * rows * WIDE * HIDDEN
        row = FLOAT * WIDE
        shares = tuple(
            row * (rank + 1) * (peer + 1) if peer != rank else 0 for peer in range(RANKS)
        )
        forward, backward = sorted(profile.communication, key=lambda total: total.phase)[::-1]
        for total, phase in ((forward, "forward"), (backward, "backward")):
            assert (total.fqn, total.phase, total.kind) == ("", phase, "all_to_all")
            assert total.payload_bytes == row * rows
            assert total.sent_bytes == total.received_bytes == shares
            assert total.bus_bytes == sum(shares)


def test_batched_sends_and_receives_name_their_peers(results: Results) -> None:
    for rank, profile in enumerate(results.of("batched_neighbours")):
        sent, received = sorted(profile.communication, key=lambda total: total.kind)[::-1]
        assert (sent.kind, sent.calls, received.kind, received.calls) == ("send", 1, "recv", 1)
        one = FLOAT * 5
        after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
        assert sent.sent_bytes == tuple(one * (peer == after) for peer in range(RANKS))
        assert received.received_bytes == tuple(one * (peer == before) for peer in range(RANKS))


DOUBLE = 8 * 6  # bytes of 6 float64s
PAYLOADS = {
    "all_reduce": DOUBLE, "broadcast": DOUBLE, "reduce": DOUBLE, "all_gather": RANKS * DOUBLE,
    "gather": RANKS * DOUBLE, "scatter": RANKS * DOUBLE, "reduce_scatter": RANKS * DOUBLE,
    "all_to_all": FLOAT * 24, "barrier": 0,
}  # fmt: skip


def test_payload_of_every_kind_is_that_of_nccl_tests_on_all_ranks(results: Results) -> None:
    for rank, profile in enumerate(results.of("every_kind")):
        truth = PAYLOADS | ({2: {"send": DOUBLE}, 3: {"recv": DOUBLE}}.get(rank, {}))
        assert {kind: cost.payload_bytes for kind, cost in profile.comm_by("kind").items()} == truth
        assert {total.calls for total in profile.communication} == {1}
        shares = {
            total.kind: total.sent_bytes or total.received_bytes for total in profile.communication
        }
        assert shares.get("send", (0, 0, 0, DOUBLE)) == (0, 0, 0, DOUBLE)
        assert shares.get("recv", (0, 0, DOUBLE, 0)) == (0, 0, DOUBLE, 0)
        even = tuple(FLOAT * 6 if peer != rank else 0 for peer in range(RANKS))
        assert shares["all_to_all"] == even
        assert profile.comm_by("kind")["all_to_all"].bus_bytes == FLOAT * 24 * 3 // 4


def test_bytes_of_every_kind_are_those_that_the_rank_reads_and_writes(results: Results) -> None:
    """The root of the rooted ones is rank 1."""
    for rank, profile in enumerate(results.of("every_kind")):
        is_root = rank == 1
        truth = {
            "allreduce_": (DOUBLE, DOUBLE),
            "broadcast_": (DOUBLE, 0) if is_root else (0, DOUBLE),
            "reduce_": (DOUBLE, DOUBLE if is_root else 0),
            "allgather_": (DOUBLE, RANKS * DOUBLE),
            "gather_": (DOUBLE, RANKS * DOUBLE if is_root else 0),
            "scatter_": (RANKS * DOUBLE if is_root else 0, DOUBLE),
            "reduce_scatter_": (RANKS * DOUBLE, DOUBLE),
            "alltoall_base_": (FLOAT * 24, FLOAT * 24),
            "barrier": (0, 0),
        } | ({2: {"send": (DOUBLE, 0)}, 3: {"recv_": (0, DOUBLE)}}.get(rank, {}))
        moved = {
            name.split(".")[1]: (op.cost.bytes_read, op.cost.bytes_written)
            for name, op in profile.by_operator().items()
            if name.startswith("c10d") and op.cost
        }
        assert moved == truth
