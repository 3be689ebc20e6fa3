"""Blocks of memory from allocation to release, and the peaks of each device.

The Python object of a storage lives as long as the storage in C++, also where autograd holds it.
A weak reference to it therefore tells when the memory is released. Views and in-place results
share the object. Nothing is kept alive, and no tensor gets a hook.

Callbacks of weak references run wherever an object is released, also in threads of autograd.
Each figure changes in one statement without a call, which CPython does not interrupt.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from dispatch_flops import _torch
from dispatch_flops.counting.thread_state import NO_TASK, ModulePhase, last_recorded_in
from dispatch_flops.memory.kept_activations import KeptActivations
from dispatch_flops.memory.storages import Storage, dense_parts_of
from dispatch_flops.memory.timeline import Timeline
from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.memory import Role

_graph_task = _torch.graph_task_id


class Block(weakref.ref[Storage]):
    """One storage with memory: a weak reference to it, and what is known of it.

    key: identity of the storage, also after its release.
    peak: of the device, and of the module and phase that allocated it.
    role: what it is for, where that is known before its release; else None.
    born: number of the allocation, in order; 0 if it was there before. step: see
    ``KeptActivations.now``.
    """

    __slots__ = ("born", "key", "peak", "role", "size", "step")
    key: int
    size: int
    peak: ModulePeak
    role: Role | None
    born: int
    step: int

    @property
    def device(self) -> DeviceBlocks:
        """The memory that the block is part of."""
        return self.peak.device

    @property
    def made_in(self) -> ModulePhase | None:
        """The module and phase that allocated it; None if it was there before."""
        return self.peak.made_in


class Extent(NamedTuple):
    """What a tensor shows of a storage; tensors that show the same memory have equal ones.

    storage: its identity. offset: elements before it. size: bytes.
    """

    storage: int
    offset: int
    size: int


class Peak:
    """The most memory on a device in one phase, over what was there before.

    made_in: the module and phase that ran; None where no operator has allocated anything.
    born, releases: numbers of the latest allocation and release then. released: blocks of then that
    are released since.
    workspace: bytes that the operator's kernel allocated for itself.
    """

    __slots__ = ("born", "bytes", "made_in", "operator", "released", "releases", "workspace")

    def __init__(self, made_in: ModulePhase | None) -> None:
        self.bytes = -(1 << 62)
        self.born = self.releases = 0
        self.made_in = made_in
        self.operator: Any = None
        self.workspace = 0
        self.released: list[tuple[Block, Role]] = []


class ModulePeak:
    """The most memory on a device while operators of one module ran in one phase.

    made_in: the module and phase; None for what no operator made. of_phase: the peak of the phase;
    None until an operator has returned. threshold: bytes up to which ``note`` has nothing to do.
    """

    __slots__ = ("bytes", "device", "made_in", "of_phase", "threshold")

    def __init__(self, device: DeviceBlocks, made_in: ModulePhase | None) -> None:
        self.bytes = self.threshold = -(1 << 62)
        self.device = device
        self.made_in = made_in
        self.of_phase: Peak | None = None

    def note(self, now: int, operator: Any, born: int) -> None:
        """Note that ``now`` bytes were allocated while an operator ran.

        born: number of the latest allocation.
        """
        made_in, device = self.made_in, self.device
        assert made_in is not None
        peak = self.of_phase
        if peak is None:
            device.modules[made_in] = self
            peak = self.of_phase = device.peak_of(made_in)
        if device.timeline is None:
            self.threshold = now
        else:
            device.timeline.note(now, now - device.now, born, made_in, operator)
        self.bytes = max(now, self.bytes)
        if now > peak.bytes:
            peak.bytes, peak.born = now, born
            peak.made_in, peak.operator = made_in, operator
            peak.workspace = now - device.now
            peak.releases = device.releases
            peak.released = []
            device.note_event(born)


class DeviceBlocks:
    """Memory of one device.

    before: bytes that were there before. now: bytes over these. peaks: by phase; resting: stands
    for them until an operator allocates something.
    modules: the peak of each module and phase. elsewhere: stands for them where no operator made a
    block. timeline: None if none is wanted.
    releases: number of the latest release that was noted.
    last_event: number of the latest allocation when a peak was last noted, a phase began, or an
    outermost module call ended. Of a block made later, the release is not noted.
    """

    __slots__ = (
        "before", "device", "elsewhere", "last_event", "modules", "now", "peaks", "releases",
        "resting", "timeline",
    )  # fmt: skip

    def __init__(self, device: torch.device, timeline: Timeline | None) -> None:
        self.device = device
        self.timeline = timeline
        self.before = self.now = self.releases = 0
        self.last_event = 0 if timeline is None else sys.maxsize  # which notes every release
        self.peaks: tuple[Peak, ...] = ()
        self.resting = Peak(None)
        self.resting.bytes = 0
        self.modules: dict[ModulePhase, ModulePeak] = {}
        self.elsewhere = ModulePeak(self, None)

    def module_peak(self, made_in: ModulePhase) -> ModulePeak:
        """Return the peak of a module in a phase."""
        return self.modules.get(made_in) or ModulePeak(self, made_in)

    def note_event(self, born: int) -> None:
        """Note an event; see ``last_event``. ``born``: number of the latest allocation."""
        if self.timeline is None:
            self.last_event = born

    def note_resting(self, born: int) -> None:
        """Note that the device holds a block that no operator made; ``born``: its number."""
        peak = self.resting
        if self.now > peak.bytes and not self.peaks:
            peak.bytes, peak.born = self.now, born
            peak.releases, peak.released = self.releases, []
            self.note_event(born)

    def peak_of(self, made_in: ModulePhase) -> Peak:
        """Return the peak of the phase in which a module runs."""
        for peak in self.peaks:
            if peak.made_in is not None and peak.made_in.phase == made_in.phase:
                return peak
        peak = Peak(made_in)
        self.peaks = (*self.peaks, peak)
        return peak


class Blocks:
    """All blocks that are allocated, by the identity of their storages.

    rounding: bytes that each block is rounded up to a multiple of.
    threads: the tracker's state of each thread. on_release: the callback of each block.
    has_timeline: each device has a timeline. kept: the activations of each module.
    """

    def __init__(self, rounding: int, *, has_timeline: bool = False) -> None:
        self.live: dict[int, Block] = {}
        self.devices: dict[torch.device, DeviceBlocks] = {}
        self.allocations = 0
        self.kept = KeptActivations(lambda first: _activations(self._alive_since(first)))
        self.born_in_calls = 0  # allocations when the outermost module call last ended
        self.born_in_backward = 0  # the same of the backward pass
        self.rounding = rounding
        self.threads = threading.local()
        self.on_release = self._released  # made once: looking it up creates a bound method
        self._has_timeline = has_timeline

    def on(self, device: torch.device) -> DeviceBlocks:
        """Return the memory of a device."""
        found = self.devices.get(device)
        if found is None:
            timeline = Timeline() if self._has_timeline else None
            found = self.devices[device] = DeviceBlocks(device, timeline)
        return found

    def allocated(self, storage: Storage, peak: ModulePeak) -> None:
        """Note that an operator returned this storage; does nothing if it is known.

        peak: of the module and phase that it belongs to.
        """
        if id(storage) in self.live:
            return
        size = self.size_of(storage)
        if size:
            self.live[id(storage)] = block = self._new_block(storage, peak, size)
            self.allocations += 1
            block.born = self.allocations
            peak.device.now += block.size

    def note(self, storage: Storage, device: DeviceBlocks, role: Role, *, was_there: bool) -> None:
        """Give a storage its role. Add it if it is not known, for then no operator returned it.

        was_there: it counts from the start of the run, otherwise from now on.
        """
        block = self.live.get(id(storage))
        if block is not None:
            if block.role != "unsharded parameters":  # as FSDP's are while a module shows them
                block.role = role
            return
        size = self.size_of(storage)
        if not size:
            return
        self.live[id(storage)] = block = self._new_block(storage, device.elsewhere, size)
        block.role = role
        if was_there:
            device.before += block.size
        else:
            self.allocations += 1
            block.born = self.allocations
            device.now += block.size
            device.note_resting(block.born)

    def give_role(self, storage: Storage, role: Role) -> None:
        """Say what a storage is for, if it is known and has any memory."""
        block = self.live.get(id(storage))
        if block is not None:
            block.role = role

    def _new_block(self, storage: Storage, peak: ModulePeak, size: int) -> Block:
        block = Block(storage, self.on_release)
        block.key, block.peak = id(storage), peak
        block.size = 0 if self._shows_another(storage) else size
        block.role, block.born, block.step = None, 0, self.kept.now
        return block

    def _shows_another(self, storage: Storage) -> bool:
        """Return True if a storage shows memory of one that is known, which it keeps alive.

        So do tensors made of others by DLPack or NumPy, and slices of storages. They cannot be
        resized.
        """
        if storage.resizable() or not (address := _address_of(storage)):
            return False
        size = storage.nbytes()
        return any(
            (owner := block()) is not None
            and 0 <= address - _address_of(owner) <= block.size - size
            for block in list(self.live.values())
        )

    def resized(self, storage: Storage, peak: ModulePeak, operator: Any) -> None:
        """Note that a storage may have another size now; see ``allocated``.

        What fits is copied, so that the old and the new memory are there at once: the new one is
        noted as a workspace of the operator.
        """
        block = self.live.get(id(storage))
        if block is None:
            self.allocated(storage, peak)
        elif block.size != (size := self.size_of(storage)):
            now = peak.device.now + size
            if block.size and size and now > peak.threshold:
                peak.note(now, operator, self.allocations)
            self._released(block)
            self.allocated(storage, peak)
            again = self.live.get(id(storage))
            if again is None:  # FSDP releases a parameter by it, and later resizes it back
                elsewhere = peak.device.elsewhere
                again = self.live[id(storage)] = self._new_block(storage, elsewhere, 0)
            again.role = block.role

    def is_latest(self, storage: Storage) -> bool:
        """Return True if no other storage was allocated after this one."""
        block = self.live.get(id(storage))
        return block is not None and block.born == self.allocations

    def reused(self, storage: Storage) -> None:
        """Note that a result takes the place of what this storage holds."""
        block = self.live.get(id(storage))
        if block is not None and block.made_in is not None:
            self._released(block)

    def forget(self) -> None:
        """Let go of all storages: what is released from now on is not noted."""
        self.live.clear()

    def alive(self) -> Iterator[tuple[Block, Role]]:
        """Yield every block that is allocated, with what it was for so far."""
        for block in list(self.live.values()):
            yield block, block.role or self._role_of(block, is_over=False)

    def _alive_since(self, first: int) -> Iterator[tuple[Block, Role]]:
        """Yield those of ``alive`` that were made in round ``first`` or later."""
        for block in reversed(list(self.live.values())):  # a program may hold those of many steps
            if 0 <= block.step < first:
                return
            if block.step >= 0:
                yield block, block.role or self._role_of(block, is_over=False)

    def activations(self, alive: Iterable[tuple[Block, Role]]) -> dict[tuple[int, str], int]:
        """Return ``{(step, fqn): bytes}`` kept for later, of the steps that kept most.

        alive: what ``alive`` yields.
        """
        return self.kept.by_step(_activations(alive))

    def size_of(self, storage: Storage) -> int:
        """Return the bytes of a storage, rounded up; 0 where they are a symbol."""
        size = storage.nbytes()
        if type(size) is not int:  # a symbol, while a program is exported
            return 0
        return self.rounded_up(size)

    def rounded_up(self, size: int) -> int:
        """Return the bytes of a block that holds so many; a workspace is one block."""
        return size if self.rounding == 1 else -(-size // self.rounding) * self.rounding

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor's storages; its own share where they hold more than it."""
        return sum(extent.size for extent in self.extents_of(tensor))

    def extents_of(self, tensor: torch.Tensor) -> list[Extent]:
        """Return what a tensor shows of its storages: all, or a share where they hold more."""
        try:
            storage = tensor.untyped_storage()
            block = self.live.get(id(storage))
            if block is not None and block.size == tensor.nbytes:  # in most cases
                return [Extent(block.key, 0, block.size)]
        except (RuntimeError, ValueError):  # sparse and the like; lazy
            pass
        return [self._extent_of(part) for part in dense_parts_of(tensor)]

    def _extent_of(self, part: torch.Tensor) -> Extent:
        storage = part.untyped_storage()
        if part.nbytes < storage.nbytes():
            return Extent(id(storage), int(part.storage_offset()), part.nbytes)
        return Extent(id(storage), 0, self.size_of(storage))

    def _released(self, block: Block) -> None:
        """Note that a block is released. It may also be replaced by one of another size.

        Most blocks are brief: made since the last event, they are at no peak, and no activations.
        """
        try:
            del self.live[block.key]
        except (AttributeError, KeyError):  # without a key: an interrupt came before it had one
            return
        device = block.peak.device
        if block.born > device.last_event or not block.size:
            device.now -= block.size
            return
        role, made_in = self._role_of(block, is_over=True), block.made_in
        device.now -= block.size
        device.releases = number = device.releases + 1
        if device.timeline is not None:  # in one go with ``now``: another thread may note a point
            device.timeline.released.append((block.born, block.size, role))
        for highest in device.peaks or (device.resting,):
            if block.born <= highest.born and highest.releases < number:  # not noted since
                highest.released.append((block, role))
        if role == "activations" and made_in is not None:
            is_forward = self._phase_now() == "forward"
            self.kept.add(block.step, made_in.fqn, block.size, is_forward=is_forward)

    def _role_of(self, block: Block, *, is_over: bool) -> Role:
        """Return what a block was for, at its release or, if it is not over, until now.

        Made in forward, it is an activation if it outlives the phase, or the call of the model.
        Made in backward, it is a gradient if it outlives the backward pass.
        """
        if block.role is not None or block.made_in is None:
            return block.role or "inputs"
        phase = block.made_in.phase
        if phase == "forward":
            is_of_earlier = self.kept.is_of_earlier_step(block.step)
            outlives_phase = is_of_earlier or self._phase_now() != "forward"
            is_kept = not is_over or outlives_phase or block.born <= self.born_in_calls
            return "activations" if is_kept else "temporaries"
        if phase == "recompute":
            return "temporaries" if is_over and self._phase_now() == phase else "activations"
        is_in_backward = block.born > self.born_in_backward and _graph_task() != NO_TASK
        return "gradients" if phase == "backward" and not is_in_backward else "temporaries"

    def _phase_now(self) -> Phase:
        made_in = last_recorded_in(self.threads)
        return "forward" if made_in is None else made_in.phase

    def note_event(self) -> None:
        """Note that a phase begins or that an outermost module call ended."""
        for device in tuple(self.devices.values()):
            device.note_event(self.allocations)

    def end_of_calls(self) -> None:
        """Note that an outermost module call ended."""
        self.born_in_calls = self.allocations
        self.kept.end_of_calls()
        self.note_event()

    def end_of_backward(self) -> None:
        """Note that a backward pass ended."""
        self.born_in_backward = self.allocations


def _address_of(storage: Storage) -> int:
    try:
        return storage.data_ptr()
    except RuntimeError:  # without memory, as that of a functional tensor
        return 0


def _activations(alive: Iterable[tuple[Block, Role]]) -> Iterator[tuple[int, str, int]]:
    for block, role in alive:
        if role == "activations" and (made_in := block.made_in) is not None:
            yield block.step, made_in.fqn, block.size
