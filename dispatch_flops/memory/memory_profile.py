"""Build the memory of a profile from the blocks that a run allocated."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.memory.blocks import Block, DeviceBlocks, Peak
from dispatch_flops.memory.run_memory import Memory
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


def attach_memory(profile: Profile, memory: Memory, names: ModuleNames) -> Profile:
    """Return the profile with the memory of the run and of each module."""
    return _Builder(memory, names).attach(profile)


class _Builder:
    """Freezes the memory of a run; fqns become those that the profile shows."""

    def __init__(self, memory: Memory, names: ModuleNames) -> None:
        self._memory = memory
        self._names = names
        self._shown = names.shown
        self._alive = list(memory.blocks.alive())
        kept = memory.blocks.activations()
        self._activations = {names.shown(fqn): count for fqn, count in kept.items()}
        self._caches = {names.shown(fqn): n for fqn, n in memory.cache_bytes().items()}

    def attach(self, profile: Profile) -> Profile:
        self._memory.note_gradients()
        devices = sorted(
            map(self._freeze_device, list(self._memory.blocks.devices.values())),
            key=lambda device: -device.peak_bytes,
        )
        used = tuple(device for device in devices if device.peaks)
        frozen = MemoryProfile(
            devices=used,
            unseen=tuple(sorted(self._memory.unseen)),
            rounding=self._memory.rounding,
            decomposed=tuple(sorted(self._memory.decomposed)),
        )
        main = used[0].device if used else ""
        peaks = self._module_peaks(main)
        changed = profile
        with _torch.modes_disabled():
            held = {self._shown(fqn): named for fqn, named in list(self._names.by_fqn.items())}
            modules = {fqn: named.module() for fqn, named in held.items()}
            changed = dataclasses.replace(
                profile,
                root=self._with_memory(profile.root, modules, peaks),
                outside=self._with_memory(profile.outside, modules, peaks),
            )
        return dataclasses.replace(changed, memory=frozen)

    # -- peaks ------------------------------------------------------------------------------------

    def _freeze_device(self, device: DeviceBlocks) -> DeviceMemory:
        return DeviceMemory(
            device=str(device.device),
            peaks=tuple(self._freeze_peak(device, peak) for peak in device.peaks),
            timeline=tuple(self._freeze_timeline(device)),
        )

    def _freeze_timeline(self, device: DeviceBlocks) -> Iterator[MemoryPoint]:
        if device.timeline is not None:
            alive = [
                (block.born, block.size, role)
                for block, role in self._alive
                if block.device is device
            ]
            for point, sizes in device.timeline.frozen(alive):
                yield MemoryPoint(
                    operators=point.operators,
                    at=self._moment(point.made_in, point.operator),
                    bytes_by_role=RoleBytes(sizes),
                )

    def _freeze_peak(self, device: DeviceBlocks, peak: Peak) -> MemoryPeak:
        made_in = peak.made_in
        sums: defaultdict[tuple[Role, str | None, Phase | None], int] = defaultdict(int)
        for block, role in self._blocks_at(device, peak):
            where = block.made_in
            fqn = None if where is None else self._shown(where.fqn)
            sums[role, fqn, None if where is None else where.phase] += block.size
        if peak.workspace:
            sums["workspace", self._shown(made_in.fqn), made_in.phase] += peak.workspace
        uses = [
            MemoryUse(role=role, fqn=fqn, phase=phase, bytes=count)
            for (role, fqn, phase), count in sums.items()
            if count  # a released parameter of FSDP keeps its storage, without memory
        ]
        return MemoryPeak(
            peak_bytes=device.before + peak.bytes,
            peak_at=self._moment(made_in, peak.operator),
            uses=tuple(sorted(uses, key=lambda use: -use.bytes)),
        )

    def _moment(self, made_in: ModulePhase, operator: Any) -> PeakMoment:
        return PeakMoment(fqn=self._shown(made_in.fqn), phase=made_in.phase, operator=str(operator))

    def _blocks_at(self, device: DeviceBlocks, peak: Peak) -> Iterator[tuple[Block, Role]]:
        for block, role in self._alive:
            if block.device is device and block.born <= peak.born:
                yield block, role
        yield from peak.released

    def _module_peaks(self, main: str) -> dict[str, dict[Phase, int]]:
        """Return ``{fqn: {phase: bytes}}`` of what was allocated while own operators ran."""
        found: defaultdict[str, dict[Phase, int]] = defaultdict(dict)
        for device in self._memory.blocks.devices.values():
            if str(device.device) == main:
                for made_in, peak in list(device.modules.items()):
                    phases = found[self._shown(made_in.fqn)]
                    most = phases.get(made_in.phase, 0)
                    phases[made_in.phase] = max(most, device.before + peak.bytes)
        return found

    # -- modules ----------------------------------------------------------------------------------

    def _with_memory(
        self,
        root: ModuleNode,
        modules: dict[str, nn.Module | None],
        peaks: dict[str, dict[Phase, int]],
    ) -> ModuleNode:
        """Return the tree with the memory of each module, from the leaves up."""
        built: dict[int, ModuleNode] = {}
        below: dict[int, dict[object, HeldBytes]] = {}
        for node in reversed(list(root.walk())):
            children = tuple(built.pop(id(child)) for child in node.children)
            own = self._held_by(node.fqn, modules.get(node.fqn))
            distinct = dict(own)
            for child in node.children:
                distinct.update(below.pop(id(child)))
            below[id(node)] = distinct
            known = (child.memory for child in children if child.memory is not None)
            memory = ModuleMemory(
                own=add_held(own.values()),
                total=add_held(distinct.values()),
                peak_bytes=highest(
                    [PhaseBytes(peaks.get(node.fqn, {})), *(m.peak_bytes for m in known)]
                ),
            )
            built[id(node)] = dataclasses.replace(node, children=children, memory=memory)
        return built[id(root)]

    def _held_by(self, fqn: str, module: nn.Module | None) -> dict[object, HeldBytes]:
        """Return what the module itself holds, by the identity of what holds it."""
        held: dict[object, HeldBytes] = {}
        made = HeldBytes(
            activations=self._activations.get(fqn, 0), kv_cache=self._caches.get(fqn, 0)
        )
        if made != HeldBytes():
            held[fqn] = made
        if module is None:
            return held
        for parameter in module._parameters.values():
            if parameter is not None:
                held[id(parameter)] = HeldBytes(
                    parameters=self._size(parameter),
                    gradients=self._memory.gradient_bytes.get(id(parameter), 0),
                    optimizer_state=self._memory.state_bytes.get(id(parameter), 0),
                )
        for buffer in module._buffers.values():
            if buffer is not None:
                held[id(buffer)] = HeldBytes(buffers=self._size(buffer))
        return held

    def _size(self, tensor: torch.Tensor) -> int:
        return self._memory.blocks.bytes_of(tensor)
