"""Time and memory per unit as programs grow: flat if the profiler scales.

    python benchmarks/scale.py

Covers operators in one forward, modules of a model, accumulated steps and rendering a profile.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from dispatch_flops import FlopCounterMode
from dispatch_flops.renderers import deepspeed


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def operators(count: int) -> list[str]:
    a = torch.zeros(4, 4)

    def run() -> None:
        for _ in range(count):
            torch.add(a, a)

    with FlopCounterMode(display=False):
        taken = seconds(run)
    return [f"{count:,} operators", f"{taken / count * 1e6:.2f} µs / operator", f"{peak_mib():.0f}"]


def modules(count: int) -> list[list[str]]:
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(4, 4) for _ in range(9))) for _ in range(count // 10))
    )
    x = torch.zeros(2, 4)
    counter = FlopCounterMode(model, display=False)
    enter = seconds(counter.__enter__)
    run = seconds(lambda: model(x).sum().backward())
    leave = seconds(lambda: counter.__exit__(None, None, None))
    render = seconds(lambda: deepspeed.render(counter.profile))
    peak = f"{peak_mib():.0f}"
    return [
        [f"{count:,} modules, {part}", f"{taken / count * 1e6:.1f} µs / module", peak]
        for part, taken in (("enter", enter), ("run", run), ("leave", leave), ("render", render))
    ]


def steps(count: int) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.zeros(2, 4)

    def run() -> None:
        for _ in range(count):
            model(x).sum().backward()

    with FlopCounterMode(model, display=False):
        taken = seconds(run)
    return [f"{count:,} steps", f"{taken / count * 1e6:.0f} µs / step", f"{peak_mib():.0f}"]


def main() -> int:
    torch.set_num_threads(1)
    rows = [operators(count) for count in (1_000, 10_000, 100_000)]
    for count in (100, 1_000, 10_000):
        rows += modules(count)
    rows += [steps(count) for count in (100, 1_000, 10_000)]
    print(tabulate(rows, ["", "time", "peak RSS, MiB"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
