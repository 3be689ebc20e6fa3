"""Hugging Face transformers: one step of a Trainer, and generation with a KV cache.

    from dispatch_flops.integrations.transformers import FlopsCallback, profile_generate

    Trainer(model, args, train_dataset=data, callbacks=[FlopsCallback(profile_step=5)]).train()
    print(profile_generate(model, ids, max_new_tokens=64))

A model's forward needs nothing of this: ``get_model_profile(model, kwargs=batch)``.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from dispatch_flops.hardware import Machine
from dispatch_flops.integrations.generation import GenerateProfile, profile_generate
from dispatch_flops.integrations.step_watch import ConfigSource, StepWatch, Watching

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "dispatch_flops.integrations.transformers needs transformers: "
        "pip install 'dispatch-flops[transformers]'"
    ) from error

__all__ = ["FlopsCallback", "GenerateProfile", "profile_generate"]


class FlopsCallback(Watching, TrainerCallback):  # type: ignore[misc]
    """Profiles one optimizer step of a Trainer, all its micro-batches as one; prints and keeps it.

    profile_step: the step to profile, the first of this run being 1; None for the config's.
    config: a FlopsProfilerConfig, the ``flops_profiler`` section of a DeepSpeed configuration
        as a dict, or the path of such a JSON file.
    machine: whose peaks MFU and HFU are of; None for the device's own, where they are known.

    MFU and HFU are of the time of the next step, which runs without the profiler. A Trainer
    tells its callbacks nothing of exceptions: where training may fail in the profiled step and
    the process goes on, train inside ``with callback:`` or call ``close()``.
    """

    def __init__(
        self,
        profile_step: int | None = None,
        config: ConfigSource | None = None,
        machine: Machine | None = None,
    ) -> None:
        self._watch = StepWatch(profile_step, config, machine)

    def close(self) -> None:
        """Stop profiling, if an exception has ended training in the midst of the step."""
        self._watch.close()

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
        """Drop what an earlier run, ended by an exception, may have left running."""
        self.close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Called before the first micro-batch of an optimizer step."""
        self._watch.begin(known["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called after the optimizer has stepped."""
        self._watch.end(
            silent=not state.is_world_process_zero,
            rank=args.process_index,
            world_size=args.world_size,
            batch_size=args.train_batch_size * args.gradient_accumulation_steps,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Print the profile, if no step came after it."""
        self._watch.finish()
