"""Resident memory over many profiles in a row.

    python benchmarks/memory.py [--profiles 1000]

The first rows run a training step with and without a counter, each in a fresh process. The other
rows run one long block. It keeps the latest 2^18 changes of module, for later backward passes, and
up to 8192 operator signatures, and then stops growing.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

from dispatch_flops import FlopCounterMode

WIDTH = 64
MIB = 2**20
Step = Callable[[], None]


def resident() -> int:
    """Return the bytes of this process that are resident now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 16, WIDTH)


def bare() -> Iterator[Step]:
    """A training step, no counter."""
    model, x = model_and_input()

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    yield step


def profiled() -> Iterator[Step]:
    """A training step under a new counter, and its profile read."""
    model, x = model_and_input()

    def step() -> None:
        with FlopCounterMode(model, display=False) as counter:
            model(x).sum().backward()
        counter.profile.total()
        model.zero_grad()

    yield step


def same_counter() -> Iterator[Step]:
    """A training step under one counter that is entered repeatedly."""
    model, x = model_and_input()
    counter = FlopCounterMode(model, display=False)

    def step() -> None:
        with counter:
            model(x).sum().backward()
        model.zero_grad()

    yield step


def graphs_in_one_block() -> Iterator[Step]:
    """Forward passes in one block whose graphs are never used."""
    model, x = model_and_input()
    with FlopCounterMode(model, display=False):
        yield lambda: (model(x), None)[1]


def shapes_in_one_block() -> Iterator[Step]:
    """One block, and a new shape each time."""
    model = nn.Linear(WIDTH, WIDTH)
    lengths = iter(range(1, 10**9))
    with FlopCounterMode(model, display=False):
        yield lambda: (model(torch.empty(next(lengths) % 100_003, WIDTH, device="cpu")), None)[1]


def modules_in_one_block() -> Iterator[Step]:
    """One block, and a new module each time."""
    x = torch.randn(2, WIDTH)
    with FlopCounterMode(nn.Identity(), display=False):
        yield lambda: (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())(x), None)[1]


CASES = (
    bare, profiled, same_counter, graphs_in_one_block, shapes_in_one_block, modules_in_one_block,
)  # fmt: skip


def growth(case: Callable[[], Iterator[Step]], times: int) -> list[float]:
    """Return growth in MiB since warm-up, after each fifth of the steps."""
    torch.set_num_threads(1)
    seen = []
    steps = case()
    step = next(steps)
    for _ in range(times // 5):
        step()
    start = resident()
    for _ in range(5):
        for _ in range(times // 5):
            step()
        seen.append((resident() - start) / MIB)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--profiles", type=int, default=1000, help="steps after warm-up")
    times = parser.parse_args().profiles
    rows = []
    for case in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seen = pool.apply(growth, (case, times))
        per_step = 1024 * (seen[-1] - seen[0]) / (times * 4 / 5)
        doc = (case.__doc__ or "").strip()
        rows.append([doc, *(f"{m:+.2f}" for m in seen), f"{per_step:+.2f}"])
    fifths = [f"after {times * n // 5}" for n in range(1, 6)]
    print(f"growth of resident memory in MiB after {times // 5} warm-up steps")
    print(tabulate(rows, [f"{times} times", *fifths, "KiB per step"], disable_numparse=True))


if __name__ == "__main__":
    main()
