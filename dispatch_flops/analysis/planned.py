"""What a planned step needs and how long it takes at least: the figures of one choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.memory_fit import MemoryFit
from dispatch_flops.analysis.plain_figures import PlainFigures, figures_of, plain
from dispatch_flops.analysis.planned_cluster import PlannedCluster, cluster_to_row
from dispatch_flops.analysis.step_bounds import StepBounds, step_bounds
from dispatch_flops.profile import MemoryProfile, Profile
from dispatch_flops.units import ratio

PLAN_SCHEMA = "dispatch_flops.plan"
PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep(MemoryFit):
    """One choice of sizes, on one device of a machine or on a mesh of such devices.

    sizes: what was chosen, such as ``{"batch": 4, "seq": 2048}``.
    profile: the step as it was counted, without data; memory included. On a mesh it is that of the
        rank whose step takes longest, and so are the bounds; memory is of the fullest rank.
    samples, tokens: of one step of all devices; None where not known.
    largest_batch: the largest batch that fits, searched up to 2^20; 0 where none does, None where
        it was not searched.
    cluster: the ranks of the mesh; None for one device.
    """

    sizes: Mapping[str, Any]
    machine: Machine
    profile: Profile
    bounds: StepBounds
    samples: int | None = None
    tokens: int | None = None
    largest_batch: int | None = None
    cluster: PlannedCluster | None = None

    @property
    def devices(self) -> int:
        """Number of devices that run the step."""
        return 1 if self.cluster is None else self.cluster.devices

    @property
    def memory(self) -> MemoryProfile | None:
        """Memory of the device, or of the fullest one; None where it was not followed."""
        profile = self.profile if self.cluster is None else self.cluster.fullest.profile
        return profile.memory

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that the step allocates on a device; None where it was not followed."""
        return None if self.memory is None else self.memory.peak_bytes

    @property
    def memory_by_role(self) -> dict[str, int] | None:
        """What the peak consists of, the largest first; None where memory was not followed."""
        return None if self.memory is None else self.memory.by_role()

    @property
    def tokens_per_s(self) -> tuple[float | None, float | None]:
        """Tokens per second of all devices: with nothing hidden, and with all traffic saved."""
        return ratio(self.tokens, self.bounds.serial_s), ratio(self.tokens, self.bounds.fused_s)

    @property
    def samples_per_s(self) -> tuple[float | None, float | None]:
        """Samples per second of all devices: with nothing hidden, and with all traffic saved."""
        return ratio(self.samples, self.bounds.serial_s), ratio(self.samples, self.bounds.fused_s)


def profiles_of(step: PlannedStep) -> list[Profile]:
    """Return the step as each counted rank of the mesh runs it, or as the one device does."""
    return [part.profile for part in step.cluster.ranks] if step.cluster else [step.profile]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(PlainFigures):
    """Choices side by side, with what they assume.

    steps: one for each choice. assumptions: in words, for the reader.

    Example::

        step = json.loads(planned.to_json())["steps"][0]
        step["sizes"], step["peak_bytes"], step["bounds"]["least_s"]
    """

    machine: Machine
    steps: tuple[PlannedStep, ...]
    assumptions: tuple[str, ...] = field(default_factory=tuple)

    def __repr__(self) -> str:
        return f"<Plan for {self.machine.name}; choices: {len(self.steps)}>"

    def __str__(self) -> str:
        """Return the table of the choices, and what they assume."""
        from dispatch_flops.renderers import plan_table  # above this room: imported when shown

        return plan_table.render(self)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain dicts, lists, strings and numbers, such as for a dashboard.

        Keys are the names of fields and properties, so that units are theirs: bytes are ints,
        seconds and rates floats, and a range is a list of two. What is unknown is None. A profile
        has its totals alone, and ``fullest`` and ``slowest`` of a cluster are numbers of ranks.
        The machine is as ``--machine`` reads it from a file.
        """
        return {
            "schema": PLAN_SCHEMA,
            "version": PLAN_VERSION,
            "machine": plain(self.machine),
            "assumptions": list(self.assumptions),
            "steps": [_step_to_row(step) for step in self.steps],
        }


def _step_to_row(step: PlannedStep) -> dict[str, Any]:
    return figures_of(step, cluster=None if step.cluster is None else cluster_to_row(step.cluster))


def planned_step(
    profile: Profile,
    machine: Machine,
    sizes: Mapping[str, Any],
    *,
    host_s_per_operator: float | None = None,
    samples: int | None = None,
    tokens: int | None = None,
    largest_batch: int | None = None,
) -> PlannedStep:
    """Return the figures of a counted step on a machine."""
    return PlannedStep(
        sizes=dict(sizes),
        machine=machine,
        profile=profile,
        bounds=step_bounds(profile, machine, host_s_per_operator),
        samples=samples,
        tokens=tokens,
        largest_batch=largest_batch,
    )
