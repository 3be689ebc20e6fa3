"""Lightning callback that profiles one optimizer step.

Works with the packages ``lightning`` and ``pytorch_lightning``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from dispatch_flops.integrations.callback import StepCallback

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

__all__ = ["FlopsCallback"]


class FlopsCallback(StepCallback, Callback):  # type: ignore[misc]
    """Lightning callback that profiles one optimizer step, with all its batches.

        from dispatch_flops.integrations.lightning import FlopsCallback

        flops = FlopsCallback(profile_step=5)
        lightning.Trainer(callbacks=[flops]).fit(model, data)
        flops.profile, flops.mfu

    profile_step, config, machine, every_step: see ``StepCallback``. With ``every_step`` the figures
    go to the trainer's loggers by the module's ``log``. They are renewed where the trainer writes
    to its loggers, every ``trainer.log_every_n_steps`` steps. Tokens are the elements of the
    batch's ``"input_ids"``. Checkpoints hold the totals, and a run that is resumed continues them.

    The step ends with the batch after which ``trainer.global_step`` has risen. Validation between
    its batches is counted with it. The profile is printed by the process of rank 0, and is kept
    as ``profile``. Every ``fit()`` is profiled anew.

    Raises ConfigError for a wrong step, configuration or machine.
    """

    _global_step: int | None = None  # when the current step began
    _figures: Mapping[str, float] = MappingProxyType({})  # of ``every_step``, as logged last
    _are_old = False  # a step has ended since

    def close(self) -> None:
        """Drop an unfinished step."""
        self._global_step = None
        super().close()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the totals of a checkpoint that was tested or validated, before one is resumed.

        trainer, pl_module, stage: what Lightning passes; the stage "fit" is the one that trains.
        """
        if stage == "fit":
            self.resume({})

    def on_train_start(self, *_: Any) -> None:
        """Begin a training run."""
        self.reset()
        self._figures, self._are_old = {}, False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        """Begin a step with the first batch after the step before."""
        if self._global_step is None:
            self._global_step = trainer.global_step
            self.begin(pl_module, (batch,))  # Lightning calls the module's ``training_step``
        elif self.meter is not None:
            self.meter.note_batch(batch)
        self.add_batch(batch)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        """Tell the meter what starts, where a validation comes between the batches of a step."""
        if self.meter is not None:
            self.meter.note_batch(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """End the step if the optimizer has stepped."""
        has_stepped = trainer.global_step != self._global_step
        if has_stepped:
            self._global_step = None
            self.end(
                silent=not trainer.is_global_zero,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
            )
            self._are_old = True
        # Of manual optimization, the trainer also logs batches that do not step.
        if self._every_step and (has_stepped or not pl_module.automatic_optimization):
            if self._are_old and (not self._figures or _is_logged(trainer)):
                self._figures, self._are_old = self.figures(), False
            for name, value in self._figures.items():
                # Of a number, Lightning would make a float32, which has 7 digits.
                pl_module.log(name, torch.tensor(float(value), dtype=torch.float64))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this callback."""
        return self.saved_totals()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the totals of a checkpoint.

        state_dict: what ``state_dict`` returned.
        """
        self.resume(state_dict)

    def on_train_end(self, *_: Any) -> None:
        """Print the profile if it is not printed yet."""
        self.finish()

    def on_exception(self, *_: Any) -> None:
        """Drop an unfinished step."""
        self.close()


def _is_logged(trainer: Any) -> bool:
    """Return True if the trainer writes to its loggers what this batch has logged.

    It counts batches that stepped, and not ``trainer.global_step``, which several optimizers raise.
    """
    connector = getattr(trainer, "_logger_connector", None)  # as Lightning's own callbacks ask it
    return bool(getattr(connector, "should_update_logs", True))
