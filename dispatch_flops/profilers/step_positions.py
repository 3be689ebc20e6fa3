"""Positions within a step: what has happened so far, and where each next event leads.

A step that is not counted goes from position to position by one look-up for each event.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

from dispatch_flops.profilers.step_costs import CountedRun, Segment, State

_LIMIT: Final = 4096  # positions kept before all are dropped; each takes about 1 KB


@dataclass(slots=True, eq=False, kw_only=True)
class Position:
    """What has happened in a step so far.

    state: the one that the step is in; None before the first event.
    parts: the segments that ended, or their runs, where these were counted.
    history: the events, with signatures.
    open_calls: signatures whose graphs no backward pass has consumed. is_after_backward: a pass has
    run since the last call.
    last_call: the signature of the last call. is_opaque: that of one call does not tell all.
    running_optimizers: names and signatures of those that step now. before_optimizer: the state
    and the event that led to the last of them.
    following: the position after each event, where nothing of the step was counted up to there.
    """

    state: State | None = None
    parts: tuple[Segment | CountedRun, ...] = ()
    history: tuple[Hashable, ...] = ()
    open_calls: tuple[Hashable, ...] = ()
    is_after_backward: bool = False
    last_call: Hashable = None
    is_opaque: bool = False
    running_optimizers: tuple[Hashable, ...] = ()
    before_optimizer: tuple[State, Hashable] | None = None
    following: dict[Hashable, Position] = field(default_factory=dict)

    def uncounted(self) -> list[Segment]:
        """Return the segments whose run in this step was not counted."""
        return [part for part in self.parts if isinstance(part, Segment)]


class KnownPositions:
    """Positions that uncounted steps have reached.

    Where an event leads depends on what is known of costs: ``forget`` when that changes.
    start: the position before the first event.
    """

    __slots__ = ("_number", "start")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop all positions."""
        self.start = Position()
        self._number = 0

    def add(self, before: Position, event: Hashable, after: Position) -> None:
        """Note that ``event`` leads from one position to another."""
        if self._number >= _LIMIT:
            self.forget()
        self._number += 1
        before.following[event] = after
