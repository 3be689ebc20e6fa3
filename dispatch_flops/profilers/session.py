"""One run of a counter: everything that is entered at its start and left at its end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from dispatch_flops import _torch
from dispatch_flops.counting.aggregation import CallAggregator, RecordedCalls
from dispatch_flops.counting.dispatch_mode import CountingMode
from dispatch_flops.counting.eager_stance import eager_runs, take_eager_stance
from dispatch_flops.counting.held_tensors import HeldTensors
from dispatch_flops.counting.hookless_modules import hookless_modules, runs_no_hooks
from dispatch_flops.counting.known_layers import KnownLayers
from dispatch_flops.counting.known_steps import KnownSteps
from dispatch_flops.counting.launches import Launches
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.opaque_modules import OpaqueModules
from dispatch_flops.counting.packed_weights import note_on_packed
from dispatch_flops.counting.placement import Placement, run_info
from dispatch_flops.counting.profile_builder import Observed, build_profile
from dispatch_flops.counting.python_frames import is_dispatching
from dispatch_flops.counting.ranks import Ranks
from dispatch_flops.counting.torchscript import forget_last_graph, uncounted_kernels
from dispatch_flops.counting.undo import UndoStack
from dispatch_flops.counting.unseen_modules import unseen_modules
from dispatch_flops.errors import WrongPlaceError, WrongThreadError
from dispatch_flops.operators import registry
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.profile import OUTSIDE, Profile
from dispatch_flops.profile.memory import MemoryOptions
from dispatch_flops.profile.profile import deferred_profile
from dispatch_flops.profilers.isolation import garbage_collection_later
from dispatch_flops.profilers.uncounted import describe_launches, describe_unseen
from dispatch_flops.timing.untimed import UntimedPass

if TYPE_CHECKING:
    from dispatch_flops.memory.memory_profile import MemoryReading
    from dispatch_flops.memory.run_memory import Memory


class Session:
    """One run of a counter; a pause closes it, and it can be opened again.

    within: see ``EnteredMode``.
    scope: where it was opened last.
    unseen_modules: modules that ran without a trace, as ``unseen_modules`` finds them and as the
        last profile names them.
    uncounted_kernels: sentences on kernels that ran outside of operators, likewise.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module] | Mapping[str, nn.Module],
        conventions: Conventions,
        own_rules: Mapping[Any, registry.Rule],
        *,
        is_timed: bool,
        mesh: Any = None,
        memory: MemoryOptions | None = None,
        within: tuple[int, ...] | None = None,
    ) -> None:
        self._mesh = mesh
        self._ranks = Ranks()
        self._conventions = conventions
        with garbage_collection_later():  # names are many new objects, too
            self._names = ModuleNames(roots)
        self._calls = CallAggregator()
        self._pass = _timed_pass(self._names) if is_timed else UntimedPass()
        mode: Callable[..., CountingMode] = CountingMode
        self._memory: Memory | None = None
        self._read_memory: Callable[[], MemoryReading | None] = lambda: None
        if memory is not None:
            self._memory, mode, self._read_memory = _follow_memory(self._names, memory)
        observers = (*self._pass.observers, *((self._memory,) if self._memory else ()))
        is_repeated = not is_timed and not (memory and memory.has_timeline)
        layers = KnownLayers(own_rules) if is_repeated else None
        steps = KnownSteps(own_rules) if is_repeated else None
        self._tracker = Tracker(self._names, observers, self._is_mode_on, layers, steps)
        timer = self._pass.operator_timer
        of_mode = (self._tracker, conventions, own_rules, self._aggregate, timer)
        self._mode = mode(*of_mode)
        self._mode.within = within
        self._opaque = OpaqueModules(self._mode, conventions, own_rules)
        self._undo = UndoStack()
        self._eager_runs_before = eager_runs()
        self._is_open = False
        self._thread = threading.current_thread()
        self.unseen_modules: tuple[str, ...] = ()
        self._launches = Launches(self._is_mode_on)
        self.uncounted_kernels: tuple[str, ...] = ()
        self._taken_off_by: str | None = None

    def open(self) -> None:
        """Start counting in this thread; does nothing if it is started already."""
        if self._is_open:
            return
        self.check_thread()
        self._thread = threading.current_thread()
        try:
            self._find_ranks()
            take_eager_stance(self._undo)
            forget_last_graph()
            self._launches.start(self._undo)
            self._tracker.start(self._undo)
            self._opaque.start(self._undo)
            if self._memory is not None:
                self._memory.start(self._undo)
            self._mode.start(self._undo)
            self._pass.start(self._undo)
            self._is_open = True
        except BaseException:
            self._is_open = False
            self._undo.run()
            raise

    def close(self) -> None:
        """Stop counting, until ``open``; raises WrongThreadError as ``check_thread`` does.

        Where the mode cannot be left, it stays and passes operators through: it is left when this
        is called again elsewhere.
        """
        self.check_thread()
        if self._has_lost_mode():
            is_inference = self.scope.is_inference
            self._taken_off_by = "inference mode" if is_inference else "backward pass or other mode"
        self._close()

    def _has_lost_mode(self) -> bool:
        """Return True if the end of a block took the mode off; an operator may have put it back."""
        if not (self._is_open and self.is_of_this_thread) or _torch.is_hidden(self._mode):
            return False
        if is_dispatching(self._mode):
            return False
        has_left_inference = self.scope.is_inference and not _torch.ModeScope.here().is_inference
        return has_left_inference or not _torch.are_modes_seen() or not self._is_mode_on()

    def _close(self) -> None:
        try:
            self._is_open = False
            self._undo.add(self._mode.leave)  # where it could not be left earlier
            self._undo.run()
        except BaseException:  # of a signal's handler, perhaps
            self._undo.run()
            raise

    def end(self) -> None:
        """Stop counting for good: nothing that the run allocated is followed from now on.

        The garbage collector may call this in any thread.
        """
        if self.is_of_this_thread:
            self.close()
        else:
            self._close()
        if self._memory is not None:
            self._memory.end()
        self._let_go()

    def abandon(self) -> None:
        """Stop counting, from any thread, whatever was missed.

        Another thread that still runs keeps the mode, but nothing else is left of the session.
        """
        if self.is_of_this_thread:
            self.check_scope()
        self._close()
        self._let_go()

    def _let_go(self) -> None:
        """Be told of the release of no module and of no optimizer from now on.

        What is left of a session is often cyclic garbage. CPython 3.11 may collect it while it
        clears the weak references to an object that is released, before their callbacks: it then
        goes on with those that it has just freed, which ends the process.
        """
        self._tracker.end()
        self._names.end()

    @property
    def is_of_this_thread(self) -> bool:
        """True in the thread that called ``open``."""
        return self._thread is threading.current_thread()

    @property
    def has_missed(self) -> bool:
        """True if operators of this thread may have passed unseen since ``open``."""
        return not self.is_of_this_thread or self._has_lost_mode() or self._tracker.has_missed

    @property
    def missed(self) -> str | None:
        """The sentence on what passed unseen until counting stopped; None if nothing did."""
        if self._taken_off_by is not None:
            return (
                f"the {self._taken_off_by} in which counting started has ended: what ran since "
                "then was not counted, or not all of it"
            )
        if self._tracker.has_missed:
            return (
                "a layer's call or an optimizer's step was broken off, by an exception or by what "
                "a signal's handler called: what ran until the next call of a module was not "
                "counted, or not all of it"
            )
        return None

    @property
    def scope(self) -> _torch.ModeScope:
        """The scope in which counting started."""
        return self._mode.scope

    @property
    def can_close(self) -> bool:
        """True in a scope in which the mode can be left for good."""
        return self._mode.can_be_left

    def check_scope(self) -> None:
        """Raise WrongPlaceError if torch would turn the mode on again after it is left here."""
        if not self.can_close:
            raise WrongPlaceError(
                "counting started outside of this inference mode, backward pass, compiled call or "
                "operator: leave or stop the counter there"
            )

    def check_thread(self) -> None:
        """Raise WrongThreadError if another thread entered the mode: only that one can leave it.

        Of a thread that has ended, nothing is to be left.
        """
        if self._mode.is_entered and not self.is_of_this_thread and self._thread.is_alive():
            raise WrongThreadError(
                "the counter was entered in another thread: leave, stop, pause or resume it there"
            )

    def note_running(self, module: nn.Module) -> None:
        """Treat the forward of ``module``, which runs already, as started now."""
        self._tracker.enter_module(module, ())

    def note_backward(self) -> None:
        """Treat a backward pass as over, which ran uncounted, with no call of a module since."""
        thread = self._tracker.join_thread()
        thread.is_after_backward, thread.current = True, None

    def note_stepping(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Treat the step of ``optimizer``, which runs already, as started now."""
        thread = self._tracker.join_thread()
        fqn = f"{OUTSIDE}.{type(optimizer).__name__}"
        parts = thread.module_phase(fqn, "optimizer")
        self._tracker.enter_operator(optimizer, parts, has_closure=has_closure)

    def note_stepped(self) -> None:
        """Treat the optimizer's step as over, which ran uncounted."""
        self._tracker.join_thread().gradients = frozenset()

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Count in this thread, too."""
        if self._is_mode_on() or not self._is_open:
            yield
            return
        self._tracker.join_thread(is_entered=True)
        try:
            with self._mode:
                yield
        finally:
            self._tracker.leave_thread()

    def calls(self) -> RecordedCalls:
        """Return all operator calls recorded so far."""
        with self._pass.excluded(), garbage_collection_later():
            return self._calls.including(self._tracker.module_phases())

    def profile(self) -> Profile:
        """Return the profile of everything counted so far."""
        with self._pass.excluded(), _torch.modes_disabled():
            self._pass.read()
            profile = self._builder(self.calls())()
        return dataclasses.replace(profile, timing=self._pass.timing(profile))

    def finish(self, calls: RecordedCalls) -> Profile:
        """Return the final profile, of these calls; it is built when it is read.

        What it tells of modules, parameters, devices and memory is read now: the program may change
        them. A timed profile is built now, for its times come from clocks that are still in use.
        """
        if self._pass.operator_timer is not None:
            return self.profile()
        with _torch.modes_disabled(), garbage_collection_later():
            return deferred_profile(self._builder(calls), calls.totals())

    def _builder(self, calls: RecordedCalls) -> Callable[[], Profile]:
        """Read what a profile needs besides ``calls``; return what builds it.

        The result keeps neither modules nor tensors alive.
        """
        self._find_ranks()
        with garbage_collection_later():
            table, held = self._names.read_facts()
            used_params = self._tracker.used_params()
            observed = Observed(
                used_params=used_params,
                tokens=self._tracker.tokens(),
                output_shapes=self._tracker.output_shapes(),
                latency_s=self._pass.module_seconds(),
                mesh_dims=self._ranks.mesh_dims,
                communication=self._mode.communication.calls(),
            )
            run = run_info(
                Placement.of_tensors(held),
                self._conventions,
                self._tracker.first_call,
                self._ranks,
            )
            memory = self._read_memory()
        self.uncounted_kernels = self.find_uncounted_kernels(calls)
        self.unseen_modules = ()
        if not table.are_all_in(used_params):
            self.unseen_modules = self._find_unseen(calls, observed)
        notes = (
            *_notes_of(self._conventions),
            *(note_on_packed(self._names.packed()) if table.has_packed else ()),
            *([describe_unseen(self.unseen_modules)] if self.unseen_modules else ()),
            *self.uncounted_kernels,
            *self._notes_on_hookless(calls, held, used_params),
            *self._mode.higher_order.notes,
            *self._mode.not_asked.notes(),
            *self._mode.communication.notes,
            *(self._memory.notes() if self._memory is not None else ()),
            *self._notes_on_compiled(),
        )
        return partial(_build, memory, calls, self._names, observed, run, notes)

    def _find_unseen(self, calls: RecordedCalls, observed: Observed) -> tuple[str, ...]:
        names = self._names.by_fqn
        found = unseen_modules(
            names, observed.output_shapes, observed.used_params, calls.computing_modules
        )
        return self._described(found)

    def _described(self, fqns: Iterable[str]) -> tuple[str, ...]:
        names = self._names.by_fqn
        return tuple(f"{fqn or 'the model'} ({names[fqn].facts.class_name})" for fqn in fqns)

    def _notes_on_hookless(
        self, calls: RecordedCalls, held: HeldTensors, used_params: set[int]
    ) -> Iterator[str]:
        """Say whose operators are counted, but cannot be attributed to the module."""
        if any(map(runs_no_hooks, {*map(type, held.modules)})):
            found = hookless_modules(self._names.by_fqn, calls.module_calls(), used_params)
            if found:
                from dispatch_flops.renderers.text import first_names  # takes tabulate along

                yield (
                    f"calls of {first_names(self._described(found))} ran no hooks, for __call__ of "
                    "the class is not torch's: their operators belong to the modules that call "
                    "them, or are outside"
                )

    def find_uncounted_kernels(self, calls: RecordedCalls) -> tuple[str, ...]:
        """Return sentences on kernels that ran outside of operators; their work counts as 0."""
        return (*uncounted_kernels(calls), *describe_launches(self._launches))

    def _notes_on_compiled(self) -> Iterator[str]:
        """Say which figures compiled code may change; counts are of the eager code in any case."""
        figures = ["latency"] * (self._pass.operator_timer is not None)
        figures += ["memory"] * (self._memory is not None)
        if figures and eager_runs() > self._eager_runs_before:
            yield (
                "compiled functions ran their eager code: what the compiler makes of it may differ "
                f"much in {' and '.join(figures)}"
            )

    def _find_ranks(self) -> None:
        """Find this process's rank, unless its process group is gone by now."""
        ranks = Ranks.of(self._names, self._mesh)
        if ranks.world_size is not None:
            self._ranks = ranks

    def _aggregate(self) -> None:
        """Aggregate this thread's calls, so that memory does not grow with their signatures."""
        self._pass.read()
        self._calls.aggregate(self._tracker.join_thread().module_phases.values())

    def _is_mode_on(self) -> bool:
        return any(mode is self._mode for mode in _torch.modes_in_force())


def _notes_of(conventions: Conventions) -> tuple[str, ...]:
    """Return what a reader of the profile must know of the conventions."""
    if conventions.flops == "all":
        return ()
    return ("FLOPs are 2 per MAC of a contraction; all other arithmetic counts 0",)


# What takes times or follows memory is imported for the few runs that need it: that takes time.


def _timed_pass(names: ModuleNames) -> UntimedPass:
    from dispatch_flops.timing.calibrated import counting_pass

    return counting_pass(names.modules())


def _follow_memory(
    names: ModuleNames, options: MemoryOptions
) -> tuple[Memory, Callable[..., CountingMode], Callable[[], MemoryReading]]:
    """Return the memory of a run, what makes the mode that follows it, and what reads it."""
    from dispatch_flops.memory.memory_mode import MemoryMode
    from dispatch_flops.memory.memory_profile import MemoryReading
    from dispatch_flops.memory.run_memory import Memory

    memory = Memory(names, options)
    return memory, partial(MemoryMode, memory=memory), partial(MemoryReading, memory, names)


def _build(
    memory: MemoryReading | None,
    calls: RecordedCalls,
    names: ModuleNames,
    observed: Observed,
    *parts: Any,
) -> Profile:
    # A profile consists of many new objects, none of them garbage: collection would take most of
    # the time.
    with garbage_collection_later():
        observed = dataclasses.replace(observed, calls=calls.module_calls())
        profile = build_profile(calls, names, observed, *parts)
        return profile if memory is None else memory.attach_to(profile)
