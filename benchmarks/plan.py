"""Planned times of training steps beside measured ones on this CPU, in one interleaved run.

    python -m benchmarks.plan [--seconds 150] [--output FILE]

In each round all models take turns, forwards and backwards in alternation, and the machine's peaks
are read beside them, so that other load meets all alike. The peaks are the best of all readings.
A measured time is the least of all rounds; the median shows how quiet the machine was. Plans are
made on the meta device. Nothing is fitted: the table shows how far a plan is from reality.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

from benchmarks import llama
from benchmarks.published_models import GptConfig
from dispatch_flops import Machine, measure_machine, plan
from dispatch_flops.analysis.kernel_families import KernelFamily
from dispatch_flops.planning.host_cost import measure_host_s_per_operator
from dispatch_flops.planning.training_step import backward_from
from dispatch_flops.units import seconds_text

Inputs = tuple[torch.Tensor, ...]
Build = Callable[[], tuple[nn.Module, Inputs]]
FAMILIES: tuple[KernelFamily, ...] = ("product", "convolution", "attention", "recurrent")
LEAST_ROUNDS = 5
WHERE_PLANS_ARE_WRONG = """\
Small steps take longer than their kernels: the host prepares each operator, and the peaks are those
of large kernels. The host's time is measured on operators of one element, so that it is too short
for convolutions and too long for the many small operators of a recurrent layer. A plan runs on the
meta device, where an LSTM consists of matrix products. This CPU runs it in oneDNN's kernels, whose
measured peak is about twice that of matrix products, so that a step takes less time than planned.
"""


def mlp(width: int, batch: int) -> tuple[nn.Module, Inputs]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers), (torch.ones(batch, width),)


def convolutions(channels: int, side: int) -> tuple[nn.Module, Inputs]:
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(4):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers), (torch.ones(2, 3, side, side),)


def encoder(width: int, length: int) -> tuple[nn.Module, Inputs]:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
    stack = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return stack, (torch.ones(2, length, width),)


def small_llama(hidden: int, sequence: int) -> tuple[nn.Module, Inputs]:
    config = llama.LlamaConfig(
        layers=3, hidden=hidden, ffn=3 * hidden, heads=4, kv_heads=2, vocab=1000
    )
    return llama.Llama(config), (torch.ones(1, sequence, dtype=torch.long),)


def gpt(width: int, sequence: int) -> tuple[nn.Module, Inputs]:
    config = GptConfig(layers=3, width=width, heads=4, vocabulary=1000, sequence=sequence)
    return config.build(), (torch.ones(2, sequence, dtype=torch.long),)


def recurrent(kind: type[nn.Module], width: int) -> tuple[nn.Module, Inputs]:
    return kind(width, width, 2), (torch.ones(32, 16, width),)


MODELS: dict[str, Build] = {
    "MLP, 512 x 64 rows": lambda: mlp(512, 64),
    "MLP, 1024 x 256 rows": lambda: mlp(1024, 256),
    "convolutions, 16 channels": lambda: convolutions(16, 32),
    "convolutions, 48 channels": lambda: convolutions(48, 64),
    "encoder, 128 x 64 tokens": lambda: encoder(128, 64),
    "encoder, 256 x 256 tokens": lambda: encoder(256, 256),
    "Llama, 64 x 32 tokens": lambda: small_llama(64, 32),
    "Llama, 256 x 256 tokens": lambda: small_llama(256, 256),
    "GPT, 64 x 32 tokens": lambda: gpt(64, 32),
    "GPT, 256 x 256 tokens": lambda: gpt(256, 256),
    "LSTM, 128": lambda: recurrent(nn.LSTM, 128),
    "GRU, 128": lambda: recurrent(nn.GRU, 128),
}


def real_step(build: Build) -> Callable[[], None]:
    """Return the same step that is planned, with data."""
    model, inputs = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        backward_from(model(*inputs))
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of each step and readings of the machine, in rounds."""

    seconds: Mapping[str, Sequence[float]]
    machine: Machine
    rounds: int

    def least_s(self, name: str) -> float:
        return min(self.seconds[name])

    def unrest(self, name: str) -> float:
        """Return the median over the least time: 1 on a machine that does nothing else."""
        return statistics.median(self.seconds[name]) / self.least_s(name)


def measure(
    steps: Mapping[str, Callable[[], None]],
    read_machine: Callable[[], Machine],
    budget_s: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Run all steps and read the machine in turns until the time is over, at least five rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    readings: list[Machine] = []
    end = clock() + budget_s
    gc.disable()
    try:
        while len(readings) < LEAST_ROUNDS or clock() < end:
            readings.append(read_machine())
            for name in list(steps)[:: 1 if len(readings) % 2 else -1]:
                start = clock()
                steps[name]()
                seconds[name].append(clock() - start)
            gc.collect(0)
    finally:
        gc.enable()
    return Measured(seconds=seconds, machine=best_of(readings), rounds=len(readings))


def best_of(readings: Sequence[Machine]) -> Machine:
    """Return a machine with the highest of each peak."""
    first = readings[0]
    families = first.kernel_flops_per_s
    return dataclasses.replace(
        first,
        flops_per_s={
            dtype: max(reading.flops_per_s[dtype] for reading in readings)
            for dtype in first.flops_per_s
        },
        kernel_flops_per_s={
            family: {
                dtype: max(reading.kernel_flops_per_s[family][dtype] for reading in readings)
                for dtype in families[family]
            }
            for family in families
        },
        bytes_per_s=max(reading.bytes_per_s or 0.0 for reading in readings),
        source=f"{first.source}, best of {len(readings)} rounds",
    )


def read_cpu() -> Machine:
    """Read the peaks of this CPU once."""
    return measure_machine("cpu", [torch.float32], families=FAMILIES, repeats=1)


def report(measured: Measured, host_s: float) -> str:
    """Return the table of plans and measurements, in Markdown."""
    rows = []
    errors: dict[str, list[float]] = {"unfused": [], "nothing hidden": []}
    for name, build in MODELS.items():
        bounds = (
            plan(
                build,
                measured.machine,
                target="cpu",
                host_s_per_operator=host_s,
                search_batch=False,
            )
            .steps[0]
            .bounds
        )
        real = measured.least_s(name)
        figures = [bounds.fused_s, bounds.least_s, bounds.serial_s]
        known = [figure for figure in figures if figure is not None]
        rows.append(
            [name, seconds_text(real), f"{measured.unrest(name):.2f}"]
            + [seconds_text(figure) for figure in figures]
            + [f"{figure / real:.2f}" for figure in known]
        )
        for kind, figure in zip(errors, known[1:], strict=True):
            errors[kind].append(abs(figure / real - 1))
    header = [
        "step",
        "measured",
        "median / least",
        "all traffic saved",
        "unfused",
        "nothing hidden",
    ]
    header += ["saved / measured", "unfused / measured", "nothing hidden / measured"]
    summary = "; ".join(
        f"{kind}: median error {statistics.median(found):.0%}, largest {max(found):.0%}"
        for kind, found in errors.items()
    )
    unrest = statistics.median(map(measured.unrest, MODELS))
    return "\n".join(
        [
            "# Plans against measured steps",
            "",
            f"{measured.machine.name}, one thread, torch {torch.__version__}: forward, backward "
            f"and AdamW. All models and the readings of peaks took turns in {measured.rounds} "
            "rounds. Measured is the least time, and each peak the best reading. The median of the "
            f"rounds is {unrest:.2f} times the least: where that is far from 1, the machine was "
            "busy with other work, and the ratios are not those of a quiet one.",
            "",
            f"{summary}. Nothing is fitted. The host takes {host_s * 1e6:.1f} us for an operator.",
            "",
            tabulate(rows, header, tablefmt="github", disable_numparse=True),
            "",
            WHERE_PLANS_ARE_WRONG,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=150.0, help="of the rounds together")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    host_s = measure_host_s_per_operator()
    steps = {name: real_step(build) for name, build in MODELS.items()}
    measured = measure(steps, read_cpu, options.seconds)
    text = report(measured, min(host_s, measure_host_s_per_operator()))
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
