"""Compare the profile of a simulated rank with that of the rank that represents it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dispatch_flops.profile import Profile
from dispatch_flops.profile.memory import MemoryProfile


def differences(representative: Profile, other: Profile) -> list[str]:
    """Return in words where the counts of a rank differ from its representative's; [] if nowhere.

    Ranks of groups are not compared, because each rank has groups of its own.
    """
    found = [
        f"{name} {b:,} instead of {a:,}"
        for name, figure in _FIGURES.items()
        if (a := figure(representative)) != (b := figure(other))
    ]
    return found or _first_detail(_details(representative), _details(other))


def _peak_bytes(memory: MemoryProfile | None) -> int:
    return 0 if memory is None else memory.peak_bytes


_FIGURES: Mapping[str, Callable[[Profile], int]] = {
    "MACs": lambda profile: profile.total().macs,
    "FLOPs": lambda profile: profile.total().flops,
    "bytes": lambda profile: profile.total().bytes_total,
    "parameters on the rank": lambda profile: profile.local_params,
    "communication calls": lambda profile: sum(row.calls for row in profile.communication),
    "payload bytes": lambda profile: sum(row.payload_bytes for row in profile.communication),
    "peak memory": lambda profile: _peak_bytes(profile.memory),
}


def _first_detail(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> list[str]:
    """Return the first module and operator or kind of communication that differs, in a list."""
    for key in (*a, *b):
        if a.get(key) != b.get(key):
            fqn, phase, name, *_ = key
            return [f"equal totals, but not those of {name} in {fqn or 'the model'}, {phase}"]
    return []


def _details(profile: Profile) -> dict[Any, Any]:
    """Return the calls and costs of every module, operator and kind of communication."""
    found: dict[Any, Any] = {
        (node.fqn, op.phase, op.op): (op.calls, op.cost)
        for node in profile.nodes()
        for op in node.ops
    }
    for total in profile.communication:
        group = (total.group.size, total.group.mesh_dim)
        key = (total.fqn, total.phase, total.kind, total.op, total.dtype, group)
        calls, payload = found.get(key, (0, 0))
        found[key] = (calls + total.calls, payload + total.payload_bytes)
    return found
