"""Is the latency that we print the latency that the user has without us?

    python benchmarks/latency.py [--peers]

Truth: the median of unprofiled runs, and for single modules the median of the module called by
itself, without any hook, on the input that it had in the model. Beside ours, torch.profiler's
and (``--peers``) DeepSpeed's. One thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from dispatch_flops import FlopCounterMode, profile_model
from dispatch_flops.analysis import latency_of
from dispatch_flops.demo import bert_base

REPEATS = 9


def median_s(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


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
    """The span of a ``record_function`` around the model, as torch.profiler reports it."""
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


def module_errors(model: nn.Module, args: list[torch.Tensor]) -> list[float]:
    """Relative errors of leaf modules' latencies against the leaf run by itself."""
    inputs: dict[nn.Module, tuple[Any, ...]] = {}
    hooks = [
        leaf.register_forward_pre_hook(lambda m, a: inputs.__setitem__(m, a))
        for leaf in model.modules()
        if not list(leaf.children())
    ]
    model(*args)
    for hook in hooks:
        hook.remove()
    profile = profile_model(model, args=args, repeats=REPEATS)
    names = dict(model.named_modules())
    errors = []
    for node in profile.root.walk():
        module = names[node.fqn]
        if node.children or module not in inputs or node.calls != 1:
            continue
        alone = median_s(lambda m=module: m(*inputs[m]))
        if node.latency_s is not None:
            errors.append(abs(node.latency_s - alone) / alone)
    return errors


def largest_excess(model: nn.Module, args: list[torch.Tensor]) -> float:
    """Largest (sum of children - parent) / parent; below 0 where no parent is exceeded."""
    profile = profile_model(model, args=args, repeats=REPEATS)
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
            ratios: dict[str, list[float]] = {"own pass": [], "one pass": [], "torch.profiler": []}
            if peers:
                ratios["DeepSpeed"] = []
            for _ in range(REPEATS):
                truth = median_s(lambda model=model, args=args: model(*args), 3)
                ours = profile_model(model, args=args, repeats=3, warm_up=0)
                ratios["own pass"].append((latency_of(ours.root) or 0.0) / truth)
                with FlopCounterMode(model, display=False, latency=True) as counter:
                    model(*args)
                ratios["one pass"].append((latency_of(counter.profile.root) or 0.0) / truth)
                ratios["torch.profiler"].append(torch_profiler_s(model, args) / truth)
                if peers:
                    ratios["DeepSpeed"].append(deepspeed_s(model, args) / truth)
            errors = sorted(module_errors(model, args))
            rows.append(
                [
                    name,
                    f"{median_s(lambda model=model, args=args: model(*args)) * 1e3:.2f} ms",
                    *(f"{statistics.median(values):.3f}" for values in ratios.values()),
                    f"{statistics.median(errors):.1%}",
                    f"{largest_excess(model, args):+.2%}",
                ]
            )
        print(f"{name}: done", file=sys.stderr)
    headers = ["model", "unprofiled", *ratios, "leaf error, median", "children - parent, largest"]
    print(tabulate(rows, headers, disable_numparse=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
