"""Devices on which a run computes, and the run's facts for its profile."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from dispatch_flops._torch import FakeTensor
from dispatch_flops.counting.held_tensors import HeldTensors
from dispatch_flops.counting.ranks import Ranks
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.profile import RunInfo

_META = torch.device("meta")
_SYNCHRONOUS = ("cpu", "meta")  # an operator is done when its call returns


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of a program's tensors.

    type: "cpu", "cuda", "meta", ...; the type of the accelerator if there is one.
    computes: False where tensors have shapes only, as meta and fake tensors: nothing takes time.
    """

    type: str = "cpu"
    accelerators: tuple[torch.device, ...] = ()
    computes: bool = True

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> Self:
        """Return the devices of these modules' own parameters and buffers.

        Modules below them do not count. Without a tensor, CUDA is assumed if the program uses it.
        Offloaded parameters count where ``brought_to`` says that they are used.
        """
        return cls.of_tensors(HeldTensors(modules))

    @classmethod
    def of_tensors(cls, held: HeldTensors) -> Self:
        """Return the devices of these tensors; see ``of``."""
        found = held.devices()
        if brought := brought_to(held.modules) if _META in found else ():
            found.pop(_META, None)
            found |= dict.fromkeys(brought)
        if not found and torch.cuda.is_initialized():
            found = {torch.device("cuda", torch.cuda.current_device()): None}
        accelerators = tuple(device for device in found if device.type not in _SYNCHRONOUS)
        kind = next((device.type for device in (*accelerators, *found)), "cpu")
        if any(issubclass(cls, FakeTensor) for cls in held.types()):
            return cls(kind, computes=False)
        return cls(kind, accelerators, computes=kind != "meta")

    @property
    def name(self) -> str | None:
        """Name of the first accelerator, else of the device itself; see ``device_name``."""
        return device_name(next(iter(self.accelerators), self.type))

    @classmethod
    def at(cls, name: str) -> Self:
        """Return the device of that name: "cpu", "cuda", "cuda:1"."""
        device = torch.device(name)
        accelerators = () if device.type in _SYNCHRONOUS else (device,)
        return cls(device.type, accelerators, computes=device != _META)


def run_info(
    placement: Placement,
    conventions: Conventions,
    call: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> RunInfo:
    """Return the facts of a run on these devices.

    call: the fields that ``call_facts`` returns, where a call was seen. ranks: None for a program
        of one process.
    """
    ranks = ranks or Ranks()
    return RunInfo(
        device=placement.type,
        device_name=placement.name,
        torch_version=str(torch.__version__),
        rank=ranks.rank,
        world_size=ranks.world_size,
        mesh=ranks.mesh,
        causal=conventions.causal,
        flops=conventions.flops,
        subclass=conventions.subclass,
        target=conventions.target,
        python_version=platform.python_version(),
        dispatch_flops_version=_own_version(),
        platform=_platform(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        **(call or {}),
    )


@functools.cache
def _platform() -> str:
    """Return the operating system with its version, the architecture and the C library.

    ``platform.platform()`` starts a process to ask for the processor, which takes long in a program
    that has much memory, and may do harm in one that has threads, or uses MPI.
    """
    system, c_library = platform.uname(), "".join(platform.libc_ver())
    parts = [system.system, system.release, system.machine]
    return "-".join([*parts, "with", c_library] if c_library else parts)


@functools.cache
def _own_version() -> str | None:
    try:
        return version("dispatch_flops")
    except PackageNotFoundError:  # run from a source tree
        return None


def brought_to(modules: Iterable[nn.Module]) -> tuple[torch.device, ...]:
    """Return the devices to which accelerate's hooks bring offloaded parameters for each call.

    Between calls such parameters are on the meta device.
    """
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
    if device.index is not None or device.type in _SYNCHRONOUS:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _held_by(module: nn.Module) -> Iterator[torch.Tensor]:
    for table in (module._parameters, module._buffers):
        yield from (tensor for tensor in table.values() if tensor is not None)


def device_name(device: torch.device | str) -> str | None:
    """Return the device's name as its driver, or the operating system, gives it; else None."""
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu_name()
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    exists = (device.index or 0) < torch.cuda.device_count()  # a fake tensor's device may not
    return torch.cuda.get_device_name(device) if exists else None


@functools.cache
def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:  # only as far as the first core's
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
