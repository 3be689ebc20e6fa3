"""FlopMeter: 10,000 steps against a counter in every step, a mixture of experts, total_flos.

    python benchmarks/meter.py [--steps N] [--only run|look-up|routing|trainer]

- run: N steps of a small MLP with three batch shapes in random order. The FLOPs of the meter, those
  of a counter that is entered in every step, and the time of both beside the bare loop.
- look-up: what a step of the meter takes beyond hooks that look the signatures up.
- routing: a mixture of experts whose routing follows the data; the meter reports it and samples.
- trainer: model FLOPs of one step of five architectures, by the meter, by torch's counter on eager
  attention, and by the Trainer's ``total_flos``. Matrix products alone, 2 FLOPs for a MAC.

One thread. Times are taken in turns of blocks of steps, so that a busy machine slows all alike;
those of the run are processor times.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.utils.flop_counter import FlopCounterMode as TorchCounter

from dispatch_flops import FlopCounterMode, FlopMeter
from dispatch_flops.profilers.model_state import ModelState
from dispatch_flops.profilers.step_signature import call_signature, optimizer_signature

IN, HID, OUT = 64, 128, 16
SHAPES = (8, 24, 40)
BLOCK = 100  # steps of one way before it is the next one's turn


def mlp() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, HID), nn.ReLU(), nn.Linear(HID, OUT))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(steps: int) -> None:
    xs = [torch.randn(rows, IN) for rows in SHAPES]
    order = [random.Random(seed).randrange(3) for seed in range(steps)]
    bare, counted, metered = mlp(), mlp(), mlp()
    meter, exact = FlopMeter(*metered), 0
    seconds = dict.fromkeys(("bare", "counter in every step", "meter"), 0.0)
    for begin in range(0, steps, BLOCK):
        block = [xs[index] for index in order[begin : begin + BLOCK]]
        start = time.process_time()
        for x in block:
            train(*bare, x)
        after_bare = time.process_time()
        for x in block:
            with FlopCounterMode(counted[0], display=False) as counter:
                train(*counted, x)
            exact += counter.get_total_flops()
        after_counter = time.process_time()
        for x in block:
            with meter.step():
                train(*metered, x)
        seconds["bare"] += after_bare - start
        seconds["counter in every step"] += after_counter - after_bare
        seconds["meter"] += time.process_time() - after_counter
    flops = {"bare": None, "counter in every step": exact, "meter": meter.total_flops}
    rows = [(way, flops[way], s, s / seconds["bare"]) for way, s in seconds.items()]
    print(f"{steps} steps, {len(SHAPES)} batch shapes, {steps - meter.run.timed_steps} counted")
    heads = ("", "FLOPs", "seconds of processor time", "x bare")
    print(tabulate(rows, heads, "github", intfmt=",", floatfmt=".2f"))
    print("equal" if exact == meter.total_flops else "DIFFERENT", "\n")


def look_up(rounds: int = 800) -> None:
    """Compare a step of the meter with hooks that only look a signature up."""
    for title, has_optimizer in (("a call and an optimizer's step", True), ("a call", False)):
        plain, looked, started, block = (
            seconds * 1e6 for seconds in _least_of_steps(rounds, has_optimizer=has_optimizer)
        )
        rows = [
            ("hooks that look up the signatures", looked - plain),
            ("the rest, after start()", started - looked),
            ("the rest, in a step() block", block - looked),
        ]
        print(f"a step of the meter beyond an empty one, {title}: {plain:.1f} µs")
        print(tabulate(rows, ("", "µs"), "github", floatfmt=".1f"), "\n")


def _least_of_steps(rounds: int, *, has_optimizer: bool) -> list[float]:
    """Return the least seconds of a bare step, a looked-up one, and one of the meter both ways.

    On a model and an optimizer that do next to nothing, so that little else is in the caches. Hooks
    on optimizers are torch's for all of them: no way has any while another one is measured.
    """

    def make() -> tuple[nn.Module, torch.optim.Optimizer | None, Callable[[], None]]:
        model, x = nn.Identity(), torch.ones(2, 3)
        if not has_optimizer:
            return model, None, lambda: model(x)
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])

        def run() -> None:
            model(x)
            optimizer.step()

        return model, optimizer, run

    @contextlib.contextmanager
    def bare() -> Iterator[Callable[[], None]]:
        yield make()[-1]

    @contextlib.contextmanager
    def looked_up() -> Iterator[Callable[[], None]]:
        model, optimizer, run = make()
        state, known = ModelState(model), dict[Any, int]()

        def on_call(module: nn.Module, args: Any, kwargs: Any) -> None:
            known.setdefault(("call", call_signature(state, args, kwargs)), 1)

        def on_stepping(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            known.setdefault(("stepping", optimizer_signature(optimizer)), 1)

        model.register_forward_pre_hook(on_call, with_kwargs=True)
        if optimizer is not None:
            optimizer.register_step_pre_hook(on_stepping)
        yield run

    @contextlib.contextmanager
    def started() -> Iterator[Callable[[], None]]:
        model, optimizer, run = make()
        meter = FlopMeter(model, optimizer, verify_every=0)
        meter.start()
        yield run
        meter.stop()

    @contextlib.contextmanager
    def metered() -> Iterator[Callable[[], None]]:
        model, optimizer, run = make()
        meter = FlopMeter(model, optimizer, verify_every=0)

        def step() -> None:
            with meter.step():
                run()

        yield step

    ways = bare, looked_up, started, metered
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for times, way in zip(found, ways, strict=True):
            with way() as step:
                for _ in range(10):
                    step()
                start = time.perf_counter()
                for _ in range(50):
                    step()
                times.append((time.perf_counter() - start) / 50)
    return [min(times) for times in found]


class Mixture(nn.Module):
    """Routes each row to one of several experts of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(IN, 4)
        self.experts = nn.ModuleList(nn.Linear(IN, size) for size in (16, 64, 256, 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(1)
        outs = [expert(x[chosen == index]).sum() for index, expert in enumerate(self.experts)]
        return torch.stack(outs).sum()


def routing(steps: int) -> None:
    torch.manual_seed(0)
    model = Mixture()
    meter, exact = FlopMeter(model, verify_every=100), 0
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(steps):
            x = torch.randn(32, IN)
            with FlopCounterMode(model, display=False) as counter, meter.step():
                model(x)
            exact += counter.get_total_flops()
    print(f"mixture of experts, {steps} steps, {steps - meter.run.timed_steps} counted")
    rows = [
        ("counter in every step", exact, "", ""),
        (
            "meter",
            meter.total_flops,
            f"{(meter.run.standard_error or 0) / exact:.2%}",
            f"{meter.total_flops / exact - 1:+.2%}",
        ),
    ]
    print(tabulate(rows, ("", "FLOPs", "standard error", "off by"), "github", intfmt=","))
    print(*{f"warning: {one.message}" for one in found}, sep="\n")
    print()


def trainer() -> None:
    import transformers as hf

    small: dict[str, Any] = {"attn_implementation": "eager"}
    ids = torch.randint(3, 900, (2, 128))
    text = {"input_ids": ids, "labels": ids}
    cases: list[tuple[str, nn.Module, dict[str, Any]]] = [
        ("GPT-2", hf.GPT2LMHeadModel(hf.GPT2Config(
            vocab_size=1000, n_embd=64, n_layer=2, n_head=4, bos_token_id=0,
            eos_token_id=0, **small)), text),
        ("Llama, 2 key heads", hf.LlamaForCausalLM(hf.LlamaConfig(
            vocab_size=1000, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, **small)), text),
        ("Mixtral, 2 of 8 experts", hf.MixtralForCausalLM(hf.MixtralConfig(
            vocab_size=1000, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=8,
            experts_implementation="eager", **small)), text),
        ("T5, 128 in, 16 out", hf.T5ForConditionalGeneration(hf.T5Config(
            vocab_size=1000, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
            decoder_start_token_id=0, **small)), {"input_ids": ids, "labels": ids[:, :16].clone()}),
        ("ViT, 8 x 8 patches", hf.ViTForImageClassification(hf.ViTConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            image_size=64, patch_size=8, num_labels=10, **small)),
            {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([1, 2])}),
    ]  # fmt: skip
    rows = []
    for name, model, inputs in cases:
        meter = FlopMeter(model, flops="contractions")
        with meter.step():
            model(**inputs).loss.backward()
        model.zero_grad()
        with TorchCounter(display=False) as theirs:
            model(**inputs).loss.backward()
        floating_point_ops: Any = hf.Trainer.floating_point_ops
        flos = floating_point_ops(argparse.Namespace(model=model), inputs)
        own, oracle = meter.model_flops, theirs.get_total_flops()
        rows.append((name, own, oracle, flos, flos / own))
    print("model FLOPs of one step")
    heads = ("", "meter", "torch's counter", "total_flos", "total_flos / meter")
    print(tabulate(rows, heads, "github", intfmt=",", floatfmt=".2f"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--only", choices=("run", "look-up", "routing", "trainer"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], None]] = {
        "run": lambda: run(options.steps),
        "look-up": look_up,
        "routing": lambda: routing(min(options.steps, 1000)),
        "trainer": trainer,
    }
    for name, part in parts.items():
        if options.only in (None, name):
            part()


if __name__ == "__main__":
    main()
