"""Memory of a run and of its modules as rows of plain data, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.fields import build, texts
from dispatch_flops.profile.memory import (
    DeviceMemory,
    HeldBytes,
    MemoryPeak,
    MemoryProfile,
    MemoryUse,
    ModuleMemory,
    PeakMoment,
    PhaseBytes,
)


def memory_to_row(memory: MemoryProfile) -> dict[str, Any]:
    """Return the memory as plain data; ``memory_from_row`` gives back an equal one."""
    row = dataclasses.asdict(memory)
    return {**row, "devices": list(row["devices"]), "unseen": list(memory.unseen)}


def memory_from_row(row: Any) -> MemoryProfile:
    """Return the memory that ``memory_to_row`` wrote; raises ValueError on other data."""
    values = _table(row)
    devices = tuple(_device_from_row(device) for device in values.pop("devices"))
    return build(MemoryProfile, values, devices=devices, unseen=texts(list(values.pop("unseen"))))


def _device_from_row(row: Any) -> DeviceMemory:
    values = _table(row)
    peaks = tuple(_peak_from_row(peak) for peak in values.pop("peaks"))
    return build(DeviceMemory, values, peaks=peaks)


def _peak_from_row(row: Any) -> MemoryPeak:
    values = _table(row)
    moment = _table(values.pop("peak_at"))
    uses = []
    for use in map(_table, values.pop("uses")):
        uses.append(build(MemoryUse, use, phase=use.pop("phase")))
    peak_at = build(PeakMoment, moment, phase=moment.pop("phase"))
    return build(MemoryPeak, values, peak_at=peak_at, uses=tuple(uses))


def module_memory_to_row(memory: ModuleMemory) -> dict[str, Any]:
    """Return the memory of a module as plain data."""
    return {
        "own": dataclasses.asdict(memory.own),
        "total": dataclasses.asdict(memory.total),
        "peak_bytes": dict(memory.peak_bytes),
    }


def module_memory_from_row(row: Any) -> ModuleMemory:
    """Return the memory that ``module_memory_to_row`` wrote; raises ValueError on other data."""
    values = _table(row)
    peaks = _table(values.pop("peak_bytes"))
    if not all(type(phase) is str and type(count) is int for phase, count in peaks.items()):
        raise ValueError(f"ModuleMemory.peak_bytes is {peaks!r:.60}")
    return build(
        ModuleMemory,
        {},
        own=build(HeldBytes, values.pop("own")),
        total=build(HeldBytes, values.pop("total")),
        peak_bytes=PhaseBytes(cast("Mapping[Phase, int]", peaks)),
        **values,
    )


def _table(row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(f"{row!r:.60} is not a table of fields")
    return dict(row)
