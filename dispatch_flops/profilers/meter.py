"""``FlopMeter``: the cost of every step of an eager run, from a few counted ones."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Hashable, Iterable, Mapping
from threading import get_ident
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.counting.meter_totals import sample_count
from dispatch_flops.counting.metered_run import MeteredRun, check_steps
from dispatch_flops.counting.python_frames import (
    FrameKey,
    calling_frame,
    has_returned,
    running_modules,
)
from dispatch_flops.errors import AlreadyActiveError, TargetError
from dispatch_flops.operators import (
    formulas,  # noqa: F401  (fills the registry)
    registry,
)
from dispatch_flops.operators.conventions import Causal, Conventions, Flops
from dispatch_flops.operators.program_lines import stacklevel_of_program
from dispatch_flops.operators.registry import Formula
from dispatch_flops.profilers.inputs import check_model
from dispatch_flops.profilers.meter_hooks import MeterHooks
from dispatch_flops.profilers.model_state import ModelState
from dispatch_flops.profilers.running_step import RunningStep, StepCounter
from dispatch_flops.profilers.step_costs import Segment, States
from dispatch_flops.profilers.step_schedule import next_verified
from dispatch_flops.profilers.step_signature import call_signature, optimizer_signature
from dispatch_flops.timing.devices import Now, checked_clock

_NO_SIZE = (0, 0)
_NONE_TIMED = 200  # steps that were all counted, before a warning says so


class FlopMeter(MeteredRun):
    """Meter of the FLOPs, FLOP/s and MFU of every step of an eager run.

        model = torch.nn.Linear(3, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        meter = FlopMeter(model, optimizer)
        for x in torch.ones(1000, 2, 3):
            with meter.step(samples=len(x)):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        meter.total_flops, meter.window.flops_per_s, meter.run.mfu

    model: the module whose calls tell one step from another.
    optimizer: the optimizer whose step ends a step after ``start()``. All that step are counted.
    machine: machine whose peaks MFU and HFU refer to; None (the default) for the device's own
        peaks, if they are known.
    verify_every: every so many steps one is counted anew and compared (default 1000), with another
        at random in between, and before that steps 12, 24, 36, 48, 60, 120, 180, 240, 360, 720,
        840, and the one after each. 0: never.
    window: number of steps of ``meter.window`` (default 100).
    causal, flops, custom_mapping: as in ``FlopCounterMode``.
    now: clock that returns seconds (default ``time.perf_counter``).

    is_timed: True; set it to False where another profiler slows the steps that follow: rates and
        utilisations then leave them out.

    A step is what runs in a ``step()`` block or, after ``start()``, from a call of the model to
    the optimizer's step. The first step with a new signature is counted. Later ones are not: their
    cost is added. The signature consists of the inputs of each call of the model (shapes, dtypes,
    whole numbers, texts, objects by their attributes, and of a float whether it is 0), the modes of
    autograd and autocast, the formulas that apply, the modules of the model with their flags
    (attributes that are True, False or None, such as ``training``), the parameters that require a
    gradient and those that have one, and the steps of optimizers with their options. An input that
    this does not describe in full, such as a set, is counted every time. Data do not belong
    to it. Where they decide what runs, as in a mixture of experts, verification finds out and warns
    once. ``is_estimate`` is then True, steps at random are counted, one of ``verify_every // 10``,
    and the others of a signature cost the mean of those; ``run.standard_error`` tells how far the
    sum may be off. A first step that alone
    costs more, as one that fills a cache does, is known by ten later ones that cost the same.

    What follows a call may depend on earlier calls of the step. It is counted after each other
    history of calls, until three of them have cost the same; others are then taken to cost that.
    What precedes a call may depend on its inputs, such as the preparation of data: it is told apart
    by them if it costs something before the first call of a step.

    A step that an exception leaves is not part of any figure. Code that ``torch.compile`` has
    compiled runs eagerly while a step is counted; ``counting_backend`` counts it as it runs. Pass
    what ``torch.compile`` returned: within compiled code counting cannot start, so that a new
    signature is counted when it comes again. A copy of a meter continues its totals.

    Raises TargetError if ``model`` or ``optimizer`` is something else, and ConfigError for another
    wrong argument.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        machine: Machine | None = None,
        *,
        verify_every: int = 1000,
        window: int = 100,
        causal: Causal = "full",
        flops: Flops = "all",
        custom_mapping: Mapping[Any, Formula] | None = None,
        now: Now = time.perf_counter,
    ) -> None:
        self._arguments = {
            "model": model,
            "optimizer": optimizer,
            "machine": machine,
            "verify_every": verify_every,
            "window": window,
            "causal": causal,
            "flops": flops,
            "custom_mapping": custom_mapping,
            "now": now,
        }
        check_model(model)
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TargetError(
                f"optimizer is of type {type(optimizer).__name__}; pass a torch.optim.Optimizer "
                "or None"
            )
        super().__init__(machine, window)
        self._varies = False
        self._varied_in = 0  # the step where a cost was first found to vary
        self._warned: set[str] = set()
        self.verify_every = verify_every  # also sets ``_verified_at``
        self._model = model
        self._now = checked_clock(now)
        self._counter = StepCounter(
            model,
            Conventions(causal=causal, flops=flops),
            registry.own_rules(custom_mapping),
        )
        self._forget_steps()
        self._state = ModelState(model)
        self._hooks = MeterHooks(
            model, optimizer, self._on_call, self._on_return, self._on_stepping, self._on_stepped
        )
        self._ends_with_optimizer = optimizer is not None
        self._entered = 0  # blocks so far
        self._step: RunningStep | None = None  # ``_path`` while a step runs
        self._thread = 0  # that of the step
        self._begun_s = 0.0
        self._size = _NO_SIZE  # samples and tokens of the step that runs, or of the next one
        self._stated = 0  # inputs of ``note_batch``, until the model is called
        self.is_timed = True
        self._stepping: FrameKey  # of the optimizer's step that runs, after ``start``
        # The last one that started outside a step; its closure may begin one.
        self._outer: tuple[FrameKey, Optimizer, Hashable] | None = None
        self._is_started = self._calls_itself = False

    def __reduce__(self) -> Any:
        """Return a meter of a copy of the model that continues the totals."""
        arguments = {**self._arguments, "verify_every": self.verify_every}
        return _continued, (arguments, self.state_dict()), {"is_timed": self.is_timed}

    @property
    def verify_every(self) -> int:
        """Every so many steps one is counted anew; see the class."""
        return self._verify_every

    @verify_every.setter
    def verify_every(self, steps: int) -> None:
        check_steps("verify_every", steps, least=0)
        self._verify_every = steps
        self._verified_at: float = 0  # the step that is verified next; 0: not known
        self._warn_if_varying()

    # -- steps ----------------------------------------------------------------------------------

    def step(
        self,
        samples: int | None = None,
        tokens: int | None = None,
        *,
        inputs: tuple[Any, ...] | None = None,
    ) -> _Block:
        """Return a context manager for one step, with all its micro-batches.

        samples, tokens: the numbers of them in the step, for the rates; None if not known.
        inputs: those of ``note_batch``, where the work on a batch starts with the step; None (the
            default) where other work may come first.

        Raises ConfigError if one is not a count, TargetError for inputs that are not a tuple, and
        AlreadyActiveError inside another step or after ``start()``.
        """
        if not (inputs is None or isinstance(inputs, (tuple, list))):
            raise TargetError(f"inputs is of type {type(inputs).__name__}; pass a tuple, as (x,)")
        return _Block(self, _checked_size(samples, tokens), inputs)

    def note_size(self, samples: int | None = None, tokens: int | None = None) -> None:
        """State the numbers of samples and tokens of the step that runs, where its start is early.

        After ``start()`` and between two steps, of the next one.

        samples, tokens: as in ``step``. Raises ConfigError if one is not a count.
        """
        self._size = _checked_size(samples, tokens)

    def note_batch(self, *inputs: Any) -> None:
        """State the inputs of the work that starts now, where the model itself is not called.

        A loop may call one of its methods, such as Lightning's ``training_step``, or its parts.
        """
        if self._step is not None and self._is_mine():
            self._call_batch(self._step, inputs)

    def _call_batch(self, step: RunningStep, inputs: tuple[Any, ...]) -> None:
        self._stated = len(inputs)
        step.call(None, call_signature(self._state, inputs, {}))

    def start(self) -> None:
        """Find the steps by hooks on the model and the optimizer, until ``stop()``.

        A step begins with a call of the model, and ends when the optimizer has stepped. What comes
        first is not part of it, such as an evaluation without gradients or a teacher's call, which
        ``step()`` counts. A meter without an optimizer takes each call of the model as a step, with
        those that it makes of itself. While a thread is in a step, calls in others do not count.

        Raises AlreadyActiveError inside a step, and if it is started already.
        """
        self._check_inactive()
        self._is_started = True
        self._counter.note_modes()
        self._hooks.install(with_return=not self._ends_with_optimizer)

    def stop(self) -> None:
        """Stop finding steps; an unfinished one is dropped.

        Raises WrongPlaceError in an inference mode or a backward pass that began within such a
        step, if it is being counted.
        """
        self._is_started = False
        self._drop()

    def _check_inactive(self) -> None:
        if self._is_started or self._step is not None:
            raise AlreadyActiveError(
                "this FlopMeter is active already: leave its step() block, or stop() it, first"
            )

    def _begin(self, inputs: tuple[Any, ...] | None = None) -> None:
        self._thread = get_ident()
        number, states = self._totals.steps + 1, self._states
        if number > self._verified_at:
            self._verified_at = self._next_counted(number)
        is_whole = number == self._verified_at
        if states.blocked:
            is_whole = states.asks_for_whole_step() or is_whole
        if self._counter.session is not None:  # since an earlier step
            self._counter.discard()
            is_whole = self._counter.session is not None or is_whole
        self._step = step = self._path
        step.restart(is_verified=is_whole)
        self._stated = 0
        if inputs is not None:
            self._call_batch(step, inputs)
        elif not self._is_started:
            step.begin()
        self._begun_s = self._now()

    def _next_counted(self, number: int) -> float:
        """Return the first step, from ``number`` on, that is counted whatever is known of it."""
        states = self._states
        states.due = {due for due in states.due if due >= number}
        verified = next_verified(number, self._verify_every, varies=self._varies)
        return min((verified, *states.due))

    def _end(self) -> None:
        step, self._step = self._step, None
        assert step is not None
        seconds = self._now() - self._begun_s
        parts = step.end()
        is_rated = self.is_timed and not step.was_counted
        (samples, tokens), self._size = self._size, _NO_SIZE
        self._totals.add(parts, seconds if is_rated else None, samples, tokens)
        if not step.is_known:
            step.commit(self._totals.steps)
            if self._states.due:
                self._verified_at = 0  # to be asked for again
            if self._is_started and step.is_verified and step.has_gaps:
                self._warn_once(
                    "compiled code calls the model, so its steps cannot be counted from their "
                    "first call on; pass what torch.compile returned, or use step() blocks"
                )
            if self._states.is_full:
                self._totals.settle(self._parts())
                self._forget_steps()
            if step.was_counted:
                self._hooks.renew()
                self._report(step)
                if not step.is_verified:  # which would say nothing of the inputs
                    self._report_if_none_is_timed()

    def _drop(self) -> None:
        """Forget an unfinished step, and remove the hooks."""
        self._step = self._outer = None
        self._size = _NO_SIZE
        try:
            if self._counter.session is not None:
                self._counter.abandon()
        finally:
            self._hooks.remove()

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=stacklevel_of_program())

    def _report(self, step: RunningStep) -> None:
        """Note if the cost of a signature varies."""
        if step.has_varied and not self._varies:
            self._varies = self._states.varies = True
            self._varied_in = self._totals.steps
            self._verified_at = 0
            self._warn_if_varying()

    def _warn_if_varying(self) -> None:
        """Warn once if the cost of a signature varies, unless every step is counted anyway."""
        if self._varies and self._verify_every != 1:
            self._warn_once(
                f"step {self._varied_in} has the signature of an earlier step and another cost: "
                "what runs depends on data or on more than the inputs; the meter's totals are "
                "estimates from counted steps"
            )

    def _report_if_none_is_timed(self) -> None:
        """Warn where no step was like an earlier one, after many."""
        totals = self._totals
        if self.is_timed and totals.steps == _NONE_TIMED and not totals.timed_steps:
            self._warn_once(
                f"each of the first {_NONE_TIMED} steps was counted, which takes time and leaves "
                "rates unknown: their inputs are new in every step, as a text or a number may be, "
                "or are not known in full"
            )

    # -- hooks ----------------------------------------------------------------------------------

    def _is_mine(self) -> bool:
        return self._step is not None and get_ident() == self._thread

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_started and not self._begins_with(module):
            return
        step = self._step
        if step is None or get_ident() != self._thread:
            return
        if not (self._stated and self._runs_stated(module, args)):
            step.call(module, call_signature(self._state, args, kwargs))

    def _runs_stated(self, module: nn.Module, args: Any) -> bool:
        """Return True if this first call after ``note_batch`` runs the work that was stated.

        Under a wrapper such as DDP, Lightning runs ``training_step`` in place of ``forward``, with
        the batch and its number. That is another one in every step, so the call says no more.
        """
        numbers, self._stated = args[self._stated :], 0
        return "forward" in vars(module) and bool(numbers) and {*map(type, numbers)} == {int}

    def _begins_with(self, module: nn.Module) -> bool:
        """After ``start``: begin a step with this call if need be; False if it is outside one."""
        if self._step is not None and self._is_abandoned(module):
            self._step = None
        if self._step is None:
            if self._ends_with_optimizer and not torch.is_grad_enabled():
                return False
            self._begin()
            self._note_closure()
        return True

    def _note_closure(self) -> None:
        """After ``start``: tell the step that begins of the optimizer in whose closure it does."""
        if self._outer is not None and self._step is not None and not has_returned(self._outer[0]):
            self._stepping, optimizer, signature = self._outer
            self._step.begin_in_closure(optimizer, signature)

    def _is_abandoned(self, module: nn.Module) -> bool:
        """After ``start``: return True if the step that runs will not end; ``module`` is called."""
        assert self._step is not None
        if get_ident() != self._thread:
            if all(thread.ident != self._thread for thread in threading.enumerate()):
                return True
            if torch.is_grad_enabled() or not self._ends_with_optimizer:
                self._warn_once(
                    "the model is called while a step of another thread is not finished: calls in "
                    "this thread are not counted until it is"
                )
            return False
        if self._ends_with_optimizer:  # its step raised, unless its closure makes this call
            return self._step.is_stepping and has_returned(self._stepping)
        is_inner = _is_called_within_itself(module)
        self._calls_itself |= is_inner
        return not is_inner  # the call before raised

    def _on_return(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_mine() and not (self._calls_itself and _is_called_within_itself(module)):
            self._end()

    def _on_stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        step = self._step
        if step is not None and get_ident() == self._thread:
            if self._is_started and not step.is_stepping:
                self._stepping = calling_frame("_on_stepping")
            step.stepping(optimizer, optimizer_signature(optimizer), args, kwargs)
        elif step is None and self._ends_with_optimizer:
            key = calling_frame("_on_stepping")
            self._outer = key, optimizer, optimizer_signature(optimizer)

    def _on_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        step = self._step
        if step is not None and get_ident() == self._thread:
            step.stepped(optimizer)
            is_last = self._is_started and not step.is_stepping
            if is_last and self._hooks.is_held(optimizer):
                self._end()
        elif step is None and not self._totals.steps and self._hooks.is_held(optimizer):
            self._warn_once(
                "the model was not called before the optimizer's step, so that no step was found: "
                "nothing is counted; pass the module that is called, or use step() blocks"
            )

    # -- results --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<FlopMeter of {type(self._model).__name__}: {self.run.text()}>"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run; each signature is counted again once.

        state: what ``state_dict`` of that run's meter returned.

        Raises ConfigError for other data, and AlreadyActiveError inside a step.
        """
        self._check_inactive()
        super().load_state_dict(state)

    def _parts(self) -> Iterable[Segment]:
        return self._states.segments()

    def _all_modules(self) -> Iterable[nn.Module]:
        return self._model.modules()

    def _forget_parts(self) -> None:
        self._varies = False
        self._forget_steps()
        self._verified_at = 0

    def _forget_steps(self) -> None:
        self._states = States(varies=self._varies)
        self._path = RunningStep(self._states, self._counter)


def _checked_size(samples: int | None, tokens: int | None) -> tuple[int, int]:
    """Return both numbers, 0 for one that is not known; raise ConfigError for anything else."""
    if samples is None and tokens is None:
        return _NO_SIZE
    return sample_count(samples) or 0, sample_count(tokens, "tokens") or 0


def _is_called_within_itself(module: nn.Module) -> bool:
    """Return True if another call of ``module`` has not returned."""
    return running_modules()[id(module)] > 1


def _continued(arguments: dict[str, Any], state: Mapping[str, Any]) -> FlopMeter:
    meter = FlopMeter(**arguments)
    meter.load_state_dict(state)
    return meter


class _Block:
    """One step of a meter.

    size: its samples and tokens. inputs: of the work that the step begins with, if stated. number:
        how many blocks the meter has entered with this one, while the step may have to be dropped;
        else 0.
    """

    __slots__ = ("_meter", "inputs", "number", "size")

    def __init__(
        self, meter: FlopMeter, size: tuple[int, int], inputs: tuple[Any, ...] | None
    ) -> None:
        self._meter = meter
        self.size: tuple[int, int] = size
        self.inputs: tuple[Any, ...] | None = inputs
        self.number: int = 0

    def __enter__(self) -> None:
        meter = self._meter
        meter._check_inactive()
        self.number = meter._entered = meter._entered + 1
        meter._size = self.size
        try:
            meter._counter.note_modes()
            meter._hooks.install()
            meter._begin(self.inputs)
        except BaseException:
            meter._drop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        meter = self._meter
        try:
            if kind is None and meter._step is not None:
                meter._end()
        finally:
            meter._drop()
        self.number = 0

    def __del__(self) -> None:
        # An interrupt came before the first line of ``__exit__``, or while it ran.
        if self.number and self.number == self._meter._entered:
            self._meter._drop()
