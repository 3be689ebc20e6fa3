"""Overhead of counting: ratios to the bare program, all variants interleaved in one process.

    python benchmarks/overhead.py [--peers] [--only TEXT]

One thread, medians. ``floor`` is a dispatch mode that only calls ``func._op(...)``: the minimum for
any tool of this kind. ``memory / ours`` is what the mode adds to the floor with ``memory=True``,
divided by what it adds without. ``--peers`` adds DeepSpeed's profiler (extra ``peers``).

Freed memory is kept (glibc's mallopt). Otherwise, allocating 440 MB of gradients in every step
would take longer, and vary more, than the overhead that is measured here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import io
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode as TorchCounter

from dispatch_flops import FlopCounterMode
from dispatch_flops.cli.demo import bert_base

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h

Context = Callable[[], AbstractContextManager[Any]]


class Floor(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func._op(*args, **kwargs) if kwargs else func._op(*args)


def variants(model: nn.Module | None) -> dict[str, Context]:
    return {
        "plain": contextlib.nullcontext,
        "floor": Floor,
        "dispatch_flops": lambda: FlopCounterMode(model, display=False),
        "with memory": lambda: FlopCounterMode(model, display=False, memory=True),
        "torch": lambda: TorchCounter(display=False),
    }


def steady(run: Callable[[], Any], contexts: dict[str, Context], repeats: int) -> dict[str, float]:
    """Return median seconds of ``run`` inside each context, after one warm-up run."""
    taken: dict[str, list[float]] = {name: [] for name in contexts}
    for _ in range(repeats):
        for name, context in contexts.items():
            with context():
                run()
                start = time.perf_counter()
                run()
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def one_shot(
    run: Callable[[], Any], contexts: dict[str, Context], repeats: int
) -> dict[str, float]:
    """Return median seconds of entering, running once and leaving: the whole public call."""
    taken: dict[str, list[float]] = {name: [] for name in contexts}
    for _ in range(repeats):
        for name, context in contexts.items():
            gc.collect()
            start = time.perf_counter()
            with context():
                run()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def keep_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def workloads() -> dict[str, tuple[nn.Module | None, Callable[[], Any], int]]:
    a, b = torch.randn(8, 8), torch.randn(8, 8)

    def adds() -> None:
        x = a
        for _ in range(10_000):
            x = torch.add(x, b)

    def products() -> None:
        for _ in range(10_000):
            torch.mm(a, b)

    bert = bert_base()[0].eval()
    ids = torch.zeros(1, 16, dtype=torch.long)
    linears = nn.Sequential(*(nn.Linear(8, 8) for _ in range(1000)))

    def bert_forward() -> None:
        with torch.no_grad():
            bert(ids)

    def bert_step() -> None:
        _first_tensor(bert(ids)).sum().backward()
        bert.zero_grad()

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.models.vision import ResNet

    resnet = ResNet((3, 4, 6, 3), 4).eval()
    image = torch.randn(1, 3, 224, 224)

    def resnet_forward() -> None:
        with torch.no_grad():
            resnet(image)

    @functools.cache  # allocated late: large blocks change how earlier programs get memory
    def images() -> torch.Tensor:
        return torch.randn(8, 3, 224, 224)

    def resnet_batch() -> None:
        with torch.no_grad():
            resnet(images())

    def linears_forward() -> None:
        with torch.no_grad():
            linears(a)

    return {
        "10,000 adds 8x8": (None, adds, 7),
        "10,000 matmuls 8x8": (None, products, 7),
        "BERT-base b1 s16 forward": (bert, bert_forward, 15),
        "BERT-base b1 s16 forward+backward": (bert, bert_step, 31),
        "ResNet-50 1 x 3 x 224^2 forward": (resnet, resnet_forward, 11),
        "ResNet-50 8 x 3 x 224^2 forward": (resnet, resnet_batch, 11),
        "1,000 linears forward": (linears, linears_forward, 11),
    }


def _first_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else _first_tensor(value[0])


@contextlib.contextmanager
def deepspeed_profiler(model: nn.Module) -> Any:
    """Run DeepSpeed's profiler once: start, run, stop, print, end."""
    from deepspeed.profiling.flops_profiler import FlopsProfiler

    profiler = FlopsProfiler(model)
    profiler.start_profile()
    yield
    profiler.stop_profile()
    with contextlib.redirect_stdout(io.StringIO()):
        profiler.print_model_profile()
    profiler.end_profile()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="also measure DeepSpeed's profiler")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only programs whose name contains TEXT"
    )
    given = parser.parse_args()
    peers = given.peers
    torch.set_num_threads(1)
    keep_freed_memory()
    rows, whole = [], []
    programs = {name: program for name, program in workloads().items() if given.only in name}
    for name, (model, run, repeats) in programs.items():
        seconds = steady(run, variants(model), repeats)
        over_floor = f"{seconds['dispatch_flops'] / seconds['floor']:.2f}"
        of_memory = (seconds["with memory"] - seconds["floor"]) / (
            seconds["dispatch_flops"] - seconds["floor"]
        )
        ratios = [*_ratios(seconds), over_floor, f"{of_memory:.2f}"]
        rows.append([name, f"{seconds['plain'] * 1e3:.2f} ms", *ratios])
        print(f"{name}: steady", file=sys.stderr)
    # Last, because importing DeepSpeed may change timings.
    for name, (model, run, repeats) in programs.items():
        if model is None:
            continue
        contexts = variants(model)
        if peers:
            contexts["deepspeed"] = lambda model=model: deepspeed_profiler(model)
        whole.append([name, *_ratios(one_shot(run, contexts, max(repeats // 2, 3)))])
        print(f"{name}: one shot", file=sys.stderr)
    counted = ["floor", "dispatch_flops", "with memory", "torch"]
    print(tabulate(rows, ["steady", "plain", *counted, "ours / floor", "memory / ours"]))
    print()
    print(tabulate(whole, ["one shot", *counted, "deepspeed"]))
    return 0


def _ratios(seconds: dict[str, float]) -> list[str]:
    return [f"{s / seconds['plain']:.2f}" for name, s in seconds.items() if name != "plain"]


if __name__ == "__main__":
    raise SystemExit(main())
