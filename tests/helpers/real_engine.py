"""Profile one ZeRO stage of the real DeepSpeed: ``python real_engine.py STAGE FILE``.

The model is a tied language model whose head runs in the root's own forward.
"""

from __future__ import annotations

import os
import socket
import sys

import torch
import torch.nn.functional as F
from torch import nn

from dispatch_flops.integrations.deepspeed import attach

B, S, D, H, V = 4, 5, 6, 7, 11
MICRO_BATCHES = 3
FORWARD = B * S * (D * H + H * D + D * V)
PARAMS = V * D + D * H + H + H * D + D


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


def main(stage: int, output_file: str) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(free_port()), DS_BUILD_OPS="0")
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = Tied()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": B,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "zero_optimization": {"stage": stage},
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
    profile = profiler.profile.check()
    engine.destroy()
    assert profile.root.total("forward").macs == MICRO_BATCHES * FORWARD
    assert profile.root.own("forward").macs == MICRO_BATCHES * B * S * D * V
    assert profile.root.total("backward").macs == MICRO_BATCHES * 2 * FORWARD
    assert profile.total_params == PARAMS
    assert profile.run.batch_size == MICRO_BATCHES * B
    assert profile.root.latency_s is not None and 0 < profile.root.latency_s < 60
    assert not profile.is_lower_bound, profile.uncounted_ops()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
