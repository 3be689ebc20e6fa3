"""Simulate ranks of Llama-3-405B under FSDP2, tensor and pipeline parallelism, without a cluster.

    python -m benchmarks.simulate                          # rank 777 of dp 64 x tp 8 x pp 2
    python -m benchmarks.simulate --rank 0 --layers 14
    dispatch-flops simulate benchmarks/simulate.py:llama_405b --mesh pp=2,dp=64,tp=8 --rank 777

The same function ``llama_405b`` runs under torchrun on real ranks. The printed closed form of the
MACs is the sum over the products of one rank.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dispatch_flops.distributed import simulate

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, HIDDEN = 126, 16384, 128, 8, 128, 53248
VOCABULARY, SEQUENCE, MICROBATCHES = 128256, 8192, 2
DTYPE = torch.bfloat16


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * HEAD_WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * HEAD_WIDTH, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, HEAD_WIDTH).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Stage(nn.Module):
    """The layers of one pipeline stage; the first has the embedding, the last has the head."""

    def __init__(self, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH) if is_first else None
        self.layers = nn.ModuleDict({str(layer): Block() for layer in layers})
        self.norm = RMSNorm() if is_last else None
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False) if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


def llama_405b(mesh: DeviceMesh, n_layers: int = LAYERS) -> tuple[Stage, Callable[[], Any]]:
    """Return a pipeline stage and a step of it: 1F1B, FSDP2, tensor and sequence parallel."""
    stage, stages, tp = mesh.get_local_rank("pp"), mesh["pp"].size(), mesh["tp"].size()
    is_first, is_last = stage == 0, stage == stages - 1
    layers = range(n_layers * stage // stages, n_layers * (stage + 1) // stages)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        model = Stage(layers, is_first=is_first, is_last=is_last)
        _shard(model, mesh, is_first=is_first, is_last=is_last)
        ids = torch.zeros(MICROBATCHES, SEQUENCE, dtype=torch.long)
        hidden = torch.zeros(1, SEQUENCE // tp, WIDTH).requires_grad_()
        logits = torch.zeros(1, SEQUENCE, VOCABULARY // tp).requires_grad_()
        part = PipelineStage(
            model,
            stage,
            stages,
            torch.device("cpu"),
            group=mesh.get_group("pp"),
            input_args=ids[:1] if is_first else hidden,
            output_args=logits if is_last else hidden.detach().clone().requires_grad_(),
        )
    finally:
        torch.set_default_dtype(before)
    schedule = Schedule1F1B(part, MICROBATCHES, loss_fn=lambda y, target: y.float().sum())
    inputs = [ids] if is_first else []
    target = {"target": ids} if is_last else {}
    return model, lambda: schedule.step(*inputs, **target)


def _shard(model: Stage, mesh: DeviceMesh, *, is_first: bool, is_last: bool) -> None:
    col, row, tp = ColwiseParallel, RowwiseParallel, mesh["tp"]

    def gathered() -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))

    if is_first:
        embedding = row(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(model, tp, {"tok_embeddings": embedding})
    if is_last:
        head = {"norm": SequenceParallel(), "output": col(input_layouts=Shard(1))}
        parallelize_module(model, tp, head)
    for layer in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
            "attention": gathered(), "feed_forward": gathered(),
            "attention.wq": col(), "attention.wk": col(), "attention.wv": col(),
            "attention.wo": row(output_layouts=Shard(1)),
            "feed_forward.w1": col(), "feed_forward.w3": col(),
            "feed_forward.w2": row(output_layouts=Shard(1)),
        }  # fmt: skip
        parallelize_module(layer, tp, plan)
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)


def closed_form_macs(n_layers: int, tp: int, *, has_head: bool) -> int:
    """Return the MACs of one rank's step: forward, backward and the scores that it recomputes."""
    projections = WIDTH * HEAD_WIDTH * (2 * HEADS + 2 * KV_HEADS) + 3 * WIDTH * HIDDEN
    attention = 2 * (HEADS // tp) * SEQUENCE**2 * HEAD_WIDTH
    forward = n_layers * (SEQUENCE * projections // tp + attention)
    if has_head:
        forward += SEQUENCE * WIDTH * VOCABULARY // tp
    return MICROBATCHES * (3 * forward + n_layers * attention // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=777)
    parser.add_argument("--layers", type=int, default=LAYERS)
    for name, size in {"pp": 2, "dp": 64, "tp": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    mesh = {"pp": options.pp, "dp": options.dp, "tp": options.tp}
    start = time.perf_counter()
    cluster = simulate(
        lambda device_mesh: llama_405b(device_mesh, options.layers), mesh, [options.rank]
    )
    seconds = time.perf_counter() - start
    profile, stage = cluster.ranks[options.rank], cluster.stage(options.rank)
    assert stage is not None
    n_layers = options.layers * (stage + 1) // options.pp - options.layers * stage // options.pp
    expected = closed_form_macs(n_layers, options.tp, has_head=stage == options.pp - 1)
    print(f"rank {options.rank} of {cluster.world_size}, stage {stage}, {n_layers} layers")
    print(f"MACs {profile.total().macs:,} (closed form {expected:,})")
    print(f"FLOPs {profile.total().flops:,}; parameters {profile.total_params:,}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{seconds:.1f} s, peak memory {peak} MiB")


if __name__ == "__main__":
    main()
