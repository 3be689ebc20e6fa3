"""One step of a plain training loop, profiled from forward to the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dispatch_flops.config import FlopsProfilerConfig
from dispatch_flops.errors import NotProfiledError, TargetError
from dispatch_flops.profiler import FlopsProfiler
from dispatch_flops.tree import Profile


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
    ends when the optimizer has stepped, and its micro-batches are profiled as one. At its end
    the profile is printed as DeepSpeed's engine prints it, and kept as ``profile``.
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
        self._optimizer = optimizer
        self._profiler = FlopsProfiler(model, recompute_fwd_factor=self.config.recompute_fwd_factor)
        self._samples = 0
        self._stepped = False
        self._profile: Profile | None = None

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
        self._stepped = False
        hook = self._optimizer.register_step_post_hook(self._note_step)
        due = self.config.enabled and self.steps_done + 1 == self.config.profile_step
        try:
            if due and not self._profiler.started:
                self._samples = 0
                self._profiler.start_profile()
            self._samples += samples or 0
            yield
        except BaseException:
            self._profiler.end_profile()
            raise
        finally:
            hook.remove()
        if self._stepped:
            self.steps_done += 1
            if due:
                self._finish()

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = True

    def _finish(self) -> None:
        config = self.config
        self._profiler.stop_profile()
        self._profiler.amend_scope(
            world_size=_world_size(), batch_size=self._samples or None, step=config.profile_step
        )
        self._profile = self._profiler.profile
        self._profiler.print_model_profile(
            profile_step=config.profile_step,
            module_depth=config.module_depth,
            top_modules=config.top_modules,
            detailed=config.detailed,
            output_file=config.output_file,
        )
        self._profiler.end_profile()


def _world_size() -> int:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1
