"""The step that runs now: its segments so far, and the counter while one of them is counted."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dispatch_flops import _torch
from dispatch_flops.counting.amounts import (
    UNCOUNTED,
    Amounts,
    amounts_of,
    flops_of,
    has_backward,
)
from dispatch_flops.errors import UncountedWarning
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.program_lines import stacklevel_of_program
from dispatch_flops.operators.registry import Rule
from dispatch_flops.profilers.session import Session
from dispatch_flops.profilers.step_costs import (
    BEGIN,
    CALL,
    END,
    STEPPED,
    STEPPING,
    CountedRun,
    Segment,
    State,
    States,
    call_of_any_inputs,
)
from dispatch_flops.profilers.step_positions import KnownPositions, Position
from dispatch_flops.profilers.step_signature import OPAQUE, OptimizerNumbers
from dispatch_flops.profilers.uncounted import describe_uncounted


class StepCounter:
    """Counter that is entered at an event of a step and left at a later one.

    session: the one that counts, from ``start`` on until counting has stopped; else None.
    """

    def __init__(
        self, model: nn.Module, conventions: Conventions, own_rules: Mapping[Any, Rule]
    ) -> None:
        self._model = model
        self._conventions = conventions
        self._own_rules = own_rules
        self.session: Session | None = None
        self._taken: Amounts = Counter()  # what earlier segments of this session cost
        self._has_warned = False
        self._within: tuple[int, ...] = ()

    def note_modes(self) -> None:
        """Note the dispatch modes in force: counting starts within these.

        It may start in the block of another one that ends before counting does, and such a block
        takes off whichever mode was entered last.
        """
        self._within = tuple(map(id, _torch.stacked_modes())) if _torch.number_of_modes() else ()

    def start(self) -> Session | None:
        """Start counting; return the session, or None if it runs already."""
        if self.session is not None:
            return None
        session = Session(
            (self._model,),
            self._conventions,
            self._own_rules,
            is_timed=False,
            within=self._within,
        )
        self.session, self._taken = session, Counter()
        try:
            session.open()
        except BaseException:
            self.stop()
            raise
        return session

    def can_start(self) -> bool:
        """Return True where counting can start, or runs already.

        A node of a backward pass, in which an optimizer may step, and the rest of a compiled call
        are too short.
        """
        here = _torch.ModeScope.here()
        return self.session is not None or not (here.is_compiled or here.graph_task >= 0)

    def take(self) -> Amounts | None:
        """Return what was counted since the last ``take``; None if nothing, or not all of it."""
        if self.session is None:
            return None
        if self.session.has_missed:
            self.abandon()
            return None
        calls = self.session.calls()
        total = amounts_of(calls)
        found, self._taken = total - self._taken, total
        if not self._has_warned:
            sentences = [*self.session.find_uncounted_kernels(calls)]
            if any(key[-1] == UNCOUNTED for key in found):
                sentences.append(describe_uncounted(calls))
            if sentences:
                self._has_warned = True
                text = ". ".join(sentences)
                warnings.warn(text, UncountedWarning, stacklevel=stacklevel_of_program())
        return found

    def leave(self, *, is_end: bool = False) -> None:
        """Stop counting where torch will not undo that; elsewhere counting goes on.

        is_end: the step ends, so all scopes that were entered in it have ended. Within a step, one
        inference mode cannot be told from another.
        """
        session = self.session
        if session is None or not session.can_close:
            return
        if is_end or not (session.scope.is_inference or _torch.ModeScope.here().is_inference):
            self.stop()

    def discard(self) -> None:
        """Forget what was counted in a step that did not end, and stop counting if possible."""
        self.take()
        self.leave()

    def stop(self) -> None:
        """Stop counting."""
        if self.session is not None:
            self.session.end()
            self.session = None

    def abandon(self) -> None:
        """Stop counting, also if another thread counts."""
        if self.session is not None:
            self.session.abandon()
            self.session = None


class RunningStep:
    """Path of the step that runs through the states; one object serves one step after another.

    is_verified: the whole step is counted, whatever is known of it.
    was_counted: at least one of its segments was counted.
    is_known: it went where an earlier one did, to the end: there is nothing to commit.
    """

    __slots__ = (
        "_at", "_counted", "_counter", "_numbers", "_positions", "_states", "is_known",
        "is_verified", "was_counted",
    )  # fmt: skip

    def __init__(self, states: States, counter: StepCounter) -> None:
        self.is_verified = self.was_counted = self.is_known = False
        self._states = states
        self._numbers = OptimizerNumbers()
        self._positions = KnownPositions()
        self._counter = counter
        self._counted: list[CountedRun] = []
        self._at = self._positions.start

    def restart(self, *, is_verified: bool) -> None:
        """Begin another step; to make an object for each takes longer."""
        self.is_verified = is_verified
        self.was_counted = self.is_known = False
        self._at = Position() if is_verified else self._positions.start
        if self._counted:
            self._counted = []

    @property
    def is_stepping(self) -> bool:
        """True while an optimizer's step runs."""
        return bool(self._at.running_optimizers)

    @property
    def has_gaps(self) -> bool:
        """True if a segment was not counted, after the end."""
        return len(self._counted) < len(self._at.parts)

    @property
    def has_varied(self) -> bool:
        """True if, after ``commit``, a segment that was counted varies and its inputs tell all."""
        counted = [run.segment for run in self._counted]
        return any(one.varies and not one.state.is_opaque for one in counted)

    # -- events -----------------------------------------------------------------------------------

    # Each looks up first where the event led before; in most steps that is all it does.

    def begin(self) -> None:
        """Begin before the first event: what runs until then is part of the step."""
        found = self._at.following.get(BEGIN)
        if found is not None:
            self._at = found
            return
        self._go_to(BEGIN, Position(state=self._states.find(BEGIN)))

    def begin_in_closure(self, optimizer: Optimizer, signature: Hashable) -> None:
        """Begin with a call in the closure of an optimizer's step, which runs already."""
        event = (STEPPING, self._numbers.of(optimizer), signature)
        found = self._at.following.get(event)
        if found is not None:
            self._at = found
            return
        running = (event[1:],)
        at = Position(running_optimizers=running, is_opaque=signature is OPAQUE, history=(event,))
        self._reach(event, at)

    def call(self, model: nn.Module | None, signature: Hashable) -> None:
        """Note that a call of the model starts; None: that the work on a batch starts."""
        event = (CALL, signature)
        found = self._at.following.get(event)
        if found is not None:
            self._at = found
            return
        begin = self._states.find(BEGIN)
        is_told_apart = self._at.state is begin or begin.prepares(self._counted)
        at = self._after_segment(event if is_told_apart else call_of_any_inputs(event))
        at.is_opaque = at.is_opaque or signature is OPAQUE
        running = at.running_optimizers
        key = (CALL, len(at.parts), at.open_calls, signature, running)
        at.state = self._state_after(event, at, key, is_opaque=at.is_opaque)
        if _needs_gradient(signature):
            at.open_calls = (*at.open_calls, signature)
        at.last_call = signature
        if model is not None:
            at.is_after_backward = False
        session = self._go_to(event, at)
        if session is not None and model is not None:
            session.note_running(model)

    def stepping(
        self, optimizer: Optimizer, signature: Hashable, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Note that the step of an optimizer starts, with these arguments."""
        name = self._numbers.of(optimizer)
        event = (STEPPING, name, signature)
        found = self._at.following.get(event)
        if found is not None:
            self._at = found
            return
        before, ending = self._at.state, (STEPPING, name)
        at = self._after_segment(ending)
        self._note_if_uncalled(at)
        at.before_optimizer = None if before is None else (before, ending)
        at.running_optimizers = (*at.running_optimizers, (name, signature))
        key = (STEPPING, len(at.parts), at.running_optimizers, at.open_calls)
        at.state = self._state_after(event, at, key, is_opaque=signature is OPAQUE)
        session = self._go_to(event, at)
        if session is not None:
            has_closure = any(map(callable, (*args[1:], *kwargs.values())))
            session.note_stepping(optimizer, has_closure=has_closure)

    def stepped(self, optimizer: Optimizer) -> None:
        """Note that the step of an optimizer has ended."""
        name = self._numbers.of(optimizer)
        event = (STEPPED, name)
        found = self._at.following.get(event)
        if found is not None:
            self._at = found
            return
        at = self._after_segment(event)
        at.running_optimizers = at.running_optimizers[:-1]
        at.open_calls = ()
        key = (STEPPED, len(at.parts), name, at.last_call, at.running_optimizers)
        is_opaque = at.is_opaque or self._states.find(BEGIN).is_opaque
        at.state = self._state_after(event, at, key, is_opaque=is_opaque)
        if at.before_optimizer is not None:
            before, ending = at.before_optimizer
            before.after_skipping[ending] = at.state
        session = self._go_to(event, at)
        if session is not None:
            session.note_stepped()

    def end(self) -> tuple[Segment | CountedRun, ...]:
        """Note the end of the step; return what it consists of."""
        found = self._at.following.get(END)
        if found is not None:
            self.is_known = True
            return found.parts
        at = self._after_segment(END)
        self._note_if_uncalled(at)
        self._counter.leave(is_end=True)
        if not any(one.is_inferred and one.state.free_segments for one in at.uncounted()):
            self._reach(END, at)  # else it is asked for again
        self._at = at
        return at.parts

    def commit(self, number: int) -> None:
        """Add what was counted to the segments, after the other runs were added.

        number: that of the step.
        """
        for run in self._counted:
            run.segment.add_counted(run.once)
            run.segment.state.note_counted(run.segment)
            self._states.note_counted(run.segment.state)
        unknown = [one for one in self._at.uncounted() if one.is_inferred]
        asked = [self._states.note_unknown(one, number) for one in unknown]
        if self._counted or any(asked):
            self._positions.forget()

    # -- parts ------------------------------------------------------------------------------------

    def _after_segment(self, event: Hashable) -> Position:
        """Return a new position after the segment that ``event`` ends."""
        at, amounts = self._at, self._counter.take()
        parts, open_calls = at.parts, at.open_calls
        is_after_backward = at.is_after_backward
        if at.state is not None:
            segment = at.state.ended_by(event)
            if amounts is not None:
                self._counted.append(CountedRun(segment=segment, once=amounts))
                parts = (*parts, self._counted[-1])
            else:
                parts = (*parts, segment)
                if at.state.must_be_counted:
                    self._states.note_blocked(at.state)
            had_backward = _had_backward(segment, amounts)
            # Where that is not known, the graphs of calls are there for a backward pass.
            is_unknown = amounts is None and not segment.counted_runs
            is_after_backward |= had_backward or (is_unknown and bool(open_calls))
            if had_backward:
                open_calls = ()
        return Position(
            parts=parts,
            history=at.history,
            open_calls=open_calls,
            is_after_backward=is_after_backward,
            last_call=at.last_call,
            is_opaque=at.is_opaque,
            running_optimizers=at.running_optimizers,
            before_optimizer=at.before_optimizer,
        )

    def _state_after(
        self, event: Hashable, at: Position, key: Hashable, *, is_opaque: bool
    ) -> State:
        """Return the state of the position that ``event`` led to."""
        at.history = (*at.history, event)
        return self._states.find((key, is_opaque), at.history, is_opaque=is_opaque)

    def _note_if_uncalled(self, at: Position) -> None:
        """Count every step from now on, if work was done in this one before any call."""
        if len(at.parts) != 1 or at.last_call is not None:
            return
        for run in self._counted:
            if flops_of(run.once) and not run.segment.state.is_opaque:
                run.segment.state.is_opaque = True
                warnings.warn(
                    "the model was not called in a step, so its inputs are not known: every step "
                    "is counted; pass the module that is called, or state the inputs by "
                    "note_batch()",
                    stacklevel=stacklevel_of_program(),
                )

    def _go_to(self, event: Hashable, at: Position) -> Session | None:
        """Continue at that position; return the session if counting starts with it."""
        assert at.state is not None
        if not (self.is_verified or at.state.must_be_counted):
            self._counter.leave()
        elif self._counter.can_start():
            self.was_counted = True
            self._reach(event, at)
            session = self._counter.start()
            if session is not None and at.is_after_backward:
                session.note_backward()
            return session
        self._reach(event, at)
        return None

    def _reach(self, event: Hashable, at: Position) -> None:
        if not self.was_counted:
            self._positions.add(self._at, event, at)
        self._at = at


def _had_backward(segment: Segment, amounts: Amounts | None) -> bool:
    if amounts is not None:
        return has_backward(amounts)
    if segment.counted_runs:
        return segment.runs_backward
    return any(one.runs_backward for one in segment.state.known_segments())


def _needs_gradient(signature: Any) -> bool:
    return signature is OPAQUE or bool(signature[1])
