"""On a CUDA device: latency against torch.profiler's kernel times, MFU of a large matmul, overhead.

    python benchmarks/gpu.py

Expect a bfloat16 matmul of 8192 to reach 65-75 % of the datasheet's peak: random numbers draw more
power than that peak's clock allows. Latency should be the kernels' time or slightly more, both in a
separate pass and in one that counts, where kernels take longer than the host needs to launch them:
between the events around a short one, the device waits for the host. Kernels' times are 0 where
CUPTI may not see them.

The second table has the time of a step, with the wait for the device, relative to the plain one:
medians of 15 rounds, each way once in each. A counter is entered, left and read in each step.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.profiler import ProfilerActivity, profile

from dispatch_flops import FlopCounterMode, FlopMeter, analysis, measure_machine, profile_model
from dispatch_flops.analysis import latency_of
from dispatch_flops.cli.demo import bert_base
from dispatch_flops.units import fraction_text, number_text, ratio, seconds_text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.overhead import Floor

Step = Callable[[], Any]


def kernel_s(model: nn.Module, x: torch.Tensor) -> float:
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        model(x)
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in prof.key_averages()) / 1e6)


def bert(batch: int, sequence: int, *, training: bool) -> tuple[nn.Module, Any, Step]:
    model, ids = bert_base(batch, sequence)
    model, ids = model.to("cuda", torch.bfloat16), ids.cuda()
    if not training:
        return model, None, torch.no_grad()(lambda: model(ids))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(ids)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def small_layers() -> tuple[nn.Module, Any, Step]:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(1000))).cuda()
    x = torch.randn(8, 64, device="cuda")
    return model, None, lambda: model(x)


def ways_to_count(model: nn.Module, optimizer: Any, step: Step) -> dict[str, Step]:
    meter = FlopMeter(model, optimizer)

    def counted(*, memory: bool) -> None:
        with FlopCounterMode(model, display=False, memory=memory) as counter:
            step()
        counter.get_total_macs()

    def metered() -> None:
        with meter.step():
            step()

    def at_the_floor() -> None:
        with Floor():
            step()

    return {
        "plain": step,
        "floor": at_the_floor,
        "counter": lambda: counted(memory=False),
        "with memory": lambda: counted(memory=True),
        "meter": metered,
    }


def overhead(model: nn.Module, optimizer: Any, step: Step) -> dict[str, float]:
    """Return the median seconds of a step, plain and under each way to count it."""
    ways = ways_to_count(model, optimizer, step)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(3 + 15):  # the first three are not timed
        for name, way in ways.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            way()
            torch.cuda.synchronize()
            if number >= 3:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def overhead_table() -> str:
    programs = {
        "BERT-base 1 x 16, forward": bert(1, 16, training=False),
        "BERT-base 32 x 512, step": bert(32, 512, training=True),
        "1,000 linears, forward": small_layers(),
    }
    rows = []
    for name, program in programs.items():
        found = overhead(*program)
        plain = found.pop("plain")
        rows.append([name, seconds_text(plain), *(f"{s / plain:.2f}" for s in found.values())])
    return tabulate(rows, ["bfloat16", "plain", *found], disable_numparse=True)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device found")
        return 2
    measured = measure_machine("cuda", [torch.float32, torch.bfloat16])
    print(f"{measured.name}, torch {torch.__version__}")
    print(f"measured: {measured.flops_per_s}, {measured.bytes_per_s:.3e} bytes/s")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for edge, layers in ((1024, 16), (4096, 8), (8192, 2)):
            model = nn.Sequential(
                *(nn.Linear(edge, edge, bias=False, dtype=dtype) for _ in range(layers))
            ).cuda()
            x = torch.randn(edge, edge, device="cuda", dtype=dtype)
            found = profile_model(model, args=[x], warm_up=5, repeats=9)
            sheet = analysis.machine_of(found)
            whole, kernels = latency_of(found.root) or 0.0, kernel_s(model, x)
            with FlopCounterMode(model, display=False, latency=True) as counter:
                model(x)
            one_pass = latency_of(counter.profile.root) or 0.0
            parts = sum(child.latency_s or 0.0 for child in found.root.children)
            rows.append(
                [
                    f"{layers} x {edge} {str(dtype).removeprefix('torch.')}",
                    seconds_text(whole),
                    *map(number_text, (ratio(whole, kernels), ratio(one_pass, kernels))),
                    number_text(ratio(parts, whole)),
                    *(fraction_text(analysis.mfu(found, m, whole)) for m in (measured, sheet)),
                ]
            )
    print(
        tabulate(
            rows,
            [
                "linears",
                "latency",
                "/ kernels",
                "one pass / kernels",
                "children / whole",
                "MFU measured",
                "MFU sheet",
            ],
            disable_numparse=True,
        )
    )
    print(overhead_table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
