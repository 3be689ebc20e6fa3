"""One step of a plain training loop, profiled from forward to the optimizer's step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dispatch_flops.config import FlopsProfilerConfig
from dispatch_flops.errors import ConfigError, NotProfiledError, TargetError
from dispatch_flops.profiler import FlopsProfiler, report
from dispatch_flops.renderers import deepspeed
from dispatch_flops.tree import Profile

# What a GradScaler asks of the gradients before it lets the optimizer step, or does not.
_UNSCALED = "aten._amp_foreach_non_finite_check_and_unscale_.default"


class StepProfiler:
    """Profiles one optimizer step of a loop; the other steps run untouched.

        profiler = StepProfiler(model, optimizer, {"enabled": True, "profile_step": 5})
        for x, y in loader:
            with profiler.step(samples=len(x)):
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    config: a FlopsProfilerConfig, the ``flops_profiler`` section of a DeepSpeed configuration
        (or the whole of it) as a dict, or the path of such a JSON file.

    With gradient accumulation each micro-batch may be a ``step()`` block of its own: a step
    ends when the optimizer has stepped, and its micro-batches are profiled as one; what runs
    between the blocks is not. At its end the profile is printed as DeepSpeed's engine prints
    it, and kept as ``profile``. What a GradScaler skips is no step: the next one is profiled. A
    hook on the optimizer says when it steps, and is gone then; ``close`` takes it away where no
    step follows.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: FlopsProfilerConfig | Mapping[str, Any] | str | Path,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TargetError(
                f"optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer"
            )
        self.config = FlopsProfilerConfig.load(config)
        self.steps_done = 0
        self._profiler = FlopsProfiler(model, recompute_fwd_factor=self.config.recompute_fwd_factor)
        self._samples = 0
        self._skipped = 0
        self._inside = self._stepped = False
        self._profile: Profile | None = None
        self._optimizer = optimizer
        self._hook: RemovableHandle | None = None  # on the optimizer, while a step is under way

    @property
    def profile(self) -> Profile:
        """The profile of the step; raises NotProfiledError before that step is over."""
        if self._profile is None:
            raise NotProfiledError(
                f"step {self.config.profile_step} is not over yet; {self.steps_done} are done"
            )
        return self._profile

    @contextmanager
    def step(self, samples: int | None = None) -> Iterator[None]:
        """One step, or one micro-batch of it. samples: how many this block works on."""
        if samples is not None and samples < 0:
            raise ConfigError(f"samples={samples!r}: pass how many samples the block works on")
        due = self.config.enabled and self.steps_done + 1 == self.config.profile_step
        self._inside = True
        if self._hook is None:
            self._hook = self._stepping().register_step_post_hook(self._note_step)
        try:
            if due:
                self._begin()
                self._samples += samples or 0
            yield
        except BaseException:
            self._profiler.end_profile()
            self._unhook()
            raise
        finally:
            self._inside = False
            self._profiler.pause_profile()  # what runs between micro-batches is not of the step
        if self._stepped:
            self._end()
        elif due and _UNSCALED in self._profiler.profile.by_operator():
            self._skipped += 1
            self._profiler.end_profile()

    def close(self) -> None:
        """Drop a step that is under way, as when the loop ends in its midst."""
        self._profiler.end_profile()
        self._unhook()

    def _stepping(self) -> Optimizer:
        """The optimizer that steps: accelerate's holds it."""
        held = getattr(self._optimizer, "optimizer", None)
        return held if isinstance(held, Optimizer) else self._optimizer

    def _begin(self) -> None:
        if self._profiler.started:
            self._profiler.resume_profile()
        else:
            self._samples = 0
            self._profiler.start_profile()

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = True
        if not self._inside:
            self._end("the optimizer stepped outside the step() block: its work is not counted")

    def _end(self, *notes: str) -> None:
        """The optimizer has stepped, and so the step is over."""
        self._unhook()
        self.steps_done += 1
        if self._profiler.started:
            self._finish(notes)

    def _unhook(self) -> None:
        self._stepped = False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _finish(self, notes: Sequence[str]) -> None:
        config = self.config
        if self._skipped:
            notes = (*notes, f"before it, steps skipped by the GradScaler: {self._skipped}")
        self._profiler.stop_profile()
        self._profiler.amend_scope(
            world_size=_world_size(), batch_size=self._samples or None, step=config.profile_step
        )
        profile = self._profiler.profile
        self._profile = dataclasses.replace(profile, notes=(*profile.notes, *notes))
        text = deepspeed.render(self._profile, **config.print_options())
        report(text, config.output_file)
        self._profiler.end_profile()


def _world_size() -> int:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1
