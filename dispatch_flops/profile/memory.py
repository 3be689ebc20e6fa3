"""Memory that a run held: its peaks, what they consist of, and the share of each module."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile.cost import Phase, check_phase
from dispatch_flops.profile.frozen_mapping import FrozenMapping

Role = str
FollowMemory = bool | Literal["timeline"]
ROLES: tuple[Role, ...] = (
    "parameters", "gradients", "optimizer state", "buffers", "inputs", "activations",
    "temporaries", "workspace", "KV cache", "unsharded parameters",
)  # fmt: skip


class PhaseBytes(FrozenMapping[Phase, int]):
    """Immutable mapping from phase to bytes, without the phases in which nothing ran."""

    __slots__ = ()


class RoleBytes(FrozenMapping[Role, int]):
    """Immutable mapping from role to bytes, without the roles that have none."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one role at a peak, allocated by one module in one phase.

    role: one of "parameters", "gradients", "optimizer state", "buffers", "inputs",
        "activations" (made in forward or recomputation and kept for later), "temporaries",
        "workspace" (what a kernel allocates for itself), "KV cache" (the ``past_key_values`` that
        a model is called with, without gradients) and "unsharded parameters" (those that FSDP2
        gathered for a module).
    fqn, phase: where the bytes were allocated; None for what was there before.
    """

    role: Role
    fqn: str | None = None
    phase: Phase | None = None
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMoment:
    """The operator that allocated last before a peak; None where what came last is of none."""

    fqn: str
    phase: Phase
    operator: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """The most memory that was allocated on a device in one phase.

    uses: what was allocated, the largest first; the bytes add up to ``peak_bytes``.
    """

    peak_bytes: int
    peak_at: PeakMoment
    uses: tuple[MemoryUse, ...]

    def by_role(self) -> dict[Role, int]:
        """Return ``{role: bytes}``, the largest first."""
        found: dict[Role, int] = {}
        for use in self.uses:
            found[use.role] = found.get(use.role, 0) + use.bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """A point of a timeline: the most memory that was allocated in one interval of operators.

    operators: how many operators had run on the device, this one included.
    at: the operator that ran, with its module and phase.
    """

    operators: int
    at: PeakMoment
    bytes_by_role: RoleBytes

    @property
    def bytes(self) -> int:
        """Bytes of all roles together."""
        return sum(self.bytes_by_role.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of one device: the peak of each phase that ran there, and the timeline.

    timeline: in order of time; empty where it was not asked for.
    """

    device: str
    peaks: tuple[MemoryPeak, ...]
    timeline: tuple[MemoryPoint, ...] = ()

    def peak(self, phase: Phase | None = None) -> MemoryPeak | None:
        """Return the highest peak, of one phase or of all; None if the phase did not run."""
        found = [peak for peak in self.peaks if phase is None or peak.peak_at.phase == phase]
        return max(found, key=lambda peak: peak.peak_bytes, default=None)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the highest peak."""
        highest = self.peak()
        return highest.peak_bytes if highest is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Memory of a run: what was allocated at the peak, by role, module and phase.

    Every figure is of the device with the highest peak, unless it says otherwise.

    devices: one entry each, the highest peak first; then those that only held what was there.
    unseen: operators that ran and whose kernels allocate memory that is not known: where they
        have no formula for it, and run elsewhere than on the CPU and on CUDA, whose allocators
        report it, or while another profiler of torch is on; and nodes of autograd that allocate
        less under a dispatch mode. The peaks are then lower bounds.
    decomposed: operators and steps that ran on the meta device as other operators than on a device,
        whose kernels have results and workspaces of their own. The peaks are then approximate.
    rounding: bytes that each block is rounded up to a multiple of.

    Example::

        memory = profile.memory
        memory.peak_bytes, memory.peak_at.operator
        memory.by_role("backward")["activations"]
    """

    devices: tuple[DeviceMemory, ...]
    unseen: tuple[str, ...] = ()
    rounding: int = 1
    decomposed: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were allocated at once; 0 where nothing was."""
        return self.devices[0].peak_bytes if self.devices else 0

    @property
    def peak_at(self) -> PeakMoment | None:
        """Module, phase and operator of the peak; None where nothing was allocated."""
        peak = self.peak()
        return peak.peak_at if peak is not None else None

    @property
    def at_peak(self) -> tuple[MemoryUse, ...]:
        """What was allocated at the peak; the bytes add up to ``peak_bytes``."""
        peak = self.peak()
        return peak.uses if peak is not None else ()

    @property
    def timeline(self) -> tuple[MemoryPoint, ...]:
        """Memory over the operators of the run; empty unless ``memory="timeline"``.

        A point for each of at most 1,024 intervals with equal numbers of operators: the moment of
        the most memory in it. A run with fewer operators has a point for each.
        """
        return self.devices[0].timeline if self.devices else ()

    @property
    def is_lower_bound(self) -> bool:
        """True if a kernel allocated memory that is not known, and nothing is approximate."""
        return bool(self.unseen) and not self.decomposed

    @property
    def is_approximate(self) -> bool:
        """True if other operators ran than a device's kernels: memory may be less or more."""
        return bool(self.decomposed)

    def peak(self, phase: Phase | None = None) -> MemoryPeak | None:
        """Return the highest peak, of one phase or of all; None if the phase did not run.

        Raises ConfigError for a phase that is neither a standard one nor one of the profile's.
        """
        phases = [peak.peak_at.phase for device in self.devices for peak in device.peaks]
        check_phase(phase, phases)
        return self.devices[0].peak(phase) if self.devices else None

    def peak_in(self, phase: Phase | None = None) -> int:
        """Return the bytes of the highest peak; 0 in a phase that did not run."""
        peak = self.devices[0].peak(phase) if self.devices else None
        return peak.peak_bytes if peak is not None else 0

    def by_role(self, phase: Phase | None = None) -> dict[Role, int]:
        """Return ``{role: bytes}`` at the peak, of one phase or of all, the largest first.

        Empty for a phase that did not run. Raises ConfigError as ``peak`` does.
        """
        peak = self.peak(phase)
        return peak.by_role() if peak is not None else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes that a module holds, by role.

    activations: made in forward or recomputation and kept for later, of all calls of one step
        together, except those whose results were let go of before. Those of the step that kept most
        are counted. A call of a model without gradients is a step of its own. Checkpointed modules
        hold what they recompute one after the other: together these may be more than the peak.
    kv_cache: keys and values that the module made, in the ``past_key_values`` that a model was
        called with, without gradients; those that were there before are of that model. The largest
        cache of each model is counted.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    buffers: int = 0
    activations: int = 0
    kv_cache: int = 0

    def __add__(self, other: HeldBytes) -> HeldBytes:
        return add_held((self, other))


def add_held(parts: Iterable[HeldBytes]) -> HeldBytes:
    """Return the sum, role by role."""
    counts = [counts_held(part) for part in parts]
    return HeldBytes(**dict(zip(HELD_NAMES, map(sum, zip(*counts, strict=True)), strict=False)))


HELD_NAMES: tuple[str, ...] = tuple(field.name for field in fields(HeldBytes))
counts_held: Callable[[HeldBytes], tuple[int, ...]] = operator.attrgetter(*HELD_NAMES)


def highest(parts: Iterable[PhaseBytes]) -> PhaseBytes:
    """Return the largest number of bytes of each phase."""
    found: dict[Phase, int] = {}
    for part in parts:
        for phase, count in part.items():
            found[phase] = max(count, found.get(phase, 0))
    return PhaseBytes(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """Memory of one module, on the device with the highest peak.

    own: what the module itself holds. total: what the module and all below hold, each block of
        memory once.
    peak_bytes: per phase, the most that was allocated, by anyone, while an operator of the module
        or of a module below ran.
    """

    own: HeldBytes = field(default_factory=HeldBytes)
    total: HeldBytes = field(default_factory=HeldBytes)
    peak_bytes: PhaseBytes = field(default_factory=PhaseBytes)


def sum_memory(parts: Iterable[ModuleMemory | None]) -> ModuleMemory | None:
    """Return what several modules hold together, and their highest peaks; None if none is known."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return ModuleMemory(
        own=add_held(part.own for part in known),
        total=add_held(part.total for part in known),
        peak_bytes=highest(part.peak_bytes for part in known),
    )


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """How memory is followed.

    rounding: bytes that each block is rounded up to a multiple of. optimizers: those whose state
    was there before the run. has_timeline: also follow memory over the operators. on_cuda: what
    runs on the meta device is to be as on CUDA.
    """

    rounding: int = 1
    optimizers: tuple[Any, ...] = ()
    has_timeline: bool = False
    on_cuda: bool = False


def has_timeline(memory: object) -> bool:
    """Return True if an option ``memory`` asks for a timeline; raise ConfigError if it is none."""
    if memory != "timeline" and type(memory) is not bool:
        raise ConfigError(f'memory={memory!r:.60}: pass True, False or "timeline"')
    return memory == "timeline"


def check_rounding(rounding: object) -> None:
    """Raise ConfigError unless ``rounding`` is a number of bytes of at least 1."""
    if type(rounding) is not int or rounding < 1:
        raise ConfigError(f"memory_rounding={rounding!r:.60}: pass a number of bytes of at least 1")
