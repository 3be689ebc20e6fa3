"""Profile one ZeRO stage of the real DeepSpeed: ``python real_engine.py STAGE FILE``.

torchrun starts it on several ranks; on two ranks, communication is held to closed forms. The model
is a tied language model whose head runs in the root's own forward.
"""

from __future__ import annotations

import os
import socket
import sys

import torch
import torch.nn.functional as F
from torch import distributed, nn

from dispatch_flops import Profile
from dispatch_flops.integrations.deepspeed import attach

B, S, D, H, V = 4, 5, 6, 7, 11
MICRO_BATCHES = 3
FORWARD = B * S * (D * H + H * D + D * V)
PARAMS = V * D + D * H + H + H * D + D

FLOAT = 4  # bytes
ENGINE = "<outside>.DeepSpeed engine"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.up = nn.Linear(D, H)
        self.down = nn.Linear(H, D)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.down(F.relu(self.up(self.embedding(ids))))
        return F.linear(hidden, self.embedding.weight).sum()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sent(stage: int) -> dict[tuple[str, str, str], int]:
    """Return ``{(module, phase, kind): payload bytes}`` of a step on each of two ranks.

    ZeRO-3 gathers each parameter for the forward and again for the backward pass of its module, as
    ``main`` configures it. The embedding's weight belongs to the root, which uses it for the head.
    """
    gradients, norm = FLOAT * PARAMS, FLOAT
    held = FLOAT * even(PARAMS)
    if stage == 0:
        return {
            (ENGINE, "backward", "all_reduce"): gradients,
            (ENGINE, "optimizer", "all_reduce"): norm,
        }
    if stage < 3:  # ZeRO-2 reduces after every micro-batch
        return {
            (ENGINE, "backward", "all_reduce"): gradients * (MICRO_BATCHES if stage == 2 else 1),
            (ENGINE, "optimizer", "all_reduce"): norm,
            (ENGINE, "optimizer", "all_gather"): held,
        }
    parameters = {"": V * D, "up": D * H + even(H), "down": H * D + even(D)}
    rows = {
        (fqn, phase, "all_gather"): MICRO_BATCHES * FLOAT * even(size)
        for fqn, size in parameters.items()
        for phase in ("forward", "backward")
    }
    rows[ENGINE, "backward", "reduce_scatter"] = MICRO_BATCHES * FLOAT * sum(parameters.values())
    rows[ENGINE, "optimizer", "all_reduce"] = 2 * FLOAT  # the norm, in double precision
    return rows


def even(size: int) -> int:
    return size + size % 2


def sent_by(profile: Profile) -> dict[tuple[str, str, str], int]:
    rows: dict[tuple[str, str, str], int] = {}
    for total in profile.communication:
        key = (total.fqn, total.phase, total.kind)
        rows[key] = rows.get(key, 0) + total.payload_bytes
    return rows


def main(stage: int, output_file: str) -> None:
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(free_port()))
    os.environ.update(DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = Tied()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": B,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "wall_clock_breakdown": True,
            "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": output_file},
        },
    )
    profiler = attach(engine)
    ids = torch.zeros(B, S, dtype=torch.long)
    for _ in range(3):
        with torch.no_grad():
            engine(ids)  # evaluation does not belong to a step
        for _ in range(MICRO_BATCHES):
            engine.backward(engine(ids))
            engine.step()
    profile, cluster = profiler.profile.check(), profiler.cluster
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    engine.destroy()
    distributed.destroy_process_group()
    assert (cluster is not None) == (rank == 0 and world_size > 1)
    assert cluster is None or list(cluster.ranks) == list(range(world_size))
    assert world_size != 2 or sent_by(profile) == sent(stage), sent_by(profile)
    assert (
        stage < 3
        or world_size != 2
        or profile.root.local_params == sum(even(size) // 2 for size in (V * D, D * H, H, H * D, D))
    )
    assert profile.root.total("forward").macs == MICRO_BATCHES * FORWARD
    assert profile.root.own("forward").macs == MICRO_BATCHES * B * S * D * V
    assert profile.root.total("backward").macs == MICRO_BATCHES * 2 * FORWARD
    assert profile.total_params == PARAMS
    assert profile.run.batch_size == MICRO_BATCHES * B
    assert profile.root.latency_s is not None and 0 < profile.root.latency_s < 60
    assert not profile.is_lower_bound, profile.uncounted_ops()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
