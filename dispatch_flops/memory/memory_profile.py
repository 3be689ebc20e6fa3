"""Build the memory of a profile from the blocks that a run allocated."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.placement import brought_to
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.memory.blocks import Blocks, DeviceBlocks, Extent, Peak
from dispatch_flops.memory.run_memory import Memory
from dispatch_flops.memory.timeline import Point
from dispatch_flops.profile import ModuleNode, Profile
from dispatch_flops.profile.cost import Phase
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
    Role,
    RoleBytes,
    add_held,
    highest,
)


class _Block(NamedTuple):
    """A block as it was when the memory was read, or when it was released."""

    device: torch.device
    born: int
    size: int
    role: Role
    made_in: ModulePhase | None


class _Peak(NamedTuple):
    """A peak of a device. bytes: over what was there before. blocks: those allocated then.

    made_in: None where no operator allocated anything.
    """

    bytes: int
    made_in: ModulePhase | None
    operator: Any
    workspace: int
    blocks: list[_Block]


class _Device(NamedTuple):
    """Memory of a device.

    before: bytes that were there before the run. modules: over these, the most while operators of
    a module ran in a phase. timeline: points with their bytes by role.
    """

    device: torch.device
    before: int
    peaks: list[_Peak]
    modules: dict[ModulePhase, int]
    timeline: list[tuple[Point, dict[Role, int]]]


class _Held(NamedTuple):
    """What a module itself holds: the ids of its parameters, and the memory of its tensors."""

    ids: list[int]
    parameters: list[Extent]
    buffers: list[Extent]


class MemoryReading:
    """Memory of a run as it is when it is read, for a profile that may be built later.

    It keeps neither modules nor tensors alive.
    """

    def __init__(self, memory: Memory, names: ModuleNames) -> None:
        self._names = names
        blocks = memory.blocks
        memory.note_held()  # by which blocks have their roles
        known = list(blocks.alive())
        alive = [
            _Block(block.device.device, block.born, block.size, role, block.made_in)
            for block, role in known
        ]
        self._activations = blocks.activations(known)
        self._caches = memory.cache_bytes()
        devices = list(blocks.devices.values())
        is_on_meta = any(found.device.type == "meta" for found in devices)
        is_offloaded = is_on_meta and bool(brought_to(names.modules()))
        if is_offloaded:  # tensors on the meta device then stand for parameters, without memory
            devices = [found for found in devices if found.device.type != "meta"]
        self._devices = [_read_device(found, alive) for found in devices]
        self._gradient_bytes = memory.gradient_bytes.by_id()
        self._state_bytes = memory.state_bytes.by_id()
        self._unseen = tuple(sorted(memory.unseen))
        self._decomposed = tuple(sorted(memory.decomposed))
        self._rounding = blocks.rounding
        self._held = {
            fqn: _read_held(named.module(), blocks, is_offloaded=is_offloaded)
            for fqn, named in list(names.by_fqn.items())
        }

    def attach_to(self, profile: Profile) -> Profile:
        """Return the profile with the memory of the run and of each module."""
        devices = sorted(map(self._freeze_device, self._devices), key=_highest_first)
        known = tuple(device for device in devices if device.peaks)
        # A first operator that allocates nothing, as a view does, is noted on the CPU.
        used = tuple(device for device in known if device.peak_bytes) or known[:1]
        peaks = self._module_peaks(used[0].device if used else "")
        held, kept = self._held_by_modules(), self._kept_by_modules()
        return dataclasses.replace(
            profile,
            root=_with_memory(profile.root, held, kept, peaks),
            outside=_with_memory(profile.outside, held, kept, peaks),
            memory=MemoryProfile(
                devices=used,
                unseen=self._unseen,
                rounding=self._rounding,
                decomposed=self._decomposed,
            ),
        )

    # -- peaks ------------------------------------------------------------------------------------

    def _freeze_device(self, device: _Device) -> DeviceMemory:
        return DeviceMemory(
            device=str(device.device),
            peaks=tuple(self._freeze_peak(device, peak) for peak in device.peaks),
            timeline=tuple(
                MemoryPoint(
                    operators=point.operators,
                    at=self._moment(point.made_in, point.operator),
                    bytes_by_role=RoleBytes(sizes),
                )
                for point, sizes in device.timeline
            ),
        )

    def _freeze_peak(self, device: _Device, peak: _Peak) -> MemoryPeak:
        made_in = peak.made_in
        sums: defaultdict[tuple[Role, str | None, Phase | None], int] = defaultdict(int)
        for block in peak.blocks:
            where = block.made_in
            fqn = None if where is None else self._names.shown(where.fqn)
            sums[block.role, fqn, None if where is None else where.phase] += block.size
        if peak.workspace and made_in is not None:
            sums["workspace", self._names.shown(made_in.fqn), made_in.phase] += peak.workspace
        uses = [
            MemoryUse(role=role, fqn=fqn, phase=phase, bytes=count)
            for (role, fqn, phase), count in sums.items()
            if count  # a released parameter of FSDP keeps its storage, without memory
        ]
        return MemoryPeak(
            peak_bytes=device.before + peak.bytes,
            peak_at=self._moment(made_in, peak.operator),
            uses=tuple(sorted(uses, key=_largest_first)),
        )

    def _moment(self, made_in: ModulePhase | None, operator: Any) -> PeakMoment:
        if made_in is None:
            return PeakMoment(fqn="", phase="forward")
        return PeakMoment(
            fqn=self._names.shown(made_in.fqn),
            phase=made_in.phase,
            operator=None if operator is None else str(operator),
        )

    def _module_peaks(self, main: str) -> dict[str, dict[Phase, int]]:
        """Return ``{fqn: {phase: bytes}}`` of what was allocated while own operators ran."""
        found: defaultdict[str, dict[Phase, int]] = defaultdict(dict)
        for device in self._devices:
            if str(device.device) == main:
                for made_in, count in device.modules.items():
                    phases = found[self._names.shown(made_in.fqn)]
                    most = phases.get(made_in.phase, 0)
                    phases[made_in.phase] = max(most, device.before + count)
        return found

    # -- modules ----------------------------------------------------------------------------------

    def _held_by_modules(self) -> Mapping[str, Mapping[object, HeldBytes]]:
        """Return what each module itself holds, less activations, by what holds it."""
        shown = self._names.shown
        of_parameters = {part.storage for held in self._held.values() for part in held.parameters}
        found: defaultdict[str, dict[object, HeldBytes]] = defaultdict(dict)
        for fqn, size in self._caches.items():
            found[shown(fqn)][fqn] = HeldBytes(kv_cache=size)
        for fqn, held in self._held.items():
            parts = found[shown(fqn)]
            for key in held.ids:
                parts[key] = HeldBytes(
                    gradients=self._gradient_bytes.get(key, 0),
                    optimizer_state=self._state_bytes.get(key, 0),
                )
            for part in held.parameters:
                parts[part] = HeldBytes(parameters=part.size)
            for part in held.buffers:
                if part.storage not in of_parameters:
                    parts[part] = HeldBytes(buffers=part.size)
        return found

    def _kept_by_modules(self) -> Mapping[str, Counter[int]]:
        """Return the bytes of activations that each module itself keeps, by the step."""
        found: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for (step, fqn), size in self._activations.items():
            found[self._names.shown(fqn)][step] += size
        return found


def _highest_first(device: DeviceMemory) -> Any:
    """Order devices by their peaks, with those last on which no operator allocated anything."""
    is_resting = all(peak.peak_at.operator is None for peak in device.peaks)
    return is_resting, -device.peak_bytes


def _largest_first(use: MemoryUse) -> Any:
    return -use.bytes, use.role, use.fqn or "", use.phase or ""


def _read_device(device: DeviceBlocks, alive: list[_Block]) -> _Device:
    here = [block for block in alive if block.device == device.device]
    timeline = device.timeline
    peaks = device.peaks or ((device.resting,) if device.before + device.resting.bytes > 0 else ())
    return _Device(
        device.device,
        device.before,
        [_read_peak(device, peak, here) for peak in peaks],
        {made_in: peak.bytes for made_in, peak in list(device.modules.items())},
        [] if timeline is None else list(timeline.frozen((b.born, b.size, b.role) for b in here)),
    )


def _read_peak(device: DeviceBlocks, peak: Peak, alive: list[_Block]) -> _Peak:
    blocks = [block for block in alive if block.born <= peak.born]
    blocks += [
        _Block(device.device, block.born, block.size, role, block.made_in)
        for block, role in list(peak.released)
    ]
    return _Peak(peak.bytes, peak.made_in, peak.operator, peak.workspace, blocks)


def _read_held(module: nn.Module | None, blocks: Blocks, *, is_offloaded: bool) -> _Held:
    """Return the tensors of a module; none if it is gone, nor those that are offloaded."""
    if module is None:
        return _Held([], [], [])

    def held(tensors: Mapping[str, torch.Tensor | None]) -> list[torch.Tensor]:
        return [t for t in tensors.values() if t is not None and not (is_offloaded and t.is_meta)]

    def extents(tensors: Iterable[torch.Tensor]) -> list[Extent]:
        return [extent for tensor in tensors for extent in blocks.extents_of(tensor)]

    parameters = held(module._parameters)
    return _Held([id(p) for p in parameters], extents(parameters), extents(held(module._buffers)))


def _with_memory(
    root: ModuleNode,
    held: Mapping[str, Mapping[object, HeldBytes]],
    kept: Mapping[str, Mapping[int, int]],
    peaks: Mapping[str, Mapping[Phase, int]],
) -> ModuleNode:
    """Return the tree with the memory of each module, from the leaves up."""
    built: dict[int, ModuleNode] = {}
    below: dict[int, tuple[dict[object, HeldBytes], dict[int, int]]] = {}
    for node in reversed(list(root.walk())):
        children = tuple(built.pop(id(child)) for child in node.children)
        distinct, by_step = dict(held.get(node.fqn, {})), dict(kept.get(node.fqn, {}))
        own = total = _add_up(distinct, by_step)
        peak_bytes = PhaseBytes(peaks.get(node.fqn))
        if children:
            for child in node.children:
                held_below, kept_below = below.pop(id(child))
                distinct.update(held_below)
                for step, size in kept_below.items():
                    by_step[step] = by_step.get(step, 0) + size
            total = _add_up(distinct, by_step)
            known = (child.memory.peak_bytes for child in children if child.memory is not None)
            peak_bytes = highest([peak_bytes, *known])
        below[id(node)] = distinct, by_step
        memory = ModuleMemory(own=own, total=total, peak_bytes=peak_bytes)
        built[id(node)] = dataclasses.replace(node, children=children, memory=memory)
    return built[id(root)]


def _add_up(distinct: Mapping[object, HeldBytes], by_step: Mapping[int, int]) -> HeldBytes:
    """Return what is held in all, with the activations of the step that kept most."""
    most = max(by_step.values(), default=0)
    activations = [HeldBytes(activations=most)] if most else []
    return add_held([*distinct.values(), *activations])
