"""State of one thread: the module and phase that it is in, and which module made which node."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from dispatch_flops.counting.known_layers import LayerCall
from dispatch_flops.counting.known_steps import KnownStep
from dispatch_flops.counting.module_tree import ModuleName
from dispatch_flops.counting.output_shapes import Shapes
from dispatch_flops.counting.python_frames import CallerKey, FrameKey
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.profile import OUTSIDE
from dispatch_flops.profile.cost import Phase

AFTER_BACKWARD = f"{OUTSIDE}.after backward"
UNATTRIBUTED = f"{OUTSIDE}.backward of a forward outside the block"
AMBIGUOUS = f"{OUTSIDE}.backward that several threads may have made"
NO_TASK = -1
NOT_CALLS = ("recompute", "setup")  # phases in which a forward does not count as a call
_TIMELINE = 2**18  # changes of module kept; nodes that are older belong to no module


@dataclass(slots=True, eq=False)
class ModulePhase:
    """A module (or a named part of the outside) in one phase, and the calls recorded there.

    counts: number of calls by cost. seconds: their time by cost; None where it is not measured.
    entered: times that the module's forward started.
    """

    fqn: str
    phase: Phase
    counts: defaultdict[CallCost, int] = field(default_factory=partial(defaultdict, int))
    seconds: defaultdict[CallCost, float] | None = None
    entered: int = 0

    def add_seconds(self, cost: CallCost, seconds: float) -> None:
        """Add the time of a call."""
        if self.seconds is None:
            self.seconds = defaultdict(float)
        self.seconds[cost] += seconds


@dataclass(slots=True, eq=False)
class OpenCall:
    """A module call or an optimizer step that has not ended; the outside is the lowest of all.

    task: the graph task (backward pass) in which it started; -1 for none.
    is_known: of a module whose calls returned before; their return tells nothing new.
    step: of an optimizer step, the Python frame that runs it; else None.
    has_closure: the step was given a function that computes the loss.
    is_in_hooks: the module's forward has returned, but forward hooks of its own may be running.
    caller: of an optimizer step, what called its last operator.
    new_call: where later calls of a layer, or steps, may be like it; costs_before: the counts of
        ``module_phase`` when it began, and a copy of them; memory_before: what
        ``UndispatchedMemory`` noted then; known_step: the earlier step that it is like.
    """

    named: ModuleName | None
    owner: Any
    module_phase: ModulePhase | None
    task: int
    is_known: bool = False
    step: FrameKey | None = None
    has_closure: bool = False
    is_in_hooks: bool = False
    caller: CallerKey | None = None
    new_call: LayerCall | KnownStep | None = None
    costs_before: tuple[Mapping[CallCost, int], Mapping[CallCost, int]] | None = None
    memory_before: Any = None
    known_step: KnownStep | None = None


@dataclass(slots=True, eq=False)
class KnownModule:
    """A module of which nothing but the start and the end of a call needs to be noted.

    module_phase: its phase "forward". is_layer: its calls may be like earlier ones of its class.
    is_new: none has returned so far. layer_call: the earlier call that the last one was like.
    """

    module: weakref.ref[nn.Module]
    named: ModuleName
    module_phase: ModulePhase
    is_layer: bool
    is_new: bool = False
    layer_call: LayerCall | None = None


# What runs without the mode: a layer or an optimizer's step; the sequence number at its start, and
# what keeps the mode out for as long as it lives.
Undispatched = tuple[KnownModule | OpenCall, int, object]


class ThreadState:
    """State of one thread; stacks and sequence numbers are per thread.

    is_entered: the thread entered the counter; otherwise autograd started it.
    current: where the next operator is recorded; None: ask ``Tracker.locate``.
    known_modules: by the ids of the modules. Shared modules, roots, wrappers and experts, whose
        calls need more, are not among them.
    undispatched: the call of a layer, or the step, that runs without the mode now.
    used_params: ids of the parameters that took part in an operator.
    is_in_setup: a pipeline infers its metadata; whatever runs then is of the phase "setup".
    known_task: the graph task in which ``is_in_setup`` was last determined.
    known_phase: where operators are recorded that nodes of that task run, of sequence numbers from
        ``known_from`` to ``known_to``, unless they recompute or make a graph; None if not known.
    accumulating: the same of nodes that accumulate gradients.
    param_sink: the set to which the mode adds ids: ``used_params``, or in an optimizer step
        ``discarded_params``.
    output_shapes: of what the first call of each module returned, by fqn.
    gradients: after a backward pass, the storages of the gradients; None: not asked for yet.
    is_on_gradients: an operator has read one of these, and the optimizer has not stepped since.
    recorded_in: the module and phase in which the last operator was recorded.
    """

    def __init__(self, start: int, *, is_entered: bool) -> None:
        self.is_entered = is_entered
        self.stack: list[OpenCall] = [OpenCall(None, None, None, NO_TASK)]
        self.module_phases: dict[tuple[str, Phase], ModulePhase] = {}
        self.known_modules: dict[int, KnownModule] = {}
        self.undispatched: Undispatched | None = None
        self.tokens: defaultdict[str, int] = defaultdict(int)
        self.output_shapes: dict[str, Shapes] = {}
        self.used_params: set[int] = set()
        self.discarded_params: set[int] = set()
        self.param_sink = self.used_params
        self.seqs: list[int] = [-1, start]
        self.fqns: list[str] = [UNATTRIBUTED, OUTSIDE]
        self.start = self.last_seq = start
        self.is_after_backward = False
        self.is_in_setup = False
        self.known_task = NO_TASK
        self.known_from = self.known_to = 0
        self.known_phase: ModulePhase | None = None
        self.accumulating: ModulePhase | None = None
        self.gradients: frozenset[int] | None = None
        self.is_on_gradients = False
        self.made_graph_in_backward = False
        self.recompute_task = NO_TASK
        self.recorded_in: ModulePhase | None = None
        self.current: ModulePhase | None = self.module_phase(OUTSIDE, "forward")

    def module_phase(self, fqn: str, phase: Phase) -> ModulePhase:
        """Return where calls of this module in this phase are recorded."""
        if self.is_in_setup:
            phase = "setup"
        found = self.module_phases.get((fqn, phase))
        if found is None:
            found = self.module_phases[fqn, phase] = ModulePhase(fqn, phase)
        return found

    def forget_gradients(self) -> None:
        """Ask for the gradients again: a backward pass may have made new ones."""
        self.gradients, self.is_on_gradients = None, False

    def mark(self, seq: int, fqn: str) -> None:
        """Attribute autograd nodes from sequence number ``seq`` on to ``fqn``."""
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
        """Return the fqn of the module that made the node of that sequence number."""
        return self.fqns[bisect_right(self.seqs, seq) - 1]

    def first_like(self, seq: int) -> int:
        """Return the first sequence number from which on all nodes up to ``seq`` have one owner."""
        return self.seqs[bisect_right(self.seqs, seq) - 1]

    def made(self, seq: int) -> bool:
        """Return True if this thread gave that sequence number to a node while it was followed."""
        return self.start <= seq <= self.last_seq != self.start


def last_recorded_in(threads: threading.local) -> ModulePhase | None:
    """Return where this thread recorded its last operator; None if it has recorded none.

    threads: the tracker's state of each thread.
    """
    thread: ThreadState | None = getattr(threads, "thread", None) or getattr(threads, "left", None)
    return None if thread is None else thread.recorded_in
