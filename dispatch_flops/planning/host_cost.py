"""The time that this host takes to launch an operator."""

from __future__ import annotations

import time

import torch

_CALLS = 2000


def measure_host_s_per_operator() -> float:
    """Return the least mean seconds of a small operator on the CPU, over several rounds.

    It is the time of Python, dispatch and a kernel without work. A device that runs kernels on
    its own hides it while its queue is not empty.
    """
    x = torch.ones(1)
    rounds = []
    with torch.no_grad():
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(_CALLS):
                torch.add(x, x)
            rounds.append((time.perf_counter() - start) / _CALLS)
    return min(rounds)
