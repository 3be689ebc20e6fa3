"""Steps of torch's own optimizers that are like earlier ones; see ``undispatched``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from dispatch_flops import _torch
from dispatch_flops.counting.undispatched import (
    Costs,
    KnownRuns,
    costs_of,
    note_costs,
    runs_plainly,
)

if TYPE_CHECKING:
    from dispatch_flops.counting.thread_state import OpenCall, ThreadState
    from dispatch_flops.operators.registry import Rule

_share_storage = _torch.share_storage
_keep_modes_out = _torch.keep_modes_out

_MOST = 4  # steps kept of one optimizer
_PLAIN = (bool, int, float, str, type(None))
_TENSORS = (Tensor, Parameter)
_NOTHING: Mapping[str, Any] = {}
_NO_OPTIONS = ("params", "param_names")  # of a group


class _NotComparableError(Exception):
    """A step cannot be compared with others."""


class _Kind:
    """A class of optimizers whose operators depend on no values but the options of its groups.

    name: of the function that a step calls, in the module that defines the class.
    """

    def __init__(self, cls: type[Optimizer], module: ModuleType, name: str) -> None:
        self._cls, self._namespace = cls, vars(module)
        variants = (f"_{kind}_{name}" for kind in ("single_tensor", "multi_tensor", "fused"))
        self._names = (name, *variants)
        self._originals = self._parts()
        self._is_of_torch = all(map(_torch.is_of_torch, self._originals))

    def is_original(self, optimizer: Optimizer) -> bool:
        """Return True if the program has replaced none of the functions that a step runs."""
        return (
            self._is_of_torch
            and "_init_group" not in vars(optimizer)
            and self._parts() == self._originals
        )

    def _parts(self) -> list[Any]:
        """Return the functions that a step runs, without what torch puts around them."""
        functions = [self._namespace[name] for name in self._names]
        functions.append(self._cls._init_group)  # type: ignore[attr-defined]
        return [inspect.unwrap(self._cls.step), *map(_torch.undisabled, functions)]


_ADAM, _SGD = (sys.modules[cls.__module__] for cls in (Adam, SGD))

# The operators of others may depend on the number of the step.
KINDS: dict[type[Optimizer], _Kind] = {
    SGD: _Kind(SGD, _SGD, "sgd"),
    Adam: _Kind(Adam, _ADAM, "adam"),
    AdamW: _Kind(AdamW, _ADAM, "adam"),
}


@dataclass(slots=True, eq=False)
class KnownStep:
    """A step of an optimizer, and what was recorded of it.

    is_same: compares the tensors that it read and wrote with those of another step. state: what
    else decides which operators run. costs: empty until the step has returned.
    memory: what ``UndispatchedMemory`` noted of it.
    """

    is_same: Callable[..., bool]
    state: Any
    costs: Costs = ()
    memory: Any = None


class KnownSteps(KnownRuns):
    """The steps of optimizers in one run."""

    def __init__(self, own_rules: Mapping[Any, Rule]) -> None:
        self._steps: WeakKeyDictionary[Optimizer, list[KnownStep]] = WeakKeyDictionary()
        super().__init__(own_rules)

    def forget(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def find(self, optimizer: Optimizer, args: Any, kwargs: Any) -> KnownStep | None:
        """Return an earlier step that this one is like, or a new one, without costs.

        None if the step is to be dispatched, and tells nothing about others.
        """
        kind = KINDS.get(type(optimizer))
        if (
            kind is None
            or not self.is_on
            or len(args) != 1  # with a closure
            or kwargs
            or any(_torch.step_hooks(optimizer))
            or len(_torch.all_step_pre_hooks) != 1
            or len(_torch.all_step_post_hooks) != 1
            or not runs_plainly()
            or not kind.is_original(optimizer)
        ):
            return None
        try:
            state, tensors = _read(optimizer)
        except _NotComparableError:
            return None
        if _share_storage(tuple(tensors)):  # the cost depends on what they share
            return None
        steps = self._steps.setdefault(optimizer, [])
        for step in steps:
            if step.state == state and step.is_same(*tensors):
                return step
        if len(steps) >= _MOST or any(t.layout is not torch.strided for t in tensors):
            return None
        steps.append(KnownStep(_torch.tensor_comparison(tensors), state))
        return steps[-1]

    def begin(self, thread: ThreadState, opened: OpenCall, step: KnownStep) -> None:
        """Begin a step without the mode if it is like ``step``; else prepare to keep it."""
        module_phase, memory = opened.module_phase, self.memory
        assert module_phase is not None
        if step.costs and (
            memory is None
            or (step.memory is not None and memory.repeat_step(step.memory, module_phase))
        ):
            begin_step(thread, opened, step)
            return
        opened.new_call = step
        note_costs(opened)
        if memory is not None:
            opened.memory_before = memory.before_step()

    def keep(self, opened: OpenCall) -> None:
        """Note what was recorded of a step that was dispatched, and has returned."""
        step = opened.new_call
        assert isinstance(step, KnownStep)
        step.costs = costs_of(opened)
        if self.memory is not None:
            step.memory = self.memory.of_step(opened.memory_before)


def begin_step(thread: ThreadState, opened: OpenCall, step: KnownStep) -> None:
    """Begin a step that is like ``step`` and runs without the mode."""
    opened.known_step = step
    thread.recorded_in = opened.module_phase
    thread.undispatched = opened, 0, _keep_modes_out()


def end_step(thread: ThreadState, opened: OpenCall) -> None:
    """End a step that ran without the mode, and record what was recorded of the earlier one."""
    thread.undispatched = None  # the mode sees what runs from now on
    assert opened.known_step is not None and opened.module_phase is not None
    for cost, count in opened.known_step.costs:
        opened.module_phase.counts[cost] += count


def _read(optimizer: Optimizer) -> tuple[Any, list[Tensor]]:
    """Return what decides the operators of a step, and the tensors that it reads and writes.

    Raises _NotComparableError where that is something else.
    """
    if hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf"):  # of GradScaler
        raise _NotComparableError
    state: list[Any] = [torch.get_default_dtype()]
    tensors: list[Tensor] = []
    for group in optimizer.param_groups:
        state.append([(name, _plain(name, value)) for name, value in group.items()])
        for parameter in group["params"]:
            gradient = parameter.grad
            state.append(gradient is None)
            if gradient is None:
                continue
            tensors += (parameter, gradient)
            for name, value in optimizer.state.get(parameter, _NOTHING).items():
                if isinstance(value, Tensor):
                    tensors.append(value)
                state.append((name, value.__class__))
    for tensor in tensors:
        # A subclass may run operators of its own; to compare a nested tensor ends the process.
        if tensor.__class__ not in _TENSORS or tensor.is_nested:
            raise _NotComparableError
    return state, tensors


def _plain(name: str, value: Any) -> Any:
    """Return what an option decides; a learning rate that is not negative decides nothing.

    An operator costs less where the factor that follows from it is 1.
    """
    if name in _NO_OPTIONS or (name == "lr" and value.__class__ is float and value >= 0):
        return None
    parts = value if value.__class__ is tuple else (value,)
    if not all(part.__class__ in _PLAIN for part in parts) or (name == "differentiable" and value):
        raise _NotComparableError
    return value
