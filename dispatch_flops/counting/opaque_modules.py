"""Module classes with a formula: a call of such a module is one operator.

Its formula is called as ``formula(module, *args, out=output, **kwargs)``. What the module runs
in forward, or when that is run again, is not counted beside it; its backward pass is counted
as what it is, operators under the modules that made them, as for any other module.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from dispatch_flops import _torch
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.thread_state import Frame, ModulePhase, Thread
from dispatch_flops.operators import registry
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost, cost_of_call
from dispatch_flops.operators.registry import Rule

_FAILED = object()


class OpaqueModules:
    """While entered, books calls of modules whose class has a rule.

    Has hooks of its own, and only where there is such a rule: nobody else pays for it. They run
    right after the tracker's on the way in, so a module's frame is on its stack, and right
    after them on the way out: ``_open`` keeps that frame.
    """

    def __init__(
        self, tracker: Tracker, conventions: Conventions, own_rules: Mapping[Any, Rule]
    ) -> None:
        self._tracker = tracker
        self._conventions = conventions
        self._rules = registry.module_rules(own_rules)
        self._entries: dict[Any, CallCost] = {}
        self._open: dict[Thread, Frame] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> OpaqueModules:
        if self._rules:
            before = register_module_forward_pre_hook(self._enter)
            self._hooks.callback(before.remove)
            after = register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
            # Removing the hook leaves its entry among those that take keyword arguments, and
            # torch.compile takes that for a hook.
            self._hooks.callback(_torch.hooks_with_kwargs.pop, after.id, None)
            self._hooks.callback(after.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _enter(self, module: nn.Module, args: Any) -> None:
        thread = self._tracker.thread()
        if thread is None:
            return
        frame = thread.stack[-1]
        if frame.owner is not module or frame.place is None:
            return
        if self._open.get(thread) not in thread.stack:
            if type(module) not in self._rules:
                return
            self._open[thread] = frame
        # A place that is in no book: what is counted there is forgotten.
        thread.current = frame.place = ModulePhase(frame.place.fqn, frame.place.phase)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any = _FAILED) -> None:
        # Where forward raised, torch calls this without kwargs.
        thread = self._tracker.thread()
        frame = self._open.get(thread) if thread is not None else None
        if thread is None or frame is None or frame.owner is not module or frame in thread.stack:
            return
        del self._open[thread]
        if output is not _FAILED and frame.place is not None:
            place = thread.place(frame.place.fqn, frame.place.phase)
            with _torch.modes_disabled():
                place.counts[self._price(module, args, kwargs, output)] += 1

    def _price(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> CallCost:
        cls = type(module)
        entry = cost_of_call(
            registry.name_of(cls), cls, self._rules[cls], (module, *args), kwargs, output,
            self._conventions, read=(args, kwargs, tuple(module.parameters())),
        )  # fmt: skip
        return self._entries.setdefault(
            (entry.op, entry.dtype, entry.cost, entry.shares, entry.error), entry
        )
