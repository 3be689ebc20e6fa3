"""This machine's own peaks, by a short matmul and a copy: for where no datasheet fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dispatch_flops.clock import time_call
from dispatch_flops.cost import FLOPS_PER_MAC
from dispatch_flops.devices import Devices, device_name
from dispatch_flops.errors import TargetError
from dispatch_flops.hardware import Machine


def measure(
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    *,
    size: int | None = None,
    repeats: int = 5,
) -> Machine:
    """Peaks as a square matmul and a large copy reach them on this machine.

    size: edge of the matrices (default 1024, on CUDA 8192). The best of ``repeats`` runs counts.
    What a matmul reaches is somewhat below a datasheet's peak, so utilisations against a
    measured machine are somewhat higher; ``source`` says so.
    """
    if torch.device(device).type == "meta":
        raise TargetError("the meta device computes nothing: there is no peak to measure")
    edge = size or (8192 if device == "cuda" else 1024)
    peaks = {
        str(dtype).removeprefix("torch."): _matmul_flops_per_s(edge, dtype, device, repeats)
        for dtype in dtypes
    }
    return Machine(
        name=device_name(device) or device,
        flops_per_s=peaks,
        bytes_per_s=_copy_bytes_per_s(64 * 2**20, device, repeats),
        source=f"measured: {edge} x {edge} matmul and 64 MiB copy, best of {repeats}",
    )


def _matmul_flops_per_s(edge: int, dtype: torch.dtype, device: str, repeats: int) -> float:
    a = torch.ones(edge, edge, dtype=dtype, device=device)
    b = torch.ones(edge, edge, dtype=dtype, device=device)
    return FLOPS_PER_MAC * edge**3 / _best_s(lambda: torch.mm(a, b), device, repeats)


def _copy_bytes_per_s(n_bytes: int, device: str, repeats: int) -> float:
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / _best_s(lambda: target.copy_(source), device, repeats)


def _best_s(run: Callable[[], object], device: str, repeats: int) -> float:
    devices = Devices.at(device)
    run()
    return min(time_call(run, devices=devices, repeats=1)[0] for _ in range(repeats))
