"""DeepSpeed's own test cases of its flops profiler, with the profiler of this package.

    python tests/helpers/deepspeed_cases.py

Its expectations are 200 FLOPs and 110 parameters of an engine's linear layer, and 866,076,672
FLOPs, 426,516,480 MACs and 61,706 parameters of LeNet5, FLOPs and MACs within 5 %.
Source: tests/unit/profiling/flops_profiler/test_flops_profiler.py of deepspeedai/DeepSpeed.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dispatch_flops import FlopsProfiler, get_model_profile
from dispatch_flops.integrations.deepspeed import attach
from tests.helpers.real_engine import free_port

WIDTH = 10
BATCH = 1024
# Convolutions with 5 x 5 kernels on 32 x 32 (results of 28 x 28, 10 x 10 and 1 x 1), two layers.
LENET_MACS = BATCH * (28 * 28 * 6 * 25 + 10 * 10 * 16 * 6 * 25 + 120 * 16 * 25 + 120 * 84 + 84 * 10)
LENET_PARAMS = (6 * 25 + 6) + (16 * 6 * 25 + 16) + (120 * 16 * 25 + 120) + 84 * 121 + 10 * 85


class Classifier(nn.Module):
    """A linear layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(self.linears[0](x), y)
        return loss


class LeNet5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pool, tanh = nn.AvgPool2d(2), nn.Tanh
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5), tanh(), pool, nn.Conv2d(6, 16, 5), tanh(), pool,
            nn.Conv2d(16, 120, 5), tanh(),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(120, 84), tanh(), nn.Linear(84, 10))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.classifier(torch.flatten(self.features(x), 1))
        return logits, torch.softmax(logits, 1)


def is_near(value: int, target: int) -> bool:
    return abs(value - target) < 0.05 * target


def field(printed: str, label: str) -> str:
    """Return the value of a line of the summary."""
    (line,) = [line for line in printed.splitlines() if line.startswith(f"{label}: ")]
    return line.removeprefix(f"{label}: ").strip()


def profile_engine() -> None:
    import deepspeed

    model = Classifier()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_batch_size": 1,
            "steps_per_print": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
            "zero_optimization": {"stage": 0},
            "flops_profiler": {"enabled": True, "profile_step": 1, "top_modules": 3},
        },
    )
    attach(engine, flops="contractions")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for _ in range(3):
            loss = engine(torch.randn(1, WIDTH), torch.zeros(1, dtype=torch.long))
            engine.backward(loss)
            engine.step()
    profiler = engine.flops_profiler
    assert profiler.flops == 2 * WIDTH * WIDTH and is_near(profiler.flops, 200)
    assert profiler.macs == WIDTH * WIDTH
    assert profiler.params == WIDTH * WIDTH + WIDTH == 110
    assert profiler.get_total_flops() == profiler.flops
    sizes = {
        "world size": engine.world_size,
        "data parallel size": engine.dp_world_size,
        "model parallel size": engine.mp_world_size,
        "batch size per GPU": engine.train_micro_batch_size_per_gpu(),
    }
    assert sizes == dict.fromkeys(sizes, 1)
    for label, size in sizes.items():
        assert field(printed.getvalue(), label) == str(size)
    engine.destroy()


def profile_lenet() -> None:
    flops, macs, params = get_model_profile(
        LeNet5(), (BATCH, 1, 32, 32), print_profile=False, detailed=True, module_depth=-1,
        top_modules=3, warm_up=1, as_string=False, ignore_modules=None,
    )  # fmt: skip
    assert (macs, params) == (LENET_MACS, LENET_PARAMS) == (426_516_480, 61_706)
    assert is_near(flops, 866_076_672)


def profile_sequence_parallel_engine() -> None:
    """An engine under sequence parallelism has no data-parallel size of its own."""
    engine = SimpleNamespace(
        world_size=8, dp_world_size=None, seq_dp_world_size=4, mp_world_size=1,
        has_moe_layers=False, train_micro_batch_size_per_gpu=lambda: 1,
        wall_clock_breakdown=lambda: False,
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(128, 128))
    profiler = FlopsProfiler(model)
    profiler.ds_engine = engine
    profiler.start_profile()
    for _ in range(3):
        model(torch.randn(64, 128))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        profiler.print_model_profile(profile_step=1, detailed=False)
    profiler.end_profile()
    assert field(printed.getvalue(), "world size") == "8"
    assert field(printed.getvalue(), "data parallel size") == "4"


if __name__ == "__main__":
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(free_port()), DS_BUILD_OPS="0")
    profile_lenet()
    profile_sequence_parallel_engine()
    profile_engine()
