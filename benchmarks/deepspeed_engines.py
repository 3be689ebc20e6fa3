"""DeepSpeed's own profiler and this one on the same engines, one ZeRO stage after another.

    DS_BUILD_OPS=0 pip install -c tests/constraints.txt '.[deepspeed]'
    python benchmarks/deepspeed_engines.py

A tied two-layer language model on CPU with gloo. Embedding and head share one weight. The head
runs in the root's own forward, which DeepSpeed's profiler loses under an engine. True MACs for
batch B and sequence S: B·S·(D·H + H·D + D·V).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn

B, S, D, H, V = 4, 8, 32, 48, 100
MICRO_BATCHES = 2
TRUTH = B * S * (D * H + H * D + D * V)


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.up = nn.Linear(D, H)
        self.down = nn.Linear(H, D)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.down(F.relu(self.up(self.embedding(ids))))
        return F.linear(hidden, self.embedding.weight).sum()


def run(stage: int, ours: bool) -> tuple[str, Any]:
    """Return what one optimizer step of ``MICRO_BATCHES`` prints, and this profiler if ``ours``."""
    import deepspeed

    torch.manual_seed(0)
    model = TiedModel()
    config = {
        "train_micro_batch_size_per_gpu": B,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": True, "profile_step": 1, "detailed": True},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    profiler = None
    if ours:
        from dispatch_flops.integrations.deepspeed import attach

        profiler = attach(engine)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for _ in range(2 * MICRO_BATCHES):
            engine.backward(engine(torch.zeros(B, S, dtype=torch.long)))
            engine.step()
    engine.destroy()
    return printed.getvalue(), profiler


def field(text: str, label: str) -> str:
    found = re.findall(rf"^{re.escape(label)}.*:\s+(.*?)\s*$", text, flags=re.MULTILINE)
    return " / ".join(found) if found else "-"


def root_latency(text: str) -> str:
    found = re.search(r"depth 0:\n.*\n.*\n\s+fwd latency - \{'\w+': '(.*?)'", text)
    return found.group(1) if found else "-"


def main() -> int:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    import deepspeed

    with contextlib.redirect_stdout(sys.stderr):
        deepspeed.init_distributed("gloo")
    rows = []
    for stage in (0, 1, 2, 3):
        for name, ours in (("DeepSpeed", False), ("dispatch_flops", True)):
            text, profiler = run(stage, ours)
            if profiler is not None and "--show" in sys.argv:
                print(text)
            rows.append(
                [
                    stage,
                    name,
                    text.count("Profile Summary"),
                    field(text, "fwd MACs per GPU"),
                    field(text, "bwd MACs per GPU (counted)"),
                    field(text, "params per GPU"),
                    root_latency(text),
                ]
            )
    print(f"truth: {TRUTH:,} MACs a forward, {MICRO_BATCHES} micro-batches a step")
    print(f"backward: {2 * TRUTH:,} MACs (the embedding's output needs a gradient)")
    headers = ["ZeRO", "profiler", "printed", "fwd MACs", "bwd MACs", "params", "root latency"]
    print(tabulate(rows, headers))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
