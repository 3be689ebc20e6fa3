"""The hooks of a meter: on the root module and on optimizers, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dispatch_flops import _torch
from dispatch_flops.counting.thread_state import NO_TASK
from dispatch_flops.profilers.training import with_inner_optimizers

_graph_task = _torch.graph_task_id


class MeterHooks:
    """Hooks that tell of calls of ``model`` and of steps of optimizers while they are installed.

    optimizer: the one to follow, with those that it holds; None: every one that steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        on_call: Callable[[nn.Module, Any, Any], None],
        on_return: Callable[[nn.Module, Any, Any], None],
        on_stepping: Callable[[Optimizer, Any, Any], None],
        on_stepped: Callable[[Optimizer, Any, Any], None],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._on_call = on_call
        self._on_return = on_return
        self._on_stepping = on_stepping
        self._on_stepped = on_stepped
        self._followed: set[int] = set()
        self._handles: list[RemovableHandle] = []

    def install(self, *, with_return: bool = False) -> None:
        """Add the hooks. with_return: tell of the end of each call of the model, too."""
        add = self._handles.append
        add(self._model.register_forward_pre_hook(self._call, with_kwargs=True))
        if with_return:
            add(self._model.register_forward_hook(self._on_return))
        if self._optimizer is None:
            add(register_optimizer_step_pre_hook(self._follow))
        else:
            for one in with_inner_optimizers(self._optimizer):
                self._follow(one)

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        self._followed.clear()

    def begins_step(self, *, needs_gradient: bool) -> bool:
        """Return True if a call that starts now can be the first of a step."""
        return torch.is_grad_enabled() or not needs_gradient

    def _call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A call in a backward pass recomputes an earlier one.
        if _graph_task() == NO_TASK:
            self._on_call(module, args, kwargs)

    def _follow(self, optimizer: Optimizer, *_: Any) -> None:
        """Add hooks to an optimizer, before its own are asked for.

        The global hooks of the counter cannot be added by another global hook, which is called
        from a loop over them.
        """
        if id(optimizer) not in self._followed:
            self._followed.add(id(optimizer))
            self._handles.append(optimizer.register_step_pre_hook(self._on_stepping))
            self._handles.append(optimizer.register_step_post_hook(self._on_stepped))
