"""The page's data on memory: the peaks, and what the highest one consists of."""

from __future__ import annotations

from typing import Any

from dispatch_flops.profile import DeviceMemory, MemoryUse, Profile
from dispatch_flops.renderers.memory_table import memory_text

Data = dict[str, Any]


def memory_data(profile: Profile) -> Data | None:
    """Return peaks by device, phase and role; None where no allocation was followed."""
    memory = profile.memory
    if memory is None or not memory.devices:
        return None
    return {
        "peak": memory.peak_bytes,
        "text": memory_text(profile),
        "lower_bound": memory.is_lower_bound,
        "unseen": list(memory.unseen),
        "device": memory.devices[0].device,
        "peaks": [peak for device in memory.devices for peak in _peaks(device)],
        "uses": [_use(profile, use) for use in memory.at_peak],
    }


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
