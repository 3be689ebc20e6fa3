"""The page's data on memory: peaks, what the highest consists of, and memory over the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.profile import (
    DeviceMemory,
    MemoryPoint,
    MemoryProfile,
    MemoryUse,
    PeakMoment,
    Profile,
)
from dispatch_flops.profile.memory import ROLES
from dispatch_flops.renderers.memory_table import HELD_LABELS, held_names, memory_text

Data = dict[str, Any]


def memory_data(profile: Profile, machine: Machine | None) -> Data | None:
    """Return peaks by device, phase and role; None where no allocation was followed.

    machine: whose capacity the timeline of the run's device is compared with.
    """
    memory = profile.memory
    if memory is None or not memory.devices:
        return None
    return {
        "peak": memory.peak_bytes,
        "text": memory_text(profile),
        "lower_bound": memory.is_lower_bound,
        "approximate": memory.is_approximate,
        "unseen": list(memory.unseen),
        "decomposed": list(memory.decomposed),
        "device": memory.devices[0].device,
        "roles": list(dict.fromkeys((*ROLES, *_roles_of(memory)))),
        "peaks": [peak for device in memory.devices for peak in _peaks(device)],
        "uses": [_use(profile, use) for use in memory.at_peak],
        "held": [[name, HELD_LABELS[name]] for name in held_names(profile)],
        "timelines": [
            _timeline(profile, device, machine) for device in memory.devices if device.timeline
        ],
    }


def _roles_of(memory: MemoryProfile) -> Iterator[str]:
    for device in memory.devices:
        for peak in device.peaks:
            yield from peak.by_role()
        for point in device.timeline:
            yield from point.bytes_by_role


def _peaks(device: DeviceMemory) -> list[Data]:
    return [
        {
            "device": device.device,
            "phase": peak.peak_at.phase,
            "bytes": peak.peak_bytes,
            "roles": peak.by_role(),
        }
        for peak in device.peaks
    ]


def _use(profile: Profile, use: MemoryUse) -> Data:
    return {
        "role": use.role,
        "module": "" if use.fqn is None else use.fqn or profile.root.class_name,
        "phase": use.phase or "before",
        "bytes": use.bytes,
    }


def _timeline(profile: Profile, device: DeviceMemory, machine: Machine | None) -> Data:
    """Return the points as columns. at: position of each point's moment among the moments."""
    points = device.timeline
    moments = {moment: i for i, moment in enumerate(dict.fromkeys(point.at for point in points))}
    total = [point.bytes for point in points]
    return {
        "device": device.device,
        "operators": [point.operators for point in points],
        "total": total,
        "bytes": _by_role(points),
        "at": [moments[point.at] for point in points],
        "moments": [_moment(profile, moment) for moment in moments],
        "peak": total.index(max(total)),
        "capacity": _capacity(profile, device, machine),
    }


def _by_role(points: Sequence[MemoryPoint]) -> dict[str, list[int]]:
    roles = dict.fromkeys(role for point in points for role in point.bytes_by_role)
    return {role: [point.bytes_by_role.get(role, 0) for point in points] for role in roles}


def _moment(profile: Profile, moment: PeakMoment) -> list[str]:
    return [moment.fqn or profile.root.class_name, moment.phase, moment.operator or ""]


def _capacity(profile: Profile, device: DeviceMemory, machine: Machine | None) -> Data | None:
    """Return the memory of the machine, if the timeline is of the device that the run was on."""
    if machine is None or machine.memory_bytes is None:
        return None
    if _kind(device.device) != _kind(profile.run.device):
        return None
    return {"bytes": machine.memory_bytes, "name": machine.name}


def _kind(device: str) -> str:
    return device.partition(":")[0]
