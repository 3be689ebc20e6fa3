"""Hugging Face transformers: one step of a Trainer, and generation with a KV cache.

    from dispatch_flops.integrations.transformers import FlopsCallback, profile_generate

    Trainer(model, args, train_dataset=data, callbacks=[FlopsCallback(profile_step=5)]).train()
    print(profile_generate(model, ids, max_new_tokens=64))

A model's forward needs nothing of this: ``get_model_profile(model, kwargs=batch)``.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dispatch_flops.integrations.callback import StepWatch
from dispatch_flops.integrations.generation import GenerateProfile, profile_generate

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "dispatch_flops.integrations.transformers needs transformers: "
        "pip install 'dispatch-flops[transformers]'"
    ) from error

__all__ = ["FlopsCallback", "GenerateProfile", "profile_generate"]


class FlopsCallback(StepWatch, TrainerCallback):  # type: ignore[misc]
    """Profiles one optimizer step of a Trainer, all its micro-batches as one; prints and keeps it.

    profile_step: the step to profile, the first of a run being 1; None for the config's.
    config: a FlopsProfilerConfig, the ``flops_profiler`` section of a DeepSpeed configuration
        as a dict, or the path of such a JSON file.
    machine: whose peaks MFU and HFU are of; None for the device's own, where they are known.

    MFU and HFU are of the time of the next step of as many samples, which runs without the
    profiler. Samples are the rows that enter the model with gradients on. Another ``train()`` is
    profiled anew. A Trainer tells its callbacks nothing of exceptions: where training may fail in
    the profiled step and the process goes on, train inside ``with callback:`` or call ``close()``.
    """

    _hook: RemovableHandle | None = None  # on the model, in a step that is profiled or timed

    def close(self) -> None:
        """Stop profiling, if an exception has ended training in the midst of the step."""
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

    # -- what the Trainer calls -----------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget an earlier run, and what it may have left running if an exception ended it."""
        self.reset()

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Called before the first micro-batch of an optimizer step."""
        self.begin(known["model"])
        if self.at_work:
            self._see_batches(known["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called after the optimizer has stepped."""
        self._unhook()
        self.end(
            silent=not state.is_world_process_zero,
            rank=args.process_index,
            world_size=args.world_size,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Print the profile, if that is still to be done."""
        self.finish()

    def _see_batches(self, model: nn.Module) -> None:
        def see(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                self.add_batch((args, kwargs))

        self._unhook()
        # dynamo would take time to compile it, in the step that is timed.
        hook = torch.compiler.disable(see)
        self._hook = model.register_forward_pre_hook(hook, with_kwargs=True)

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
