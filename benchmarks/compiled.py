"""Compiled programs: their speed after a profile, and what the counting backend costs per step.

    python benchmarks/compiled.py [--backend inductor] [--small]

1. A chain of pointwise operators, which compiling fuses, is timed before and after one profile.
   The ratio is 1 if the compiled code is intact. The same for torch's own FlopCounterMode.
2. A BERT-base is compiled by inductor and by the counting backend around inductor. Their steps are
   timed alternately. Counting is also timed by itself, per call of a graph.

Times are medians of this process's CPU time, one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode as TorchFlopCounterMode

from dispatch_flops import FlopCounterMode, counting_backend
from dispatch_flops.compile.compilers import count_runs

Batch = torch.Tensor


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.out(mixed))
        out: torch.Tensor = self.norms[1](x + self.down(F.gelu(self.up(x))))
        return out


class Bert(nn.Module):
    """BERT-base, or if ``small`` a toy of the same form."""

    def __init__(self, *, small: bool) -> None:
        super().__init__()
        hidden, heads, layers = (64, 2, 2) if small else (768, 12, 12)
        self.embed = nn.Embedding(30522, hidden)
        self.layers = nn.Sequential(*(Layer(hidden, heads) for _ in range(layers)))

    def forward(self, tokens: Batch) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.embed(tokens))
        return out


class Chain(nn.Module):
    """Chain of pointwise operators: many passes over memory when eager, one when compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1 << 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.relu(x * self.scale) + 1
        return x


def step(model: Callable[[Batch], torch.Tensor], tokens: Batch) -> None:
    model(tokens).sum().backward()


def seconds_of(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def median_s(run: Callable[[], None], times: int) -> float:
    return statistics.median(seconds_of(run) for _ in range(times))


def after_a_profile(
    counter: Callable[[nn.Module], AbstractContextManager[Any]], chosen: argparse.Namespace
) -> tuple[float, int]:
    """Return the time after one profile over the time before it, and graphs compiled meanwhile."""
    torch._dynamo.reset()
    model, x = Chain(), torch.ones(1 << 20)
    compiled = torch.compile(model, backend=chosen.backend)
    run = lambda: step(compiled, x)  # noqa: E731
    for _ in range(3):
        run()
    before, graphs = median_s(run, chosen.times), counters["stats"]["unique_graphs"]
    with counter(model):
        run()
    run()
    after = median_s(run, chosen.times)
    return after / before, counters["stats"]["unique_graphs"] - graphs


def per_step(chosen: argparse.Namespace) -> None:
    torch._dynamo.reset()
    model, tokens = Bert(small=chosen.small), torch.ones(2, 32, dtype=torch.long)
    backend = counting_backend(chosen.backend, model)
    plain = torch.compile(Bert(small=chosen.small), backend=chosen.backend)
    counting = torch.compile(model, backend=backend)

    def counted_step() -> None:
        step(counting, tokens)
        backend.step()

    for _ in range(3):
        step(plain, tokens)
        counted_step()
    pairs = [
        (seconds_of(lambda: step(plain, tokens)), seconds_of(counted_step))
        for _ in range(chosen.times)
    ]
    bare, counted = (statistics.median(times) for times in zip(*pairs, strict=True))
    calls = 10000
    graph = count_runs(backend.graphs[0], lambda inputs: None)
    call_s = statistics.median(seconds_of(lambda: _repeat(graph, calls)) / calls for _ in range(9))
    report_s = statistics.median(seconds_of(lambda: backend.step()) for _ in range(99))
    graphs = len(backend.graphs)
    added = graphs * call_s + report_s
    print(f"a step: {bare * 1e3:.2f} ms, counted {counted * 1e3:.2f} ms ({counted / bare:.4f})")
    print(
        f"a graph's call costs {call_s * 1e6:.2f} us more, step() {report_s * 1e6:.1f} us: "
        f"{added * 1e6:.1f} us or {added / bare:.4%} of a step with {graphs} graph calls"
    )


def _repeat(run: Callable[[list[Any]], None], times: int) -> None:
    inputs: list[Any] = []
    for _ in range(times):
        run(inputs)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    arguments.add_argument("--small", action="store_true")
    arguments.add_argument("--times", type=int, default=15)
    chosen = arguments.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    eager = median_s(lambda: step(Chain(), torch.ones(1 << 20)), chosen.times)
    print(f"the chain's step, eager: {eager * 1e3:.1f} ms")
    ours = after_a_profile(lambda model: FlopCounterMode(model, display=False), chosen)
    theirs = after_a_profile(lambda _: TorchFlopCounterMode(display=False), chosen)
    for name, (ratio, graphs) in (("dispatch_flops", ours), ("torch's counter", theirs)):
        print(f"{name:16} compiled step after a profile / before: {ratio:.2f}, new graphs {graphs}")
    per_step(chosen)


if __name__ == "__main__":
    main()
