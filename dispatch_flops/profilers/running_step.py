"""The step that runs now: its segments so far, and the counter while one of them is counted."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dispatch_flops.errors import UncountedWarning
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.registry import Rule
from dispatch_flops.profilers.session import Session
from dispatch_flops.profilers.step_costs import (
    BEGIN,
    CALL,
    END,
    STEPPED,
    STEPPING,
    UNCOUNTED,
    Amounts,
    Segment,
    State,
    States,
    amounts_of,
    flops_of,
    has_backward,
)
from dispatch_flops.profilers.step_signature import OPAQUE


class StepCounter:
    """Counter that is entered at an event of a step and left at a later one."""

    def __init__(
        self, model: nn.Module, conventions: Conventions, own_rules: Mapping[Any, Rule]
    ) -> None:
        self._model = model
        self._conventions = conventions
        self._own_rules = own_rules
        self._session: Session | None = None
        self._taken: Amounts = Counter()  # what earlier segments of this session cost
        self._has_warned = False

    def start(self) -> Session | None:
        """Start counting; return the session, or None if it runs already."""
        if self._session is not None:
            return None
        session = Session((self._model,), self._conventions, self._own_rules, is_timed=False)
        session.open()
        self._session, self._taken = session, Counter()
        return session

    def take(self) -> Amounts | None:
        """Return what was counted since the last ``take``; None if nothing is being counted."""
        if self._session is None:
            return None
        calls = self._session.calls()
        total = amounts_of(calls)
        found, self._taken = total - self._taken, total
        unknown = sorted(str(key[1]) for key in found if key[2] == UNCOUNTED)
        if unknown and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"no cost is known for {', '.join(unknown)}: the meter's totals are lower bounds",
                UncountedWarning,
                stacklevel=4,
            )
        return found

    def stop(self) -> None:
        """Stop counting."""
        session, self._session = self._session, None
        if session is not None:
            session.end()


class RunningStep:
    """Path of one step through the states.

    is_verified: the whole step is counted, whatever is known of it.
    was_counted: at least one of its segments was counted.
    """

    __slots__ = (
        "_before_optimizer",
        "_counter",
        "_last_call",
        "_open_calls",
        "_path",
        "_running_optimizers",
        "_state",
        "_states",
        "is_verified",
        "was_counted",
    )

    def __init__(self, states: States, counter: StepCounter, *, is_verified: bool) -> None:
        self.is_verified = is_verified
        self.was_counted = False
        self._states = states
        self._counter = counter
        self._state: State | None = None  # None before the first event
        self._path: list[tuple[Segment, Amounts | None]] = []
        self._open_calls: tuple[Hashable, ...] = ()  # whose graphs no backward pass has consumed
        self._last_call: Hashable = None
        self._running_optimizers: tuple[Hashable, ...] = ()
        self._before_optimizer: tuple[State, Hashable] | None = None

    @property
    def is_stepping(self) -> bool:
        """True while an optimizer's step runs."""
        return bool(self._running_optimizers)

    # -- events -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin before the first event: what runs until then is part of the step."""
        self._go_to(self._states.find(BEGIN))

    def call(self, model: nn.Module | None, signature: Hashable) -> None:
        """Note that a call of the model starts; None: that the work on a batch starts."""
        self._end_segment(CALL if self._path else (CALL, signature))
        key = (CALL, len(self._path), self._open_calls, signature, self._running_optimizers)
        state = self._states.find(key, is_opaque=signature is OPAQUE)
        if self._needs_gradient(signature):
            self._open_calls = (*self._open_calls, signature)
        self._last_call = signature
        session = self._go_to(state)
        if session is not None and model is not None:
            session.note_running(model)

    def stepping(
        self, optimizer: Optimizer, name: Hashable, signature: Hashable, *, has_closure: bool
    ) -> None:
        """Note that the step of an optimizer starts."""
        before, event = self._state, (STEPPING, name)
        self._end_segment(event)
        self._note_if_uncalled()
        self._before_optimizer = None if before is None else (before, event)
        self._running_optimizers = (*self._running_optimizers, (name, signature))
        key = (STEPPING, len(self._path), self._running_optimizers, self._open_calls)
        session = self._go_to(self._states.find(key))
        if session is not None:
            session.note_stepping(optimizer, has_closure=has_closure)

    def stepped(self, name: Hashable) -> None:
        """Note that the step of an optimizer has ended."""
        self._end_segment((STEPPED, name))
        self._running_optimizers = self._running_optimizers[:-1]
        self._open_calls = ()
        key = (STEPPED, len(self._path), name, self._last_call, self._running_optimizers)
        is_opaque = self._last_call is OPAQUE or self._states.find(BEGIN).is_opaque
        state = self._states.find(key, is_opaque=is_opaque)
        if self._before_optimizer is not None:
            before, event = self._before_optimizer
            before.after_skipping[event] = state
        session = self._go_to(state)
        if session is not None:
            session.note_stepped()

    def end(self) -> tuple[Segment, ...]:
        """Note the end of the step; return its segments."""
        self._end_segment(END)
        self._note_if_uncalled()
        self._counter.stop()
        return tuple([segment for segment, _ in self._path])

    def commit(self) -> None:
        """Add what was counted to the segments, after their runs were added."""
        for segment, amounts in self._path:
            if amounts is not None:
                segment.add_counted(amounts)
                segment.state.note_counted()
            elif not segment.counted_runs:
                segment.state.note_unknown()

    # -- parts ------------------------------------------------------------------------------------

    def _end_segment(self, event: Hashable) -> None:
        if self._state is None:
            return
        segment, amounts = self._state.ended_by(event), self._counter.take()
        self._path.append((segment, amounts))
        if self._open_calls and self._had_backward(segment, amounts):
            self._open_calls = ()

    def _note_if_uncalled(self) -> None:
        """Count every step from now on, if work was done in this one before any call."""
        segment, amounts = self._path[0]
        if len(self._path) > 1 or self._last_call is not None or segment.state.is_opaque:
            return
        if amounts is not None and flops_of(amounts):
            segment.state.is_opaque = True
            warnings.warn(
                "the model was not called in a step, so its inputs are not known: every step is "
                "counted; pass the module that is called, or state the inputs by note_batch()",
                stacklevel=5,
            )

    def _go_to(self, state: State) -> Session | None:
        """Continue in ``state``; return the session if counting starts with it."""
        self._state = state
        if self.is_verified or state.must_be_counted:
            self.was_counted = True
            return self._counter.start()
        self._counter.stop()
        return None

    def _had_backward(self, segment: Segment, amounts: Amounts | None) -> bool:
        if amounts is not None:
            return has_backward(amounts)
        if segment.counted_runs:
            return segment.runs_backward
        return any(one.runs_backward for one in segment.state.segments.values())

    def _needs_gradient(self, signature: Any) -> bool:
        return signature is OPAQUE or bool(signature[1])
