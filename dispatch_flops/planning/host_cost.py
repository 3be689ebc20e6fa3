"""The time that this host takes to launch an operator."""

from __future__ import annotations

import time

import torch
from torch import nn

from dispatch_flops.profilers.counter import FlopCounterMode

_LAYERS, _ROUNDS = 16, 20


def measure_host_s_per_operator() -> float:
    """Return the least mean seconds of an operator in a training step on tensors of one element.

    It is the time of Python, autograd, dispatch and kernels with hardly any work, on the CPU. A
    device that runs kernels on its own hides it while its queue is not empty.
    """
    with torch.random.fork_rng(devices=[]):
        layers = [part for _ in range(_LAYERS) for part in (nn.Linear(1, 1), nn.Tanh())]
        model, x = nn.Sequential(*layers), torch.ones(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with torch.enable_grad():
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with FlopCounterMode(model, display=False) as counter:
        step()
    operators = sum(op.calls for op in counter.profile.op_totals() if op.kind != "free")
    rounds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        step()
        rounds.append(time.perf_counter() - start)
    return min(rounds) / operators
