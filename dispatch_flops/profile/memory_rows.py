"""Memory of a run and of its modules as rows of plain data, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.fields import build, table, texts
from dispatch_flops.profile.memory import (
    DeviceMemory,
    HeldBytes,
    MemoryPeak,
    MemoryPoint,
    MemoryProfile,
    MemoryUse,
    ModuleMemory,
    PeakMoment,
    PhaseBytes,
    RoleBytes,
)


def memory_to_row(memory: MemoryProfile) -> dict[str, Any]:
    """Return the memory as plain data; ``memory_from_row`` gives back an equal one."""
    row: dict[str, Any] = {
        "devices": [_device_to_row(device) for device in memory.devices],
        "unseen": list(memory.unseen),
        "rounding": memory.rounding,
    }
    if memory.decomposed:
        row["decomposed"] = list(memory.decomposed)
    return row


def _device_to_row(device: DeviceMemory) -> dict[str, Any]:
    row: dict[str, Any] = {
        "device": device.device,
        "peaks": [_peak_to_row(peak) for peak in device.peaks],
    }
    if device.timeline:
        row["timeline"] = [_point_to_row(point) for point in device.timeline]
    return row


def _peak_to_row(peak: MemoryPeak) -> dict[str, Any]:
    return {
        "peak_bytes": peak.peak_bytes,
        "peak_at": dataclasses.asdict(peak.peak_at),
        "uses": [dataclasses.asdict(use) for use in peak.uses],
    }


def _point_to_row(point: MemoryPoint) -> dict[str, Any]:
    return {
        "operators": point.operators,
        "at": dataclasses.asdict(point.at),
        "bytes_by_role": dict(point.bytes_by_role),
    }


def memory_from_row(row: Any) -> MemoryProfile:
    """Return the memory that ``memory_to_row`` wrote; raises ValueError on other data."""
    values = table(row)
    devices = tuple(_device_from_row(device) for device in values.pop("devices"))
    return build(
        MemoryProfile,
        values,
        devices=devices,
        unseen=texts(values.pop("unseen")),
        decomposed=texts(values.pop("decomposed", [])),
    )


def _device_from_row(row: Any) -> DeviceMemory:
    values = table(row)
    peaks = tuple(_peak_from_row(peak) for peak in values.pop("peaks"))
    timeline = tuple(_point_from_row(point) for point in values.pop("timeline", ()))
    return build(DeviceMemory, values, peaks=peaks, timeline=timeline)


def _point_from_row(row: Any) -> MemoryPoint:
    values = table(row)
    counts = _counts(values.pop("bytes_by_role"), "MemoryPoint.bytes_by_role")
    at = _moment_from_row(values.pop("at"))
    return build(MemoryPoint, values, at=at, bytes_by_role=RoleBytes(counts))


def _peak_from_row(row: Any) -> MemoryPeak:
    values = table(row)
    peak_at = _moment_from_row(values.pop("peak_at"))
    uses = []
    for use in map(table, values.pop("uses")):
        uses.append(build(MemoryUse, use, phase=use.pop("phase")))
    return build(MemoryPeak, values, peak_at=peak_at, uses=tuple(uses))


def _moment_from_row(row: Any) -> PeakMoment:
    values = table(row)
    return build(PeakMoment, values, phase=values.pop("phase"))


def module_memory_to_row(memory: ModuleMemory) -> dict[str, Any]:
    """Return the memory of a module as plain data."""
    return {
        "own": dataclasses.asdict(memory.own),
        "total": dataclasses.asdict(memory.total),
        "peak_bytes": dict(memory.peak_bytes),
    }


def module_memory_from_row(row: Any) -> ModuleMemory:
    """Return the memory that ``module_memory_to_row`` wrote; raises ValueError on other data."""
    values = table(row)
    peaks = _counts(values.pop("peak_bytes"), "ModuleMemory.peak_bytes")
    return build(
        ModuleMemory,
        {},
        own=build(HeldBytes, values.pop("own")),
        total=build(HeldBytes, values.pop("total")),
        peak_bytes=PhaseBytes(cast("Mapping[Phase, int]", peaks)),
        **values,
    )


def _counts(row: Any, name: str) -> dict[str, int]:
    counts = table(row)
    if not all(type(key) is str and type(count) is int for key, count in counts.items()):
        raise ValueError(f"{name} is {counts!r:.60}")
    return counts
