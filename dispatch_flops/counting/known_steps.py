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
from dispatch_flops.counting.undispatched import Costs, KnownRuns, costs_of, runs_plainly

if TYPE_CHECKING:
    from dispatch_flops.counting.thread_state import OpenCall, ThreadState
    from dispatch_flops.operators.registry import Rule

_share_storage = _torch.share_storage
_keep_modes_out = _torch.keep_modes_out

_MOST = 4  # steps kept of one optimizer
_PLAIN = (bool, int, float, str, type(None))
_TENSORS = (Tensor, Parameter)
_NOTHING: Mapping[str, Any] = {}


class _NotComparableError(Exception):
    """A step cannot be compared with others."""


class _Kind:
    """A class of optimizers whose operators depend on no values but the options of its groups.

    function: what a step calls, in the module that defines it.
    """

    def __init__(self, cls: type[Optimizer], module: ModuleType, name: str) -> None:
        self._cls, self._step = cls, _code_of(cls.step)
        self._namespace, self._name = vars(module), name
        self._function = self._namespace[name]

    def is_original(self) -> bool:
        """Return True if the program has replaced none of the functions that a step runs."""
        is_same_step = _code_of(self._cls.step) is self._step
        return is_same_step and self._namespace[self._name] is self._function


def _code_of(step: Callable[..., Any]) -> Any:
    """Return the code of ``step`` without the wrappers that torch puts around it."""
    return inspect.unwrap(step).__code__


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
    else decides which operators run. costs: empty until the step has ended.
    """

    is_same: Callable[..., bool]
    state: Any
    costs: Costs = ()


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
            or not kind.is_original()
        ):
            return None
        try:
            state, tensors = _read(optimizer)
        except _NotComparableError:
            return None
        if not tensors or _share_storage(tuple(tensors)):  # the cost depends on what they share
            return None
        steps = self._steps.setdefault(optimizer, [])
        for step in steps:
            if step.state == state and step.is_same(*tensors):
                return step
        if len(steps) >= _MOST or not all(map(_is_comparable, tensors)):
            return None
        return KnownStep(_torch.tensor_comparison(tensors), state)

    def keep(self, opened: OpenCall) -> None:
        """Keep a new step, which has returned, for later ones."""
        step = opened.new_call
        assert isinstance(step, KnownStep)
        steps = self._steps.get(opened.owner)
        if steps is not None:  # not forgotten meanwhile
            step.costs = costs_of(opened)
            steps.append(step)


def _is_comparable(tensor: Tensor) -> bool:
    return tensor.__class__ in _TENSORS and tensor.layout is torch.strided


def begin_step(thread: ThreadState, opened: OpenCall, step: KnownStep) -> None:
    """Begin a step that is like ``step`` and runs without the mode."""
    opened.known_step = step
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
    state: list[Any] = []
    tensors: list[Tensor] = []
    for group in optimizer.param_groups:
        state.append([_plain(name, group[name]) for name in optimizer.defaults])
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            tensors += (parameter, gradient)
            for name, value in optimizer.state.get(parameter, _NOTHING).items():
                if value.__class__ is Tensor:
                    tensors.append(value)
                state.append((name, value.__class__))
    if any(tensor.is_nested for tensor in tensors):  # to compare one ends the process
        raise _NotComparableError
    return state, tensors


def _plain(name: str, value: Any) -> Any:
    """Return what an option decides; a learning rate that is not negative decides nothing.

    An operator costs less where the factor that follows from it is 1.
    """
    if name == "lr" and value.__class__ is float and value >= 0:
        return None
    parts = value if value.__class__ is tuple else (value,)
    if not all(part.__class__ in _PLAIN for part in parts) or (name == "differentiable" and value):
        raise _NotComparableError
    return value
