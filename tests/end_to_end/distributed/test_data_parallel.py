"""Data parallelism on two real processes: each rank's work and communication against hand truth."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dispatch_flops import FlopCounterMode, ModuleNode, Profile
from tests.helpers.parallel_nets import (
    BACKWARD_MACS,
    BLOCK_MACS,
    BLOCK_PARAMS,
    CLASSES,
    FLOAT,
    FORWARD_MACS,
    HEAD_PARAMS,
    LAYERS,
    MID,
    PARAMS,
    WIDE,
    Block,
    Net,
    inputs,
    padded_block_params,
    padded_head_params,
)
from tests.helpers.ranks import Results, rows_of, run_on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

RANKS = 2
STEPS = 3
TENSORS = 4 * LAYERS + 2
BLOCKS = [f"layers.{i}" for i in range(LAYERS)]
HALF = 2  # bytes


def count(step: Callable[[], Any], model: nn.Module, steps: int = 1) -> Profile:
    with FlopCounterMode(model, display=False) as counter:
        for _ in range(steps):
            step()
    return counter.profile


def train(model: nn.Module, steps: int = 1) -> Profile:
    return count(lambda: model(inputs()).sum().backward(), model, steps)


# -- workloads ------------------------------------------------------------------------------------


def ddp() -> Profile:
    return train(nn.parallel.DistributedDataParallel(Net()), STEPS)


def ddp_of_inner_model() -> Profile:
    model = Net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    return count(lambda: wrapped(inputs()).sum().backward(), model)


def ddp_no_sync() -> Profile:
    model = nn.parallel.DistributedDataParallel(Net())

    def accumulate() -> None:
        with model.no_sync():
            model(inputs()).sum().backward()
        model(inputs()).sum().backward()

    return count(accumulate, model)


class WithUnused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 3)


def ddp_unused() -> Profile:
    return train(nn.parallel.DistributedDataParallel(WithUnused(), find_unused_parameters=True))


def ddp_static_graph() -> Profile:
    return train(nn.parallel.DistributedDataParallel(Net(), static_graph=True), STEPS)


def ddp_comm_hook() -> Profile:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = nn.parallel.DistributedDataParallel(Net())
    model.register_comm_hook(None, fp16_compress_hook)
    return train(model)


def ddp_buffers() -> Profile:
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    return train(nn.parallel.DistributedDataParallel(model))


def ddp_compiled() -> Profile:
    model = torch.compile(nn.parallel.DistributedDataParallel(Net()), backend="aot_eager")
    model(inputs()).sum().backward()
    return train(model)  # type: ignore[arg-type]


def _fsdp1(*, use_orig_params: bool) -> Profile:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        Net(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )
    return train(model, STEPS)


def fsdp1() -> Profile:
    return _fsdp1(use_orig_params=False)


def fsdp1_orig_params() -> Profile:
    return _fsdp1(use_orig_params=True)


def fsdp1_stepped() -> Profile:
    """Scaled and clipped by FSDP1's own functions, which reduce over the ranks."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters())
    scaler = ShardedGradScaler("cpu")

    def step() -> None:
        scaler.scale(model(inputs()).sum()).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    return count(step, model)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp2() -> Profile:
    return train(sharded(Net()), STEPS)


def fsdp2_not_resharded() -> Profile:
    return train(sharded(Net(), reshard_after_forward=False))


def fsdp2_bf16() -> Profile:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(sharded(Net(), mp_policy=policy))


def fsdp2_checkpointed() -> Profile:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Net()
    model.layers = nn.ModuleList(map(checkpoint_wrapper, model.layers))
    return train(sharded(model))


def fsdp2_accumulated() -> Profile:
    model = sharded(Net())

    def accumulate() -> None:
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            model(inputs()).sum().backward()

    return count(accumulate, model)


def fsdp2_stepped() -> Profile:
    model = sharded(Net())
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(inputs()).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return count(step, model)


def fsdp2_compiled() -> Profile:
    model = sharded(Net())
    compiled = torch.compile(model, backend="aot_eager")
    compiled(inputs()).sum().backward()
    return count(lambda: compiled(inputs()).sum().backward(), model)


QUICK = ["ddp", "ddp_of_inner_model", "ddp_no_sync", "ddp_unused", "ddp_static_graph",
         "ddp_comm_hook", "ddp_buffers", "fsdp1", "fsdp1_orig_params", "fsdp1_stepped",
         "fsdp2", "fsdp2_not_resharded", "fsdp2_bf16", "fsdp2_checkpointed", "fsdp2_accumulated",
         "fsdp2_stepped"]  # fmt: skip
COMPILED = ["ddp_compiled", "fsdp2_compiled"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_on_ranks(__file__, QUICK, RANKS, tmp_path_factory.mktemp("ranks"))


# -- truth ----------------------------------------------------------------------------------------

SUM_OF_GRADIENTS = {("", "backward", "all_reduce"): (1, FLOAT * PARAMS)}
# Before the second step the reducer sends the new order of the gradients (an int32 for each
# parameter and one for the number of buckets) and the size of its only bucket.
NEW_BUCKETS = {("", "forward", "broadcast"): (2, 4 * (TENSORS + 1) + 4)}
BLOCK = FLOAT * padded_block_params(RANKS)
HEAD = FLOAT * padded_head_params(RANKS)


def times(n: int, rows: dict[Any, tuple[int, int]]) -> dict[Any, tuple[int, int]]:
    return {key: (n * calls, n * size) for key, (calls, size) in rows.items()}


def of_fsdp(
    block: int, head: int, *, gathered_twice: bool = True, reduced_as: int = 1
) -> dict[Any, tuple[int, int]]:
    """The root's parameters stay gathered until its backward."""
    rows: dict[Any, tuple[int, int]] = {
        ("", "forward", "all_gather"): (1, head),
        ("", "backward", "reduce_scatter"): (1, reduced_as * head),
    }
    for fqn in BLOCKS:
        rows[fqn, "forward", "all_gather"] = (1, block)
        rows[fqn, "backward", "reduce_scatter"] = (1, reduced_as * block)
        if gathered_twice:
            rows[fqn, "backward", "all_gather"] = (1, block)
    return rows


FSDP2 = of_fsdp(BLOCK, HEAD)


def aligned(*sizes: int) -> int:
    """With its original parameters FSDP1 aligns each to 16 bytes, and shards them flat."""
    *first, last = sizes
    flat = sum(-(-size // 4) * 4 for size in first) + last
    return -(-flat // 4) * 4


TRUTH: dict[str, dict[Any, tuple[int, int]]] = {
    "ddp": times(STEPS, SUM_OF_GRADIENTS) | NEW_BUCKETS,
    "ddp_of_inner_model": SUM_OF_GRADIENTS,
    "ddp_no_sync": SUM_OF_GRADIENTS,
    # all parameters, and one int32 for each of them that tells whether it was used
    "ddp_unused": {
        ("", "backward", "all_reduce"): (2, FLOAT * (PARAMS + 2 * 3 + 3) + 4 * (TENSORS + 2))
    },
    # in the first step also, for each parameter, an int32 that tells whether it was used
    "ddp_static_graph": {
        ("", "backward", "all_reduce"): (STEPS + 1, STEPS * FLOAT * PARAMS + 4 * TENSORS)
    }
    | NEW_BUCKETS,
    "ddp_comm_hook": {("", "backward", "all_reduce"): (1, HALF * PARAMS)},
    "fsdp1": times(STEPS, of_fsdp(FLOAT * BLOCK_PARAMS, FLOAT * HEAD_PARAMS)),
    "fsdp1_orig_params": times(
        STEPS, of_fsdp(FLOAT * aligned(77, 11, 77, 7), FLOAT * aligned(21, 3))
    ),
    # the root alone is sharded; also a flag for infinities, and the norm of all shards together
    "fsdp1_stepped": {
        ("", "forward", "all_gather"): (1, FLOAT * PARAMS),
        ("", "backward", "reduce_scatter"): (1, FLOAT * PARAMS),
        ("<outside>.gradient scaling", "optimizer", "all_reduce"): (1, FLOAT),
        ("<outside>.gradient clipping", "optimizer", "all_reduce"): (1, FLOAT),
    },
    "fsdp2": times(STEPS, FSDP2),
    "fsdp2_not_resharded": of_fsdp(BLOCK, HEAD, gathered_twice=False),
    "fsdp2_bf16": of_fsdp(BLOCK // 2, HEAD // 2, reduced_as=2),
    "fsdp2_checkpointed": FSDP2,
    # Both passes gather; only the last reduces.
    "fsdp2_accumulated": {
        key: (1 if "reduce_scatter" in key else 2, size * (1 if "reduce_scatter" in key else 2))
        for key, (_, size) in FSDP2.items()
    },
    "fsdp2_stepped": FSDP2
    # the norms of all shards together
    | {("<outside>.gradient clipping", "optimizer", "all_reduce"): (1, FLOAT * TENSORS)},
}


@pytest.mark.parametrize("workload", TRUTH)
def test_communication_of_data_parallelism_is_that_of_the_closed_form(
    results: Results, workload: str
) -> None:
    for rank, profile in enumerate(results.of(workload)):
        assert rows_of(profile) == TRUTH[workload], f"rank {rank}"
        assert {total.group.ranks for total in profile.communication} == {(0, 1)}
        assert (profile.run.rank, profile.run.world_size) == (rank, RANKS)
        assert profile.uncounted_ops() == {}
        assert profile.notes == ()


STEPS_OF = {"ddp": STEPS, "ddp_static_graph": STEPS, "ddp_no_sync": 2, "fsdp1": STEPS,
            "fsdp1_orig_params": STEPS, "fsdp2": STEPS, "fsdp2_accumulated": 2}  # fmt: skip


@pytest.mark.parametrize("workload", TRUTH)
def test_work_of_data_parallelism_is_that_of_the_whole_model(
    results: Results, workload: str
) -> None:
    steps = STEPS_OF.get(workload, 1)
    for profile in results.of(workload):
        assert profile.total("forward").macs == steps * FORWARD_MACS
        assert profile.total("backward").macs == steps * BACKWARD_MACS
        # Recomputation ends before ``down``, whose result no gradient needs.
        recomputed = LAYERS * BLOCK_MACS // 2 if workload == "fsdp2_checkpointed" else 0
        assert profile.total("recompute").macs == recomputed
        assert profile.by_module("forward")["layers.1.up"].macs == steps * BLOCK_MACS // 2


@pytest.mark.parametrize("workload", QUICK)
def test_names_of_wrapped_models_have_no_prefix(results: Results, workload: str) -> None:
    for profile in results.of(workload):
        names = set(profile.by_module())
        if workload != "ddp_buffers":
            assert {"", "layers.0.up", "layers.1.down", "head"} <= names
        assert not [fqn for fqn in names if "module" in fqn or "wrapped" in fqn]
        assert {node.calls for node in profile.root.walk() if node.fqn == ""} == {
            STEPS_OF.get(workload, 1)
        }


def test_buffers_are_broadcast_by_the_model_in_forward(results: Results) -> None:
    """Mean and variance of BatchNorm, and its number of batches, each kind of number together."""
    reading, writing = results.of("ddp_buffers")
    for profile in (reading, writing):
        rows = rows_of(profile)
        assert rows["", "forward", "broadcast"] == (2, FLOAT * (5 + 5) + 8)
    op = "c10d.broadcast_.default"
    assert reading.by_operator()[op].cost.bytes_read == 48
    assert reading.by_operator()[op].cost.bytes_written == 0
    assert writing.by_operator()[op].cost.bytes_read == 0
    assert writing.by_operator()[op].cost.bytes_written == 48


def test_bytes_of_fsdp2_are_those_that_a_rank_reads_and_writes(results: Results) -> None:
    for profile in results.of("fsdp2_not_resharded"):
        ops = profile.by_operator()

        def moved(name: str, ops: Any = ops) -> tuple[int, int]:
            cost = ops[name].cost
            return cost.bytes_read, cost.bytes_written

        everything = LAYERS * BLOCK + HEAD
        unpadded = FLOAT * PARAMS
        assert moved("c10d._allgather_base_.default") == (everything // RANKS, everything)
        assert moved("c10d._reduce_scatter_base_.default") == (everything, everything // RANKS)
        copied = everything // RANKS
        assert moved("fsdp.all_gather_copy_in.default") == (copied, copied)
        assert moved("fsdp.split_with_sizes_copy.default") == (everything, everything)
        packing = "chunk_cat" if "fsdp.chunk_cat.default" in ops else "chunk_cat_mixed_dtype"
        assert moved(f"fsdp.{packing}.default") == (unpadded, everything)


def shard(size: int, rank: int) -> int:
    """What a rank holds of ``size`` rows or elements."""
    each = -(-size // RANKS)
    return max(0, min(each, size - rank * each))


def test_parameters_of_ddp_are_the_models_on_every_rank(results: Results) -> None:
    for profile in results.of("ddp"):
        assert profile.total_params == profile.local_params == PARAMS
        assert profile.root.local_params is None


@pytest.mark.parametrize("workload", ["fsdp2", "fsdp2_stepped", "fsdp2_bf16"])
def test_parameters_of_fsdp2_are_whole_and_of_this_rank(results: Results, workload: str) -> None:
    """The rows of each weight, and the elements of each bias, are shared out."""
    for rank, profile in enumerate(results.of(workload)):
        assert profile.total_params == profile.root.active_params == PARAMS
        up, down, head = shard(MID, rank), shard(WIDE, rank), shard(CLASSES, rank)
        assert profile.node("layers.1.up").local_params == up * (WIDE + 1)
        assert profile.node("head").local_params == head * (WIDE + 1)
        held = LAYERS * (up * (WIDE + 1) + down * (MID + 1)) + head * (WIDE + 1)
        assert profile.local_params == held


@pytest.mark.parametrize("workload", ["fsdp1", "fsdp1_orig_params"])
def test_parameters_of_fsdp1_are_whole_and_of_this_rank(results: Results, workload: str) -> None:
    """Each block's parameters lie one after the other, and every rank holds half of the whole."""
    held = []
    for profile in results.of(workload):
        assert profile.total_params == profile.root.active_params == PARAMS
        assert profile.root.trainable_params == PARAMS
        assert profile.node("layers.0.up").total_params == WIDE * MID + MID
        assert profile.node("layers.0.up").active_params == WIDE * MID + MID
        assert profile.node("head").own_params == HEAD_PARAMS
        leaves = [node for node in profile.root.walk() if node.class_name == "Linear"]
        held.append([_held(node) for node in leaves])
    whole = [WIDE * MID + MID, MID * WIDE + WIDE] * LAYERS + [HEAD_PARAMS]
    assert [a + b for a, b in zip(*held, strict=True)] == whole
    # Half of a block is what the first rank holds. Its end is in the bias of ``up``, before which
    # the original parameters are aligned.
    padding = 3 if workload == "fsdp1_orig_params" else 0
    half = (aligned(77, 11, 77, 7) if padding else BLOCK_PARAMS) // RANKS
    assert held[0][0] == half - padding


def _held(node: ModuleNode) -> int:
    return node.total_params if node.local_params is None else node.local_params


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")
def test_communication_of_a_compiled_model_is_that_of_the_eager_one(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    results = run_on_ranks(__file__, COMPILED, RANKS, tmp_path)
    for workload, truth in (
        ("ddp_compiled", SUM_OF_GRADIENTS | NEW_BUCKETS),  # the second step
        ("fsdp2_compiled", FSDP2),
    ):
        for profile in results.of(workload):
            assert rows_of(profile) == truth
            assert profile.total("forward").macs == FORWARD_MACS
