"""Hugging Face transformers: one step of a Trainer, and generation with a KV cache.

For a forward pass alone, ``get_model_profile(model, kwargs=batch)`` is enough.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dispatch_flops.integrations.callback import StepCallback
from dispatch_flops.integrations.generation import GenerateProfile, profile_generate
from dispatch_flops.planning.generation import plan_generate

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        "dispatch_flops.integrations.transformers needs transformers: "
        "pip install 'dispatch-flops[transformers]'"
    ) from error

__all__ = ["FlopsCallback", "GenerateProfile", "plan_generate", "profile_generate"]


class FlopsCallback(StepCallback, TrainerCallback, ExportableState):  # type: ignore[misc]
    """Trainer callback that profiles one optimizer step, with all its micro-batches.

        from dispatch_flops.integrations.transformers import FlopsCallback

        flops = FlopsCallback(profile_step=5)
        Trainer(model, args, train_dataset=data, callbacks=[flops]).train()
        flops.profile, flops.mfu

    profile_step, config, machine, every_step: see ``StepCallback``. With ``every_step`` the figures
    are in the Trainer's log, beside the loss: in ``state.log_history``, and with the loggers of
    ``report_to``, before which this callback then runs. Tokens are what the Trainer counts, where
    ``include_num_input_tokens_seen`` says so; else the elements of the model's main input, if these
    are ids. Checkpoints hold the totals, and a run that is resumed continues them.

    Samples are the rows that enter the model while gradients are enabled. The profile is printed
    by the main process, and is kept as ``profile``. Every ``train()`` is profiled anew.

    A Trainer does not tell its callbacks of exceptions. If training may fail in the profiled step
    and the process goes on, train inside ``with flops:``, or call ``close()``.

    Raises ConfigError for a wrong step, configuration or machine.
    """

    _hook: RemovableHandle | None = None  # on the model, during a step that is followed
    _noting: Callable[..., None] | None = None  # the hook
    _tokens_seen = 0  # by the Trainer, on all ranks, before the step

    def close(self) -> None:
        """Drop an unfinished step, as after an exception in it."""
        self._unhook()
        super().close()

    def __enter__(self) -> FlopsCallback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- called by the Trainer ------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin a training run."""
        self.reset()
        self._tokens_seen = state.num_input_tokens_seen
        if self._every_step:
            _move_to_front(self)
            self.resume(_saved_totals(state, type(self).__name__))
        # A Trainer looks it up where it saves; a checkpoint that is resumed may not have it.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Add the figures of ``every_step`` to what is logged of the training."""
        if logs is None or "loss" not in logs or not self._every_step:
            return
        figures = self.figures()
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Begin an optimizer step, before its first micro-batch."""
        self.begin(known["model"])
        if self.is_active or self._every_step:
            self._watch_batches(known["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End an optimizer step, after the optimizer has stepped."""
        self._unhook()
        if state.num_input_tokens_seen:
            self._tokens = (state.num_input_tokens_seen - self._tokens_seen) // args.world_size
            self._tokens_seen = state.num_input_tokens_seen
        self.end(
            silent=not state.is_world_process_zero,
            rank=args.process_index,
            world_size=args.world_size,
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this callback."""
        options = {"config": dataclasses.asdict(self.config), "every_step": self._every_step}
        return {"args": options, "attributes": {"_resumed": self.saved_totals()}}

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Print the profile if it is not printed yet."""
        self.finish()

    def _watch_batches(self, model: nn.Module) -> None:
        self._unhook()
        if self._noting is None:
            # Otherwise dynamo would compile the hook during the step that is timed.
            self._noting = torch.compiler.disable(self._note_call)
        self._hook = model.register_forward_pre_hook(self._noting, with_kwargs=True)

    def _note_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self.add_batch((args, kwargs), getattr(module, "main_input_name", "input_ids"))

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _saved_totals(state: Any, name: str) -> dict[str, Any]:
    """Return the totals of the checkpoint that is resumed; ``{}`` where none is."""
    saved = state.stateful_callbacks.get(name)
    # At step 0, that is of an earlier run of the same object.
    if not state.global_step or not isinstance(saved, dict):
        return {}
    totals: dict[str, Any] = saved.get("attributes", {}).get("_resumed", {})
    return totals


def _move_to_front(callback: FlopsCallback) -> None:
    """Let the callback run before those that write logs: they write what it adds.

    A Trainer puts its loggers before the callbacks of its user and does not hand out the list:
    it is an attribute of the object whose ``call_event`` runs now.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "call_event":
        frame = frame.f_back  # type: ignore[assignment]
    handler = None if frame is None else frame.f_locals.get("self")
    callbacks = getattr(handler, "callbacks", None)
    if isinstance(callbacks, list) and callback in callbacks:
        callbacks.remove(callback)
        callbacks.insert(0, callback)
