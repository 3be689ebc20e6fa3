"""The hooks of a meter: on the root module and on optimizers, and nowhere else."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dispatch_flops import _torch
from dispatch_flops.counting.thread_state import NO_TASK
from dispatch_flops.profilers.training import with_inner_optimizers

_graph_task = _torch.graph_task_id

OnCall = Callable[[nn.Module, Any, Any], None]
OnStep = Callable[[Optimizer, Any, Any], None]
_Table = dict[int, Any]  # one of torch's, of hooks by key


def _ignore(*_: Any) -> None:
    pass


class MeterHooks:
    """Hooks that tell of calls of ``model`` and of steps of optimizers while they are installed.

    optimizer: the one that ``is_held`` knows, with those that it holds. Every optimizer that
        steps is followed.

    A meter installs and removes them in every step. They are put into torch's tables under a key
    that no other hook has, because registration would take most of the meter's time.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Optimizer | None = None,
        on_call: OnCall = _ignore,
        on_return: OnCall = _ignore,
        on_stepping: OnStep = _ignore,
        on_stepped: OnStep = _ignore,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._on_call = on_call
        self._on_return = on_return
        self._on_stepping = on_stepping
        self._on_stepped = on_stepped
        self._handle = RemovableHandle(OrderedDict())
        self._key = self._handle.id
        self._installed: tuple[_Table, ...] = ()
        self.renew()

    def __reduce__(self) -> Any:
        """Return what a copy or a pickle of the model takes along: hooks that do nothing."""
        # Where a handle is unpickled, its id is given to no other hook.
        return MeterHooks, (None,), {"_handle": self._handle}

    def renew(self) -> None:
        """Ask again which optimizers the given one holds, and keep the hooks uncompiled."""
        if _torch.DYNAMO in sys.modules:
            # Not the package: torch.cond compiles the hooks of a counter, and must be able to.
            for name in ("dispatch_flops.profilers", "dispatch_flops._torch"):
                _torch.keep_from_compiling(name)
        held = [] if self._optimizer is None else with_inner_optimizers(self._optimizer)
        self._held = frozenset(map(id, held))

    def is_held(self, optimizer: Optimizer) -> bool:
        """Return True if this is the given optimizer or one that it holds."""
        return id(optimizer) in self._held

    def install(self, *, with_return: bool = False) -> None:
        """Add the hooks. with_return: tell of the end of each call of the model, too."""
        assert self._model is not None
        key, every = self._key, _torch.all_step_pre_hooks
        before, takes_kwargs, after = _torch.call_hooks(self._model)
        self._installed = (every, before, takes_kwargs)  # while a hook is there, it takes kwargs
        takes_kwargs[key] = True
        before[key] = self._call
        every[key] = self._follow
        if with_return:
            self._installed = (after, *self._installed)
            after[key] = self._return

    def remove(self) -> None:
        """Remove the hooks."""
        key = self._key
        try:
            for table in self._installed:
                del table[key]
        except KeyError:  # the program, or an interrupt, was there before
            for table in self._installed:
                table.pop(key, None)
        self._installed = ()

    def _follow(self, optimizer: Optimizer, *_: Any) -> None:
        """Add hooks to an optimizer, before its own are asked for.

        The global hooks of the counter cannot be added by another global hook, which is called
        from a loop over them.
        """
        key, (before, after) = self._key, _torch.step_hooks(optimizer)
        if key not in before:
            self._installed = (before, after, *self._installed)
            before[key] = self._on_stepping
            after[key] = self._on_stepped

    def _call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A call in a backward pass recomputes an earlier one.
        if module is self._model and _graph_task() == NO_TASK:
            self._on_call(module, args, kwargs)

    def _return(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self._model:
            self._on_return(module, args, output)
