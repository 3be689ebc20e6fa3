"""Where a run computes, and the facts of the run that its profile states."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import nn

from dispatch_flops._torch import FakeTensor
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.profile import RunInfo

_META = torch.device("meta")
AT_ONCE = ("cpu", "meta")  # what these are given is done when the call returns


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of a program's tensors.

    type: "cpu", "cuda", "meta", ...; the accelerator's where there is one.
    computes: False where tensors have shapes alone, as meta and fake ones: nothing takes time.
    """

    type: str = "cpu"
    accelerators: tuple[torch.device, ...] = ()
    computes: bool = True

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> Self:
        """Of modules' own parameters and buffers, not of those of the modules below them.

        Where these hold none, CUDA is assumed if the program uses it. Parameters that rest on
        the meta device between calls are where they are brought to.
        """
        modules = tuple(modules)
        found = dict.fromkeys(tensor.device for module in modules for tensor in _held_by(module))
        if brought := brought_to(modules):
            found.pop(_META, None)
            found |= dict.fromkeys(brought)
        if not found and torch.cuda.is_initialized():
            found = {torch.device("cuda", torch.cuda.current_device()): None}
        accelerators = tuple(device for device in found if device.type not in AT_ONCE)
        kind = next((device.type for device in (*accelerators, *found)), "cpu")
        if any(isinstance(tensor, FakeTensor) for module in modules for tensor in _held_by(module)):
            return cls(kind, computes=False)
        return cls(kind, accelerators, computes=kind != "meta")

    @classmethod
    def at(cls, name: str) -> Self:
        """The one of that name: "cpu", "cuda", "cuda:1"."""
        device = torch.device(name)
        accelerators = () if device.type in AT_ONCE else (device,)
        return cls(device.type, accelerators, computes=device != _META)


def run_info(modules: Iterable[nn.Module], conventions: Conventions) -> RunInfo:
    """Return the facts of a run of these modules that starts or ends now."""
    placement = Placement.of(modules)
    return RunInfo(
        device=placement.type,
        device_name=device_name(next(iter(placement.accelerators), placement.type)),
        torch_version=str(torch.__version__),
        causal=conventions.causal,
    )


def brought_to(modules: Iterable[nn.Module]) -> tuple[torch.device, ...]:
    """Where parameters on the meta device are brought for each call, as accelerate's hooks do."""
    modules = tuple(modules)
    if not any(tensor.device == _META for module in modules for tensor in _held_by(module)):
        return ()
    hooks = [getattr(module, "_hf_hook", None) for module in modules]
    hooks += [hook for chain in hooks for hook in getattr(chain, "hooks", ())]
    named = (getattr(hook, "execution_device", None) for hook in hooks)
    devices = dict.fromkeys(_with_index(name) for name in named if name is not None)
    return tuple(device for device in devices if device != _META)


def _with_index(name: int | str | torch.device) -> torch.device:
    device = torch.device(name)
    if device.index is not None or device.type in AT_ONCE:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _held_by(module: nn.Module) -> Iterator[torch.Tensor]:
    for table in (module._parameters, module._buffers):
        yield from (tensor for tensor in table.values() if tensor is not None)


def device_name(device: torch.device | str) -> str | None:
    """What the driver (on CPU the operating system) calls the device; None if nothing does."""
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu_name()
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    is_there = (device.index or 0) < torch.cuda.device_count()  # a fake tensor's need not be
    return torch.cuda.get_device_name(device) if is_there else None


@functools.cache
def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
