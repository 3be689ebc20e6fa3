"""A Lightning callback that profiles one optimizer step.

    from dispatch_flops.integrations.lightning import FlopsCallback

    trainer = lightning.Trainer(callbacks=[FlopsCallback(profile_step=5)])

Works with the packages ``lightning`` and ``pytorch_lightning``.
"""

from __future__ import annotations

from typing import Any

from dispatch_flops.hardware import Machine
from dispatch_flops.integrations.step_watch import ConfigSource, StepWatch, Watching

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


class FlopsCallback(Watching, Callback):  # type: ignore[misc]
    """Profiles one optimizer step, all its batches as one, and prints and keeps the profile.

    profile_step: the step to profile, the first of this run being 1; None for the config's.
    config: a FlopsProfilerConfig, the ``flops_profiler`` section of a DeepSpeed configuration
        as a dict, or the path of such a JSON file.
    machine: whose peaks MFU and HFU are of; None for the device's own, where they are known.

    A batch after which ``trainer.global_step`` has risen ends a step. MFU and HFU are of the
    time of the next step, which runs without the profiler. Validation between the batches of the
    profiled step is counted with it.
    """

    def __init__(
        self,
        profile_step: int | None = None,
        config: ConfigSource | None = None,
        machine: Machine | None = None,
    ) -> None:
        super().__init__()
        self._watch = StepWatch(profile_step, config, machine)
        self._samples: int | None = 0
        self._global_step: int | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        """A step begins with the first batch after the last step."""
        if self._global_step is None:
            self._global_step = trainer.global_step
            self._samples = 0
            self._watch.begin(pl_module)
        rows = _rows(batch)
        self._samples = None if rows is None or self._samples is None else self._samples + rows

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """A step is over if the optimizer has stepped."""
        if trainer.global_step == self._global_step:
            return
        self._global_step = None
        self._watch.end(
            silent=not trainer.is_global_zero,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            batch_size=self._samples,
        )

    def on_train_end(self, *_: Any) -> None:
        """Print the profile, if no step came after it."""
        self._global_step = None
        self._watch.finish()

    def on_exception(self, *_: Any) -> None:
        """Leave nothing running."""
        self._global_step = None
        self._watch.close()


def _rows(batch: Any) -> int | None:
    """Length of the first tensor in a nested batch along its first dimension; None without one."""
    if hasattr(batch, "shape"):
        return int(batch.shape[0]) if len(batch.shape) else None
    if hasattr(batch, "values"):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((rows for rows in map(_rows, batch) if rows is not None), None)
    return None
