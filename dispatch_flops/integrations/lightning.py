"""A Lightning callback that profiles one optimizer step.

    from dispatch_flops.integrations.lightning import FlopsCallback

    trainer = lightning.Trainer(callbacks=[FlopsCallback(profile_step=5)])

Works with the packages ``lightning`` and ``pytorch_lightning``.
"""

from __future__ import annotations

from typing import Any

from dispatch_flops.integrations.callback import StepWatch

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(
            "dispatch_flops.integrations.lightning needs Lightning: "
            "pip install 'dispatch-flops[lightning]'"
        ) from error


class FlopsCallback(StepWatch, Callback):  # type: ignore[misc]
    """Profiles one optimizer step, all its batches as one, and prints and keeps the profile.

    profile_step: the step to profile, the first of a run being 1; None for the config's.
    config: a FlopsProfilerConfig, the ``flops_profiler`` section of a DeepSpeed configuration
        as a dict, or the path of such a JSON file.
    machine: whose peaks MFU and HFU are of; None for the device's own, where they are known.

    A batch after which ``trainer.global_step`` has risen ends a step. MFU and HFU are of the
    time of the next step of as many batches and samples, which runs without the profiler. Another
    ``fit()`` is profiled anew. Validation between the batches of the profiled step is counted
    with it.
    """

    _global_step: int | None = None  # as the step at work began

    def close(self) -> None:
        """Stop profiling and drop the step at work."""
        self._global_step = None
        super().close()

    def on_train_start(self, *_: Any) -> None:
        """Forget an earlier run."""
        self.reset()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        """A step begins with the first batch after the last step."""
        if self._global_step is None:
            self._global_step = trainer.global_step
            self.begin(pl_module)
        self.add_batch(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """A step is over if the optimizer has stepped."""
        if trainer.global_step == self._global_step:
            return
        self._global_step = None
        self.end(
            silent=not trainer.is_global_zero,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )

    def on_train_end(self, *_: Any) -> None:
        """Print the profile, if that is still to be done."""
        self.finish()

    def on_exception(self, *_: Any) -> None:
        """Leave nothing running."""
        self.close()
