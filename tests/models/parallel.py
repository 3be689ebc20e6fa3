"""Jobs of several ranks on a Llama-shaped model, with the closed forms of their cost.

A job builds and shards the model from a DeviceMesh, and returns what runs a step. It is the same
on real ranks and on simulated ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
)
from torch.distributed.pipelining import pipeline as split_model
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], Any]

LAYERS, WIDTH, HEADS, HEAD_WIDTH, HIDDEN, VOCABULARY = 2, 24, 4, 6, 40, 50
EVEN, EVEN_LAYERS = 8, 3
BATCH, SEQUENCE, MICROBATCHES = 3, 7, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = HEADS * HEAD_WIDTH
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, inner, bias=False) for _ in range(3))
        self.wo = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, HEAD_WIDTH).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.w2(F.silu(self.w1(x)))


class Part(nn.Module):
    """The layers of one pipeline stage; without a pipeline, the whole model."""

    def __init__(self, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        per_stage = LAYERS // stages
        self.tok = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else None
        names = range(stage * per_stage, (stage + 1) * per_stage)
        self.layers = nn.ModuleDict({str(name): Block() for name in names})
        is_last = stage == stages - 1
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False) if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tok is None else self.tok(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.out is None else self.out(x)


def tokens(batch: int = BATCH) -> torch.Tensor:
    return torch.zeros(batch, SEQUENCE, dtype=torch.long)


def forward_macs(*, tp: int = 1, layers: int = LAYERS, has_head: bool = True) -> int:
    """Return the MACs of one forward pass of a micro-batch on one rank."""
    rows = BATCH * SEQUENCE
    layer = (4 * rows * WIDTH * HEADS * HEAD_WIDTH + 2 * rows * WIDTH * HIDDEN) // tp
    head = rows * WIDTH * VOCABULARY // tp if has_head else 0
    return layers * (layer + attention_macs(tp)) + head


def attention_macs(tp: int = 1) -> int:
    """Return the MACs of scores and values of one layer."""
    return 2 * BATCH * (HEADS // tp) * SEQUENCE**2 * HEAD_WIDTH


def layer_params() -> int:
    return 4 * WIDTH * HEADS * HEAD_WIDTH + 2 * WIDTH * HIDDEN


# -- jobs --------------------------------------------------------------------------------------


def ddp(mesh: DeviceMesh) -> Step:
    model = DistributedDataParallel(Part())
    model.register_comm_hook(None, fp16_compress_hook)
    return lambda: model(tokens()).sum().backward()


def plain_ddp(mesh: DeviceMesh) -> Step:
    """Two passes: the second has other buckets, in the order in which gradients came."""
    model = DistributedDataParallel(Part(), bucket_cap_mb=0.01)

    def step() -> None:
        for _ in range(2):
            model(tokens()).sum().backward()

    return step


def clipped_ddp(mesh: DeviceMesh) -> Step:
    """A static graph, whose gradients are views of the buckets and are clipped."""
    model = DistributedDataParallel(Part(), static_graph=True, gradient_as_bucket_view=True)

    def step() -> None:
        model(tokens()).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return step


class OneOfTwo(nn.Module):
    """Two layers, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)])

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        out: torch.Tensor = self.layers[number](x)
        return out


def partly_used_ddp(mesh: DeviceMesh) -> Step:
    """Passes that leave parameters unused, which the reducer finds."""
    model = DistributedDataParallel(OneOfTwo(), find_unused_parameters=True)

    def step() -> None:
        for number in (0, 1, 0):
            model(torch.ones(BATCH, WIDTH), number).sum().backward()

    return step


def partly_used_static_ddp(mesh: DeviceMesh) -> Step:
    """A static graph that leaves parameters unused, in every pass the same."""
    model = DistributedDataParallel(OneOfTwo(), static_graph=True)

    def step() -> None:
        for _ in range(2):
            model(torch.ones(BATCH, WIDTH), 0).sum().backward()

    return step


def fsdp1_unsharded(mesh: DeviceMesh) -> Step:
    """FSDP1 that keeps the gathered parameters until backward."""
    options: dict[str, Any] = {
        "use_orig_params": True,
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "device_id": torch.device("cpu"),
    }
    model = Part()
    for name, layer in model.layers.items():
        model.layers[name] = FullyShardedDataParallel(layer, **options)
    whole = FullyShardedDataParallel(model, **options)
    return lambda: whole(tokens()).sum().backward()


def fsdp_from_meta(mesh: DeviceMesh) -> Step:
    """FSDP2 of a model that is built on the meta device; 50 rows are uneven on most meshes."""
    with torch.device("meta"):
        model = Part()
    _shard(model, mesh["dp"])
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(tokens()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp_even(mesh: DeviceMesh) -> tuple[nn.Module, Step]:
    """FSDP2 of layers whose rows are a multiple of the ranks; each layer is a group of its own."""
    model = nn.Sequential(*(nn.Linear(EVEN, EVEN, bias=False) for _ in range(EVEN_LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    x = torch.ones(BATCH, EVEN)
    return model, lambda: model(x).sum().backward()


def fsdp_steady(mesh: DeviceMesh) -> tuple[nn.Module, Step]:
    """A second step of ``fsdp_even``, whose first made the gathered parameters and the state."""
    model, backward = fsdp_even(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, step


def fsdp_resharding(mesh: DeviceMesh) -> Step:
    """FSDP2 of two micro-batches, whose parameters are spread over two ranks after forward."""
    model = Part()
    _shard(model, mesh["dp"], reshard_after_forward=2)

    def step() -> None:
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            model(tokens()).sum().backward()

    return step


def fsdp_tp(mesh: DeviceMesh) -> tuple[nn.Module, Step]:
    model = Part()
    tp = mesh["tp"]
    assert model.out is not None
    col, row = ColwiseParallel, RowwiseParallel
    parallelize_module(model, tp, {"out": col(output_layouts=Replicate())})
    for layer in model.layers.values():
        plan = {
            "attn.wq": col(), "attn.wk": col(), "attn.wv": col(), "attn.wo": row(),
            "w1": col(), "w2": row(),
        }  # fmt: skip
        parallelize_module(layer, tp, plan)
    _shard(model, mesh["dp"])
    return model, lambda: model(tokens()).sum().backward()


def pipeline(mesh: DeviceMesh) -> Step:
    """1F1B of two stages that know the shapes that they exchange."""
    return _pipeline(mesh, knows_shapes=True)


def dynamic_pipeline(mesh: DeviceMesh) -> Step:
    """1F1B of two stages that tell each other the shapes that they exchange."""
    return _pipeline(mesh, knows_shapes=False)


def traced_pipeline(mesh: DeviceMesh) -> Step:
    """GPipe of two stages into which torch splits the trace of a model."""
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
    traced = split_model(
        model, mb_args=(torch.ones(BATCH, WIDTH),), split_spec={"1": SplitPoint.BEGINNING}
    )
    number = mesh.get_local_rank("pp")
    stage = traced.build_stage(number, torch.device("cpu"), mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=lambda y, t: y.sum())
    x = torch.ones(MICROBATCHES * BATCH, WIDTH)
    return lambda: schedule.step(target=x) if number else schedule.step(x)


def interleaved(mesh: DeviceMesh) -> Step:
    """Interleaved 1F1B of two stages on each rank."""
    rank, ranks = mesh.get_rank(), mesh.size()
    stages = [
        PipelineStage(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            rank + number * ranks,
            2 * ranks,
            torch.device("cpu"),
        )
        for number in range(2)
    ]
    schedule = ScheduleInterleaved1F1B(stages, 2 * ranks, loss_fn=lambda y, t: y.sum())
    x = torch.ones(2 * ranks * BATCH, WIDTH)
    inputs = [x] if rank == 0 else []
    target = {"target": x} if rank == ranks - 1 else {}
    return lambda: schedule.step(*inputs, **target)


def _pipeline(mesh: DeviceMesh, *, knows_shapes: bool) -> Step:
    stage, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    model = Part(stage, stages)
    _shard(model, mesh["dp"])
    ids = tokens(MICROBATCHES * BATCH)
    hidden = torch.zeros(BATCH, SEQUENCE, WIDTH).requires_grad_()
    logits = torch.zeros(BATCH, SEQUENCE, VOCABULARY).requires_grad_()
    is_first, is_last = stage == 0, stage == stages - 1
    shapes: dict[str, Any] = {}
    if knows_shapes:
        shapes["input_args"] = ids[:BATCH] if is_first else hidden
        shapes["output_args"] = logits if is_last else hidden.detach().clone().requires_grad_()
    part = PipelineStage(
        model, stage, stages, torch.device("cpu"), group=mesh.get_group("pp"), **shapes
    )
    schedule = Schedule1F1B(part, n_microbatches=MICROBATCHES, loss_fn=lambda y, t: y.sum())
    inputs = [ids] if is_first else []
    target = {"target": ids} if is_last else {}
    return lambda: schedule.step(*inputs, **target)


def _shard(model: Part, mesh: DeviceMesh, **options: Any) -> None:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
