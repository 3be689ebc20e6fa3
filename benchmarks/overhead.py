"""Overhead of counting: ratios to the bare program, all variants interleaved in one process.

    python benchmarks/overhead.py [--peers] [--only PATTERN] [--rounds N]
    python benchmarks/overhead.py --against REVISION    # see overhead_gate.py

One thread. Each figure is the median of N rounds (5), with the smallest and the largest; within a
round it is a ratio of medians. ``floor`` is a dispatch mode that only calls ``func._op(...)``: the
minimum for any tool of this kind. ``floor, hooks`` has two global module hooks besides, which do
nothing: the minimum for a tool that knows the modules and sees every operator. Calls of layers and
steps of optimizers that are like earlier ones are not dispatched, so that counting may take less.
``memory / ours`` divides what a block adds to the bare program with ``memory=True`` by what it adds
without. ``--peers`` adds DeepSpeed's profiler (extra ``peers``).

- steady: the program once more inside a block that is already entered.
- one shot: entering, running once, leaving and reading the totals, as most users do.
- parts: of one shot, in milliseconds, and what building the whole profile then takes per module.
- import, first block: what importing the counter takes after torch, and the first block of a
  process more than the next.

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
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
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


@contextlib.contextmanager
def floor_with_hooks() -> Iterator[None]:
    before = register_module_forward_pre_hook(lambda module, args: None)
    after = register_module_forward_hook(lambda module, args, output: None, always_call=True)
    try:
        with Floor():
            yield
    finally:
        before.remove()
        after.remove()


@contextlib.contextmanager
def counted(model: nn.Module | None, *, memory: bool = False) -> Iterator[None]:
    with FlopCounterMode(model, display=False, memory=memory) as counter:
        yield
    counter.get_total_macs(), counter.get_total_flops()


@contextlib.contextmanager
def counted_by_torch() -> Iterator[None]:
    with TorchCounter(display=False) as counter:
        yield
    counter.get_total_flops()


def variants(model: nn.Module | None) -> dict[str, Context]:
    return {
        "plain": contextlib.nullcontext,
        "floor": Floor,
        "floor, hooks": floor_with_hooks,
        "dispatch_flops": lambda: counted(model),
        "with memory": lambda: counted(model, memory=True),
        "torch": counted_by_torch,
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


def parts(model: nn.Module, run: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Return median seconds of each part of one shot; the profile's are per module."""
    taken: dict[str, list[float]] = {}
    modules = sum(1 for _ in model.modules())
    for _ in range(repeats):
        gc.collect()
        counter = FlopCounterMode(model, display=False)
        steps: dict[str, Callable[[], Any]] = {
            "enter": counter.__enter__,
            "run": run,
            "leave": lambda counter=counter: counter.__exit__(None, None, None),
            "totals": lambda counter=counter: (
                counter.get_total_macs(), counter.get_total_flops()
            ),
            "profile / module": lambda counter=counter: counter.profile.root,
        }  # fmt: skip
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            taken.setdefault(name, []).append(time.perf_counter() - start)
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    seconds["profile / module"] /= modules
    return seconds


ONCE = """
import time, torch
def taken(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
def load():
    from dispatch_flops import FlopCounterMode
def count():
    from dispatch_flops import FlopCounterMode
    with FlopCounterMode(layer, display=False):
        layer(x)
layer, x = torch.nn.Linear(8, 8), torch.ones(8, 8)
layer(x)
print(taken(load), taken(count) - taken(count))
"""


def once_per_process() -> tuple[float, float]:
    """Return the seconds of importing the counter after torch, and of the first block.

    The second is what a block around one layer takes more than the next.
    """
    done = subprocess.run([sys.executable, "-c", ONCE], capture_output=True, check=True)
    loading, first = map(float, done.stdout.split())
    return loading, first


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

    optimizer = _adamw()
    return {
        "10,000 adds 8x8": (None, adds, 7),
        "10,000 matmuls 8x8": (None, products, 7),
        "AdamW, 40 parameters": (None, optimizer.step, 50),
        "BERT-base b1 s16 forward": (bert, bert_forward, 15),
        "BERT-base b1 s16 forward+backward": (bert, bert_step, 31),
        "ResNet-50 1 x 3 x 224^2 forward": (resnet, resnet_forward, 11),
        "ResNet-50 8 x 3 x 224^2 forward": (resnet, resnet_batch, 11),
        "1,000 linears forward": (linears, linears_forward, 11),
    }


def _first_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else _first_tensor(value[0])


def _adamw() -> torch.optim.Optimizer:
    """Return AdamW, as it is on the CPU: about ten operators for each of 40 small parameters."""
    parameters = [nn.Parameter(torch.randn(8, 8)) for _ in range(40)]
    for parameter in parameters:
        parameter.grad = torch.randn(8, 8)
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    return optimizer


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", action="store_true", help="also measure DeepSpeed's profiler")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="only programs whose name matches PATTERN"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="repetitions of it all")
    parser.add_argument(
        "--against", metavar="REVISION", help="only compare with this revision; 1 if 10 %% slower"
    )
    given = parser.parse_args()
    if given.against is not None:
        from overhead_gate import compare

        return compare(given.against, given.only)
    torch.set_num_threads(1)
    keep_freed_memory()
    matches = re.compile(given.only).search
    programs = {name: program for name, program in workloads().items() if matches(name)}
    rows = []
    for name, (model, run, repeats) in programs.items():
        rounds = [steady(run, variants(model), repeats) for _ in range(given.rounds)]
        over_floor = spread(seconds["dispatch_flops"] / seconds["floor"] for seconds in rounds)
        plain = f"{statistics.median(seconds['plain'] for seconds in rounds) * 1e3:.2f} ms"
        of_memory = spread(
            (seconds["with memory"] - seconds["plain"])
            / (seconds["dispatch_flops"] - seconds["plain"])
            for seconds in rounds
        )
        rows.append([name, plain, *ratios(rounds), over_floor, of_memory])
        print(f"{name}: steady", file=sys.stderr)
    # Last, because importing DeepSpeed may change timings.
    whole, by_part = [], []
    for name, (model, run, repeats) in programs.items():
        if model is None:
            continue
        contexts = variants(model)
        if given.peers:
            contexts["deepspeed"] = lambda model=model: deepspeed_profiler(model)
        times = max(repeats // 2, 3)
        whole.append([name, *ratios([one_shot(run, contexts, times) for _ in range(given.rounds)])])
        taken = [parts(model, run, times) for _ in range(given.rounds)]
        by_part.append(
            [
                name,
                *(spread(t[part] * 1e3 for t in taken) for part in list(taken[0])[:-1]),
                spread(t["profile / module"] * 1e6 for t in taken),
            ]
        )
        print(f"{name}: one shot", file=sys.stderr)
    compared = ["floor", "floor, hooks", "dispatch_flops", "with memory", "torch"]
    print(tabulate(rows, ["steady", "plain", *compared, "ours / floor", "memory / ours"]))
    print()
    print(tabulate(whole, ["one shot", *compared, "deepspeed"]))
    print()
    print(
        tabulate(
            by_part, ["parts", "enter ms", "run ms", "leave ms", "totals ms", "profile us/module"]
        )
    )
    print()
    once = [once_per_process() for _ in range(given.rounds)]
    print(f"import after torch: {spread(loading * 1e3 for loading, _ in once)} ms")
    print(
        f"first block of a process: {spread(first * 1e3 for _, first in once)} ms more than others"
    )
    return 0


def ratios(rounds: Sequence[dict[str, float]]) -> list[str]:
    """Return the ratio to the bare program of every variant."""
    return [
        spread(seconds[name] / seconds["plain"] for seconds in rounds)
        for name in rounds[0]
        if name != "plain"
    ]


def spread(values: Iterable[float]) -> str:
    """Return the median, with the smallest and the largest where they differ."""
    known = sorted(values)
    low, middle, high = (f"{v:.2f}" for v in (known[0], statistics.median(known), known[-1]))
    return middle if low == high else f"{middle} ({low}-{high})"


if __name__ == "__main__":
    raise SystemExit(main())
