"""Printed latency against the latency of the unprofiled program.

    python benchmarks/latency.py [--peers]

The truth is unprofiled runs just before and after each run of each profiler, as many in a row as
that profiler takes (a first run finds colder caches than a third). For single modules it is the
median of their forward, timed in the model while nothing else is. torch.profiler and (``--peers``)
DeepSpeed's profiler are measured too. One thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from dispatch_flops import FlopCounterMode, profile_model
from dispatch_flops.analysis import inexact_latencies, latency_of
from dispatch_flops.cli.demo import bert_base

ROUNDS = 15
LEAF_ROUNDS = 5
OWN_RUNS = 3
LEAVES = 25  # per model, whose errors are measured


def plain_s(model: nn.Module, args: list[torch.Tensor], runs: int) -> list[float]:
    """Return the seconds of consecutive runs; if several, one more run warms up."""
    taken = []
    for _ in range(runs + (runs > 1)):
        start = time.perf_counter()
        model(*args)
        taken.append(time.perf_counter() - start)
    return taken[-runs:]


def own_pass_s(model: nn.Module, args: list[torch.Tensor]) -> float:
    """Return the latency that get_model_profile prints."""
    profile = profile_model(model, args=args, repeats=OWN_RUNS)
    return latency_of(profile.root) or 0.0


def one_pass_s(model: nn.Module, args: list[torch.Tensor]) -> float:
    """Return the latency that a training loop's profiler prints: counting and timing at once."""
    with FlopCounterMode(model, display=False, latency=True) as counter:
        model(*args)
    return latency_of(counter.profile.root) or 0.0


def models() -> dict[str, tuple[nn.Module, list[torch.Tensor]]]:
    bert, _ = bert_base()
    mlp = nn.Sequential(*(nn.Linear(256, 256) for _ in range(50)))
    tiny = nn.Sequential(*(nn.Linear(8, 8) for _ in range(1000)))
    conv = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        *(
            nn.Sequential(nn.Conv2d(64, 64, 3, 1, 1), nn.BatchNorm2d(64), nn.ReLU())
            for _ in range(8)
        ),
    )  # fmt: skip
    return {
        "BERT-base 1 x 128": (bert, [torch.ones(1, 128, dtype=torch.long)]),
        "50 linears 256, batch 64": (mlp, [torch.randn(64, 256)]),
        "convolutions 1 x 3 x 224^2": (conv, [torch.randn(1, 3, 224, 224)]),
        "1,000 linears 8, batch 8": (tiny, [torch.randn(8, 8)]),
    }


def torch_profiler_s(model: nn.Module, args: list[torch.Tensor]) -> float:
    """Return the span of a ``record_function`` around the model, from torch.profiler."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU]) as prof, record_function("whole"):
        model(*args)
    return next(e.cpu_time_total for e in prof.key_averages() if e.key == "whole") / 1e6


def deepspeed_s(model: nn.Module, args: list[torch.Tensor]) -> float:
    from deepspeed.profiling.flops_profiler import FlopsProfiler

    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(*args)
    profiler.stop_profile()
    seconds = profiler.get_total_duration()
    profiler.end_profile()
    return float(seconds)


def leaf_errors(model: nn.Module, args: list[torch.Tensor]) -> tuple[list[float], int]:
    """Return relative errors of some leaf modules' latencies, and how many others are marked ``~``.

    The truth is the leaf's own forward, timed within the model while nothing else is. It alternates
    with the profiles, so that both see the machine in the same state.
    """
    profile = profile_model(model, args=args)
    short = inexact_latencies(profile.root, profile.timing)
    leaves = [
        node.fqn
        for node in profile.root.walk()
        if not node.children and node.calls == 1 and node.latency_s is not None
    ]
    known = [fqn for fqn in leaves if fqn not in short]
    sample = known[:: max(len(known) // LEAVES, 1)]
    modules = dict(model.named_modules())
    ours: dict[str, list[float]] = {fqn: [] for fqn in sample}
    alone: dict[str, list[float]] = {fqn: [] for fqn in sample}
    for _ in range(LEAF_ROUNDS):
        profile = profile_model(model, args=args, repeats=OWN_RUNS)
        for fqn in sample:
            ours[fqn].append(profile.node(fqn).latency_s or 0.0)
            alone[fqn] += forward_s(model, args, modules[fqn])
    truth = {fqn: statistics.median(taken) for fqn, taken in alone.items()}
    errors = [abs(statistics.median(ours[fqn]) - truth[fqn]) / truth[fqn] for fqn in sample]
    return errors, len(leaves) - len(known)


def forward_s(model: nn.Module, args: list[torch.Tensor], leaf: nn.Module) -> list[float]:
    """Return the seconds of one module's forward in several runs of the model."""
    forward, taken = leaf.forward, []

    def timed(*inputs: Any, **named: Any) -> Any:
        start = time.perf_counter()
        out = forward(*inputs, **named)
        taken.append(time.perf_counter() - start)
        return out

    leaf.forward = timed  # type: ignore[method-assign]
    try:
        for _ in range(OWN_RUNS):
            model(*args)
    finally:
        del leaf.forward
    return taken


def largest_excess(model: nn.Module, args: list[torch.Tensor]) -> float:
    """Return the largest (sum of children - parent) / parent; negative if there is no excess."""
    profile = profile_model(model, args=args, repeats=3 * OWN_RUNS)
    excess = []
    for node in profile.root.walk():
        whole = latency_of(node)
        if node.children and whole:
            parts = sum(latency_of(child) or 0.0 for child in node.children)
            excess.append((parts - whole) / whole)
    return max(excess)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="measure DeepSpeed too")
    peers = parser.parse_args().peers
    torch.set_num_threads(1)
    rows = []
    for name, (model, args) in models().items():
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(*args)
            ways = {
                "own pass": own_pass_s,
                "one pass": one_pass_s,
                "torch.profiler": torch_profiler_s,
                **({"DeepSpeed": deepspeed_s} if peers else {}),
            }
            errors, marked = leaf_errors(model, args)  # before DeepSpeed patches functions
            excess = largest_excess(model, args)
            plain: dict[str, list[float]] = {way: [] for way in ways}
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(ROUNDS):
                for way, measure in ways.items():
                    in_a_row = OWN_RUNS if way == "own pass" else 1
                    plain[way].append(statistics.median(plain_s(model, args, in_a_row)))
                    seconds[way].append(measure(model, args))
                    plain[way].append(statistics.median(plain_s(model, args, in_a_row)))
            truth = statistics.median(plain["own pass"])
            rows.append(
                [
                    name,
                    f"{truth * 1e3:.2f} ms",
                    *(
                        f"{statistics.median(seconds[way]) / statistics.median(plain[way]):.3f}"
                        for way in ways
                    ),
                    f"{statistics.median(errors):.1%}" if errors else "",
                    f"{sum(error <= 0.1 for error in errors)} of {len(errors)}",
                    marked,
                    f"{excess:+.2%}",
                ]
            )
        print(f"{name}: done", file=sys.stderr)
    leaves = ["leaf error, median", "within 10 %", "marked ~"]
    headers = ["model", "unprofiled", *ways, *leaves, "children - parent, largest"]
    print(tabulate(rows, headers, disable_numparse=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
