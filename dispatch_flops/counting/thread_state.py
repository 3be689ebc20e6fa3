"""What the tracker knows of each thread: where work belongs now, and who made which node."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from dispatch_flops.counting.module_names import ModuleName
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.profile import OUTSIDE
from dispatch_flops.profile.cost import Phase

ACCUMULATION = f"{OUTSIDE}.gradient accumulation"
AFTER_BACKWARD = f"{OUTSIDE}.after backward"
UNATTRIBUTED = f"{OUTSIDE}.backward of a forward outside the block"
AMBIGUOUS = f"{OUTSIDE}.backward that several threads may have made"
NO_TASK = -1
_TIMELINE = 2**18  # changes of module remembered; a graph older than that counts as outside


@dataclass(slots=True, eq=False)
class ModulePhase:
    """A module (or a named part of the outside) in a phase, and what ran there.

    counts: calls by entry; the tracker never looks inside.
    seconds: time by entry, where it is measured.
    """

    fqn: str
    phase: Phase
    counts: defaultdict[CallCost, int] = field(default_factory=lambda: defaultdict(int))
    seconds: defaultdict[CallCost, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(slots=True, eq=False)
class Frame:
    """One entry of the module stack: a module, or an optimizer's step; at its bottom, the outside.

    task: the graph task (backward pass) in which it was entered; -1 for none.
    step: of an optimizer's step, the id of the Python frame that runs it; else 0.
    closure: the step was given a function that computes the loss.
    """

    named: ModuleName | None
    owner: Any
    place: ModulePhase | None
    task: int
    step: int = 0
    closure: bool = False


class Thread:
    """What is known of one thread: sequence numbers and stacks are per thread.

    entered: the thread entered the counter; else it is one of autograd's own.
    current: the next operator's place, if it is known; None: ask ``locate``.
    used_params: ids of the parameters that took part.
    param_sink: the set that the mode writes ids to: ``used_params``, or in an optimizer's step
    ``discarded_params``.
    """

    def __init__(self, start: int, *, entered: bool) -> None:
        self.entered = entered
        self.stack: list[Frame] = [Frame(None, None, None, NO_TASK)]
        self.places: dict[tuple[str, Phase], ModulePhase] = {}
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.tokens: defaultdict[str, int] = defaultdict(int)
        self.used_params: set[int] = set()
        self.discarded_params: set[int] = set()
        self.param_sink = self.used_params
        self.seqs: list[int] = [-1, start]
        self.fqns: list[str] = [UNATTRIBUTED, OUTSIDE]
        self.start = self.last_seq = start
        self.after_backward = False
        self.made_graph_in_backward = False
        self.recompute_task = NO_TASK
        self.current: ModulePhase | None = self.place(OUTSIDE, "forward")

    def place(self, fqn: str, phase: Phase) -> ModulePhase:
        place = self.places.get((fqn, phase))
        if place is None:
            place = self.places[fqn, phase] = ModulePhase(fqn, phase)
        return place

    def mark(self, seq: int, fqn: str) -> None:
        """From sequence number ``seq`` on, autograd nodes are of ``fqn``."""
        if self.fqns[-1] == fqn:
            return
        if self.seqs[-1] >= seq:
            self.fqns[-1] = fqn
        else:
            self.seqs.append(seq)
            self.fqns.append(fqn)
            if len(self.seqs) > _TIMELINE:
                del self.seqs[1 : _TIMELINE // 2], self.fqns[1 : _TIMELINE // 2]

    def owner_of(self, seq: int) -> str:
        return self.fqns[bisect_right(self.seqs, seq) - 1]

    def made(self, seq: int) -> bool:
        """True if this thread, while followed, gave this sequence number to some node."""
        return self.start <= seq <= self.last_seq != self.start
