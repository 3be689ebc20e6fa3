"""Further jobs of several ranks: wrappers, schedules and meshes, with their closed forms.

Each is the same on real ranks and on simulated ones. See ``tests.models.parallel``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.helpers.parallel_nets import FLOAT, padded
from tests.models.parallel import (
    BATCH,
    HIDDEN,
    LAYERS,
    MICROBATCHES,
    SEQUENCE,
    VOCABULARY,
    WIDTH,
    Block,
    Part,
    Step,
    attention_macs,
    forward_macs,
    layer_params,
    tokens,
)

Rows = dict[tuple[str, str], tuple[int, int]]
"""``{(phase, kind): (calls, payload bytes)}`` of one rank's step, without its setup."""


@dataclass(frozen=True)
class Work:
    """MACs of one rank's step."""

    forward: int
    backward: int
    recompute: int = 0


def _transformer(
    *, tp: int = 1, times: int = 1, layers: int = LAYERS, has_head: bool = True
) -> Work:
    """Backward is twice forward, and the fused attention's backward recomputes the scores."""
    forward = times * forward_macs(tp=tp, layers=layers, has_head=has_head)
    return Work(forward, 2 * forward, times * layers * attention_macs(tp) // 2)


# -- data parallelism --------------------------------------------------------------------------


def fsdp1(mesh: DeviceMesh) -> Step:
    model = FullyShardedDataParallel(
        Part(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )
    return lambda: model(tokens()).sum().backward()


def fsdp1_orig_params(mesh: DeviceMesh) -> Step:
    model = FullyShardedDataParallel(
        Part(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return lambda: model(tokens()).sum().backward()


def _fsdp_rows(root_rows: int, *, times: int = 1, gathered_bytes: int = FLOAT) -> Rows:
    """The root's parameters, those of the embedding and the head, stay gathered until backward.

    root_rows: of each of them, with padding. times: micro-batches; gradients are reduced once.
    """
    layers, root = LAYERS * layer_params(), 2 * root_rows * WIDTH
    return {
        ("forward", "all_gather"): (
            times * (LAYERS + 1), times * gathered_bytes * (layers + root),
        ),
        ("backward", "all_gather"): (times * LAYERS, times * gathered_bytes * layers),
        ("backward", "reduce_scatter"): (LAYERS + 1, FLOAT * (layers + root)),
    }  # fmt: skip


def _hsdp_rows() -> Rows:
    calls, size = _fsdp_rows(VOCABULARY)["backward", "reduce_scatter"]
    return _fsdp_rows(VOCABULARY) | {("backward", "all_reduce"): (calls, size // 2)}


def _sharded(mesh: DeviceMesh, **options: Any) -> Any:
    model = Part()
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def hsdp(mesh: DeviceMesh) -> Step:
    model = _sharded(mesh)
    return lambda: model(tokens()).sum().backward()


def accumulation(mesh: DeviceMesh) -> Step:
    """Three micro-batches, of which the last reduces the gradients; then AdamW."""
    model = _sharded(mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for number in range(MICROBATCHES):
            model.set_requires_gradient_sync(number == MICROBATCHES - 1)
            model(tokens()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def mixed_precision(mesh: DeviceMesh) -> Step:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _sharded(mesh["dp"], mp_policy=policy)
    return lambda: model(tokens()).sum().backward()


# -- tensor and sequence parallelism -----------------------------------------------------------

SEQUENCE_PARALLEL_ROWS = 8  # of the whole sequence; each of up to 4 ranks has its part


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class NormedMlp(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def tp_sp(mesh: DeviceMesh) -> Step:
    model = nn.Sequential(*(NormedMlp() for _ in range(LAYERS)))
    tp = mesh["tp"]
    for layer in model:
        plan = {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, tp, plan)
    x = torch.ones(BATCH, SEQUENCE_PARALLEL_ROWS // tp.size(), WIDTH, requires_grad=True)
    return lambda: model(x).sum().backward()


def _tp_sp_work() -> Work:
    macs = LAYERS * 2 * BATCH * SEQUENCE_PARALLEL_ROWS * WIDTH * HIDDEN // 4
    return Work(macs, 2 * macs)


def _tp_sp_rows() -> Rows:
    """Each layer gathers before its MLP and reduces after it, and the other way in backward."""
    once = (LAYERS, LAYERS * FLOAT * BATCH * SEQUENCE_PARALLEL_ROWS * WIDTH)
    phases, kinds = ("forward", "backward"), ("all_gather", "reduce_scatter")
    return {(phase, kind): once for phase in phases for kind in kinds}


# -- experts -----------------------------------------------------------------------------------


class Experts(nn.Module):
    """One expert on each rank; rank r sends (r + 1) * (peer + 1) rows to each peer."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        rank = dist.get_rank() + 1
        splits = [rank * (peer + 1) for peer in range(dist.get_world_size())]
        rows: Any = all_to_all_single_autograd(x, splits, splits, dist.group.WORLD)
        return self.expert(rows)


def experts(mesh: DeviceMesh) -> Step:
    """Every rank has as many rows as it sends: 10 times its number, counted from 1."""
    model = Experts()
    x = torch.ones(10 * (dist.get_rank() + 1), WIDTH, requires_grad=True)
    return lambda: model(x).sum().backward()


def _experts_work(rank: int) -> Work:
    macs = 10 * (rank + 1) * WIDTH * HIDDEN
    return Work(macs, 2 * macs)


def _experts_rows(rank: int) -> Rows:
    sent = (1, FLOAT * 10 * (rank + 1) * WIDTH)
    return {("forward", "all_to_all"): sent, ("backward", "all_to_all"): sent}


# -- pipelines ---------------------------------------------------------------------------------

ROWS = 5  # of a micro-batch
BATCHES = 4


class Stage(nn.Module):
    """As many layers as the number of the stage, counted from 1."""

    def __init__(self, number: int) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number + 1))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _stages_of(schedule: str, position: int, positions: int = 2) -> list[int]:
    """Return the numbers of two stages on a rank: in a loop, or in the form of a V."""
    last = 2 * positions - 1
    is_v = schedule in ("ZBVZeroBubble", "DualPipeV")
    return [position, last - position if is_v else position + positions]


def _scheduled(name: str) -> Callable[[DeviceMesh], tuple[Any, Step]]:
    def job(mesh: DeviceMesh) -> tuple[Any, Step]:
        numbers = _stages_of(name, mesh.get_local_rank("pp"))
        modules = nn.ModuleList([Stage(number) for number in numbers])
        hidden = torch.zeros(ROWS, WIDTH).requires_grad_()
        stages = [
            PipelineStage(
                module,
                number,
                4,
                torch.device("cpu"),
                group=mesh.get_group("pp"),
                input_args=hidden if number else hidden.detach(),
                output_args=hidden.detach().clone().requires_grad_(),
            )
            for number, module in zip(numbers, modules, strict=True)
        ]
        schedule: Any = get_schedule_class(name)(
            stages, n_microbatches=BATCHES, loss_fn=lambda y, target: (y - target).square().sum()
        )
        batch = torch.ones(BATCHES * ROWS, WIDTH)
        inputs = [batch] if 0 in numbers else []
        target = {"target": batch, "losses": []} if 3 in numbers else {}
        return list(modules), lambda: schedule.step(*inputs, **target)

    return job


interleaved = _scheduled("Interleaved1F1B")
zero_bubble = _scheduled("InterleavedZeroBubble")
zero_bubble_v = _scheduled("ZBVZeroBubble")
dual_pipe_v = _scheduled("DualPipeV")


def _scheduled_work(name: str) -> Callable[[int], Work]:
    def work(rank: int) -> Work:
        position = rank // 2  # in pp=2, dp=2
        layers = sum(number + 1 for number in _stages_of(name, position))
        macs = BATCHES * ROWS * WIDTH * WIDTH
        unneeded = macs if position == 0 else 0  # the gradient of the first layer's input
        return Work(layers * macs, 2 * layers * macs - unneeded)

    return work


def _scheduled_rows(name: str) -> Callable[[int], Rows]:
    """Each pair of neighbours on different ranks exchanges activations, and gradients back."""

    def rows(rank: int) -> Rows:
        own, other = (_stages_of(name, position) for position in (rank // 2, 1 - rank // 2))
        given = BATCHES * sum(number + 1 in other for number in own)
        taken = BATCHES * sum(number - 1 in other for number in own)
        one = FLOAT * ROWS * WIDTH
        return {
            ("forward", "send"): (given, given * one),
            ("forward", "recv"): (taken, taken * one),
            ("backward", "send"): (taken, taken * one),
            ("backward", "recv"): (given, given * one),
        }

    return rows


def pp_fsdp_tp(mesh: DeviceMesh) -> tuple[Any, Step]:
    """1F1B of two stages, each sharded by FSDP2 over dp and by tensor parallelism over tp."""
    stage, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    model = Part(stage, stages)
    col, row = ColwiseParallel, RowwiseParallel
    if model.out is not None:
        parallelize_module(model, mesh["tp"], {"out": col(output_layouts=Replicate())})
    for layer in model.layers.values():
        plan = {
            "attn.wq": col(), "attn.wk": col(), "attn.wv": col(), "attn.wo": row(),
            "w1": col(), "w2": row(),
        }  # fmt: skip
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    is_first, is_last = stage == 0, stage == stages - 1
    ids = tokens(MICROBATCHES * BATCH)
    hidden = torch.zeros(BATCH, SEQUENCE, WIDTH).requires_grad_()
    logits = torch.zeros(BATCH, SEQUENCE, VOCABULARY).requires_grad_()
    part = PipelineStage(
        model,
        stage,
        stages,
        torch.device("cpu"),
        group=mesh.get_group("pp"),
        input_args=ids[:BATCH] if is_first else hidden,
        output_args=logits if is_last else hidden.detach().clone().requires_grad_(),
    )
    schedule = Schedule1F1B(part, n_microbatches=MICROBATCHES, loss_fn=lambda y, t: y.sum())
    inputs = [ids] if is_first else []
    target = {"target": ids} if is_last else {}
    return model, lambda: schedule.step(*inputs, **target)


def _pp_fsdp_tp_work(rank: int) -> Work:
    return _transformer(tp=2, times=MICROBATCHES, layers=1, has_head=rank >= 4)


def _pp_fsdp_tp_rows(rank: int) -> Rows:
    """A backward that is not the last keeps the parameters for the next forward.

    The first stage runs F F B F B B: its layer is gathered for two F and two B. The second runs
    F B F B F B, and gathers for its first F and every B.
    """
    is_first = rank < 4
    in_forward, in_backward = (2, 2) if is_first else (1, 3)
    layer = FLOAT * layer_params() // 2
    root = FLOAT * WIDTH * (VOCABULARY if is_first else padded(VOCABULARY // 2, 2))
    hidden, n = FLOAT * BATCH * SEQUENCE * WIDTH, MICROBATCHES
    # wo and w2 add partial sums; wq, wk, wv and w1 add the gradients of their inputs.
    rows = {
        ("forward", "all_gather"): (in_forward + 1, in_forward * layer + root),
        ("backward", "all_gather"): (in_backward, in_backward * layer),
        ("backward", "reduce_scatter"): (2, layer + root),
        ("forward", "all_reduce"): (2 * n, 2 * n * hidden),
        ("backward", "all_reduce"): (4 * n, 4 * n * hidden),
    }
    if is_first:
        return rows | {("forward", "send"): (n, n * hidden), ("backward", "recv"): (n, n * hidden)}
    calls, size = rows["forward", "all_gather"]
    logits = FLOAT * BATCH * SEQUENCE * VOCABULARY
    return rows | {
        ("forward", "recv"): (n, n * hidden),
        ("backward", "send"): (n, n * hidden),
        ("forward", "all_gather"): (calls + n, size + n * logits),
        ("backward", "all_reduce"): (5 * n, 5 * n * hidden),
    }


# -- all jobs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A job with its mesh, and the work and the communication of each rank."""

    run: Callable[[DeviceMesh], Any]
    mesh: Mapping[str, int]
    work: Callable[[int], Work]
    rows: Callable[[int], Rows]


T = TypeVar("T")


def _even(of_each: T) -> Callable[[int], T]:
    return lambda rank: of_each


def _of_schedule(job: Callable[[DeviceMesh], Any], name: str) -> Job:
    return Job(job, {"pp": 2, "dp": 2}, _scheduled_work(name), _scheduled_rows(name))


_DP = {"dp": 4}
_ONCE = _even(_transformer())

JOBS: dict[str, Job] = {
    "fsdp1": Job(fsdp1, _DP, _ONCE, _even(_fsdp_rows(VOCABULARY))),
    "fsdp1_orig_params": Job(fsdp1_orig_params, _DP, _ONCE, _even(_fsdp_rows(VOCABULARY))),
    "hsdp": Job(hsdp, {"replicate": 2, "shard": 2}, _ONCE, _even(_hsdp_rows())),
    "accumulation": Job(
        accumulation,
        _DP,
        _even(_transformer(times=MICROBATCHES)),
        _even(_fsdp_rows(padded(VOCABULARY, 4), times=MICROBATCHES)),
    ),
    "mixed_precision": Job(
        mixed_precision,
        _DP,
        _ONCE,
        _even(_fsdp_rows(padded(VOCABULARY, 4), gathered_bytes=2)),
    ),
    "tp_sp": Job(tp_sp, {"tp": 4}, _even(_tp_sp_work()), _even(_tp_sp_rows())),
    "experts": Job(experts, {"ep": 4}, _experts_work, _experts_rows),
    "interleaved": _of_schedule(interleaved, "Interleaved1F1B"),
    "zero_bubble": _of_schedule(zero_bubble, "InterleavedZeroBubble"),
    "zero_bubble_v": _of_schedule(zero_bubble_v, "ZBVZeroBubble"),
    "dual_pipe_v": _of_schedule(dual_pipe_v, "DualPipeV"),
    "pp_fsdp_tp": Job(pp_fsdp_tp, {"pp": 2, "dp": 2, "tp": 2}, _pp_fsdp_tp_work, _pp_fsdp_tp_rows),
}
