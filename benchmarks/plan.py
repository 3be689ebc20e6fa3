"""Planned times of training steps beside measured ones on this CPU, in one interleaved run.

    python -m benchmarks.plan [--rounds 5] [--output FILE]

The machine's peaks of each kernel family, its bandwidth and the host's time for an operator are
measured first. Each plan is made on the meta device. Then all models take turns, so that other
load on the machine meets them alike; a measured time is the median of the rounds. Nothing is
fitted: the table shows how far a plan is from reality.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

from benchmarks import llama
from benchmarks.published_models import GptConfig
from dispatch_flops import Machine, measure_machine, plan
from dispatch_flops.planning.host_cost import measure_host_s_per_operator
from dispatch_flops.planning.training_step import backward_from
from dispatch_flops.units import seconds_text

Inputs = tuple[torch.Tensor, ...]
Build = Callable[[], tuple[nn.Module, Inputs]]


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


def measured_s(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each step, all steps in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(machine: Machine, host_s: float, rounds: int) -> str:
    """Return the table of plans and measurements, in Markdown."""
    planned = {
        name: plan(
            build, machine, target="cpu", host_s_per_operator=host_s, search_batch=False
        ).steps[0]
        for name, build in MODELS.items()
    }
    seconds = measured_s({name: real_step(build) for name, build in MODELS.items()}, rounds)
    rows, errors = [], {"unfused": [], "nothing hidden": []}  # type: ignore[var-annotated]
    for name, step in planned.items():
        bounds, real = step.bounds, seconds[name]
        figures = [bounds.fused_s, bounds.least_s, bounds.serial_s]
        known = [figure for figure in figures if figure is not None]
        rows.append(
            [name, seconds_text(real), *(seconds_text(figure) for figure in figures)]
            + [f"{figure / real:.2f}" for figure in known]
        )
        for kind, figure in zip(errors, known[1:], strict=True):
            errors[kind].append(abs(figure / real - 1))
    header = ["step", "measured", "all traffic saved", "unfused", "nothing hidden"]
    header += ["saved / measured", "unfused / measured", "nothing hidden / measured"]
    summary = "; ".join(
        f"{kind}: median error {statistics.median(found):.0%}, largest {max(found):.0%}"
        for kind, found in errors.items()
    )
    return "\n".join(
        [
            "# Plans against measured steps",
            "",
            f"{machine.name}, one thread, torch {torch.__version__}; median of {rounds} rounds in "
            "turns, forward, backward and AdamW. The machine was busy with other work, and the "
            "peaks were measured before the steps: the ratios are not those of a quiet machine.",
            "",
            f"{summary}. Nothing is fitted. The host takes {host_s * 1e6:.1f} us for an operator.",
            "",
            tabulate(rows, header, tablefmt="github", disable_numparse=True),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = measure_machine(
        "cpu", [torch.float32], families=("product", "convolution", "attention", "recurrent")
    )
    text = report(machine, measure_host_s_per_operator(), options.rounds)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
