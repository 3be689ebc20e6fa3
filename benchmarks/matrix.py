"""Counts of every model in every way of running: the same in each cell.

    python benchmarks/matrix.py [--inductor]

Each cell is the MACs of one forward and backward pass, or ``=`` if they equal the eager run's for
every module and phase.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch_flops import FlopCounterMode, Profile, counting_backend

Build = Callable[[str], tuple[nn.Module, tuple[Any, ...]]]
Counts = dict[tuple[str, str], int]


def train(model: Any, inputs: tuple[Any, ...]) -> None:
    """Run forward, and backward to parameters and floating-point inputs."""
    for tensor in inputs:
        tensor.requires_grad_(tensor.is_floating_point())
    out = torch.utils._pytree.tree_leaves(model(*inputs))[0]
    out.sum().backward()


def counts_of(profile: Profile) -> Counts:
    return {
        (phase, fqn): cost.macs
        for phase in ("forward", "backward")
        for fqn, cost in profile.by_module(phase).items()  # type: ignore[arg-type]
        if cost.macs
    }


def counted(model: nn.Module, run: Callable[[], None]) -> Counts:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counter = FlopCounterMode(model, display=False)
        with counter:
            run()
    return counts_of(counter.profile)


def eager(build: Build, device: str = "cpu") -> Counts:
    model, inputs = build(device)
    return counted(model, lambda: train(model, inputs))


def fake(build: Build) -> Counts:
    with FakeTensorMode():
        return eager(build)


def compiled(build: Build, *, warm: bool, **options: Any) -> Counts:
    torch._dynamo.reset()
    model, inputs = build("cpu")
    made = torch.compile(model, **options)
    if warm:
        train(made, inputs)
    return counted(model, lambda: train(made, inputs))


def by_backend(build: Build, backend: Any) -> Counts:
    torch._dynamo.reset()
    model, inputs = build("cpu")
    counting = counting_backend(backend, model)
    train(torch.compile(model, backend=counting), inputs)
    return counts_of(counting.profile())


def in_context(build: Build, context: Callable[[], AbstractContextManager[Any]]) -> Counts:
    with context():
        return eager(build)


def functional(build: Build) -> Counts:
    model, inputs = build("cpu")
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    call = lambda *args: torch.func.functional_call(model, weights, args)  # noqa: E731
    return counted(model, lambda: train(call, inputs))


WAYS: dict[str, Callable[[Build], Counts]] = {
    "eager": eager,
    "meta": lambda build: eager(build, "meta"),
    "fake": fake,
    "bf16 autocast": lambda build: in_context(
        build, lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    ),
    "functional_call": functional,
    "compiled, cold": lambda build: compiled(build, warm=False, backend="aot_eager"),
    "compiled, warm": lambda build: compiled(build, warm=True, backend="aot_eager"),
    "compiled, dynamic": lambda build: compiled(
        build, warm=True, backend="aot_eager", dynamic=True
    ),
    "counting backend": lambda build: by_backend(build, "aot_eager"),
}
WITH_INDUCTOR: dict[str, Callable[[Build], Counts]] = {
    "inductor, warm": lambda build: compiled(build, warm=True),
    "counting inductor": lambda build: by_backend(build, "inductor"),
}


def row(build: Build, ways: Mapping[str, Callable[[Build], Counts]] = WAYS) -> dict[str, Counts]:
    """Return ``{way: counts}`` of one model; a way that cannot run it is omitted."""
    found = {}
    for way, run in ways.items():
        try:
            with warnings.catch_warnings(), nullcontext():
                warnings.simplefilter("ignore")
                found[way] = run(build)
        except (
            NotImplementedError,
            RuntimeError,
        ):  # routing depends on data, which meta tensors lack
            continue
    return found


def main() -> None:
    sys.path.append(str(Path(__file__).parent.parent))
    from tests.models import CASES

    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--inductor", action="store_true", help="takes minutes")
    ways = WAYS | (WITH_INDUCTOR if arguments.parse_args().inductor else {})
    print(f"| model | MACs | {' | '.join(list(ways)[1:])} |")
    print(f"|---|---:|{'---|' * (len(ways) - 1)}")
    for case in CASES:
        if not case.runs_for_real:
            continue
        found = row(case.build, ways)
        truth = found.pop("eager")
        cells = [_cell(found.get(way), truth) for way in list(ways)[1:]]
        total = sum(macs for (_, fqn), macs in truth.items() if not fqn)
        print(f"| {case.name} | {total:,} | {' | '.join(cells)} |", flush=True)


def _cell(counts: Counts | None, truth: Counts) -> str:
    if counts is None:
        return "needs data"
    if not counts:
        return "not compiled"  # torch.compile leaves LSTMs eager
    return "=" if counts == truth else f"{sum(m for (_, f), m in counts.items() if not f):,}"


if __name__ == "__main__":
    main()
