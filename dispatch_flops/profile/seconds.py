"""Time as a figure per phase. What was not measured is absent or None, never 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.frozen_mapping import FrozenMapping

_NOTHING: Mapping[Phase, float | None] = MappingProxyType({})


def sum_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None if none is known.

    Example::

        print(sum_known([0.5, None, 0.25]), sum_known([None]))  # prints 0.75 None
    """
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def timed_phase(phase: Phase) -> Phase:
    """Return the phase whose seconds include those of ``phase``.

    Recomputation runs within the backward pass, and its time is part of the backward's.
    """
    return "backward" if phase == "recompute" else phase


class PhaseSeconds(FrozenMapping[Phase, float]):
    """Immutable mapping from phase to seconds, without the phases that were not measured.

    None in ``seconds`` is dropped. Sums take what is known of each phase.

    Example::

        PhaseSeconds({"forward": 0.5, "backward": None}) + PhaseSeconds({"forward": 0.25})
        # PhaseSeconds({'forward': 0.75})
    """

    __slots__ = ()

    def __init__(self, seconds: Mapping[Phase, float | None] = _NOTHING) -> None:
        super().__init__({phase: s for phase, s in seconds.items() if s is not None})

    def __add__(self, other: PhaseSeconds) -> PhaseSeconds:
        return add_seconds((self, other))


def add_seconds(parts: Iterable[PhaseSeconds]) -> PhaseSeconds:
    """Return the sum of the known seconds of each phase."""
    parts = list(parts)
    phases = dict.fromkeys(phase for part in parts for phase in part)
    return PhaseSeconds({phase: sum_known(part.get(phase) for part in parts) for phase in phases})
