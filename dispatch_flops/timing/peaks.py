"""Peaks of this machine, measured by a matmul and a copy, where no datasheet is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch

from dispatch_flops.analysis.kernel_families import KernelFamily
from dispatch_flops.analysis.machines import Machine, name_of_peak
from dispatch_flops.counting.placement import device_name
from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.profile.cost import FLOPS_PER_MAC
from dispatch_flops.timing.devices import Devices
from dispatch_flops.timing.kernels import kernels_of
from dispatch_flops.timing.latencies import seconds_of

_MIB = 2**20
_ENOUGH_S = 1.0  # of readings of one figure


def measure_machine(
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    *,
    size: int | None = None,
    repeats: int = 5,
    families: Sequence[KernelFamily] = (),
) -> Machine:
    """Measure the FLOP/s of a square matmul and the bytes/s of a large copy on this machine.

        machine = measure_machine("cpu", [torch.float32])
        print(machine.flops_per_s["float32"], machine.bytes_per_s)

    device, dtypes: what to measure. size: edge of the matrices, which hold random numbers; by
    default 1024 on the CPU and 8192 elsewhere. repeats: number of readings; the best one counts.
    Those of a figure end after a second, as of a dtype that the CPU emulates.

    families: kernels whose own peaks are measured, too: "product" (the better of a matmul and a
        linear layer), "convolution", "attention" and "recurrent"; by default none.

    float32 uses TF32 where torch's settings allow it. A matmul reaches slightly less than the peak
    of a datasheet, so that utilization against a measured machine is slightly higher. The
    machine's ``source`` says that it was measured.

    Raises TargetError for a device that cannot be used, as the meta device, which does not compute,
    and ConfigError for unusable dtypes, sizes, repeats or families.
    """
    _check_options(dtypes, size, repeats, families)
    names = {dtype: _peak_name(dtype) for dtype in dtypes}
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        raise TargetError(
            f'device={device!r:.60} is not a device of torch; pass one such as "cpu" or "cuda"'
        ) from None
    if where.type == "meta":
        raise TargetError("the meta device does not compute and has no peak; pass another device")
    for dtype in dtypes:
        _check_product(where, dtype)
    edge = size or (1024 if where.type == "cpu" else 8192)
    copied_mib = 64 if where.type == "cpu" else 1024
    try:
        operand = torch.randn(edge, edge, device="cpu", generator=torch.Generator().manual_seed(0))
    except RuntimeError as error:
        raise ConfigError(f"size={size}: pass a smaller one, {error!s:.200}") from error
    peaks = {
        name: _matmul_flops_per_s(operand.to(where, dtype), repeats)
        for dtype, name in names.items()
    }
    return Machine(
        name=device_name(where) or device,
        flops_per_s=peaks,
        kernel_flops_per_s={
            family: {
                name: kernel_flops_per_s(family, where, dtype, repeats)
                for dtype, name in names.items()
            }
            for family in families
        },
        bytes_per_s=_copy_bytes_per_s(copied_mib * _MIB, where, repeats),
        source=f"measured: {edge} x {edge} matmul and {copied_mib} MiB copy, best of <= {repeats}",
    )


def _check_options(dtypes: Any, size: Any, repeats: Any, families: Any) -> None:
    if not isinstance(dtypes, Sequence) or not all(isinstance(d, torch.dtype) for d in dtypes):
        raise ConfigError(f"dtypes={dtypes!r:.60}: pass a list of dtypes, such as [torch.float32]")
    for name, value in (("size", 1 if size is None else size), ("repeats", repeats)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}={value!r:.60}: pass an int of at least 1")
    known = get_args(KernelFamily)
    if not isinstance(families, Sequence) or not all(family in known for family in families):
        raise ConfigError(f"families={families!r:.60}: pass a list of {', '.join(known)}")


def _peak_name(dtype: torch.dtype) -> str:
    own = str(dtype).removeprefix("torch.")
    name = name_of_peak(own)
    if name not in (own, "float8"):
        raise ConfigError(
            f"dtypes has {dtype}, which is compared with the peak of {name}; pass torch.{name}"
        )
    return name


def _check_product(device: torch.device, dtype: torch.dtype) -> None:
    """Raise TargetError if the device cannot be used, ConfigError if it multiplies no ``dtype``."""
    try:
        one = torch.ones(1, 1, device=device)
    except (AssertionError, RuntimeError) as error:
        raise TargetError(f"device {str(device)!r} cannot be used: {error}") from error
    try:
        one = one.to(dtype)
        torch.matmul(one, one)
    except RuntimeError as error:
        raise ConfigError(
            f"dtypes has {dtype}, which {device} does not multiply: {error}"
        ) from None


def _matmul_flops_per_s(operand: torch.Tensor, repeats: int) -> float:
    seconds = _best_s(lambda: torch.mm(operand, operand), operand.device, repeats)
    return FLOPS_PER_MAC * operand.shape[0] ** 3 / seconds


def kernel_flops_per_s(
    family: KernelFamily, device: torch.device, dtype: torch.dtype, repeats: int
) -> float:
    """Return the best FLOP/s of the kernels of a family."""
    try:
        return max(
            FLOPS_PER_MAC * macs / _best_s(run, device, repeats)
            for run, macs in kernels_of(family, device, dtype)
        )
    except RuntimeError as error:
        raise ConfigError(
            f"families: {family} kernels do not run in {dtype} on {device}: {error}"
        ) from error


def _copy_bytes_per_s(n_bytes: int, device: torch.device, repeats: int) -> float:
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / _best_s(lambda: target.copy_(source), device, repeats)


def _best_s(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the best seconds of one call; on an accelerator, ten calls share a synchronization."""
    devices = Devices.at(str(device))
    calls = 10 if devices.accelerators else 1

    def several() -> None:
        for _ in range(calls):
            run()

    if devices.accelerators:
        several()  # a first launch may itself take a second
    readings: list[float] = []
    while len(readings) <= repeats and sum(readings) < _ENOUGH_S:
        readings.append(seconds_of(several, devices.clock()))
    return min(readings[1:] or readings) / calls  # the first one warms up
