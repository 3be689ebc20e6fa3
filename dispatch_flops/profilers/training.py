"""One step of a plain training loop, profiled from forward to the optimizer's step."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, SupportsIndex

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dispatch_flops.errors import AlreadyActiveError, ConfigError, TargetError
from dispatch_flops.profile import Profile
from dispatch_flops.profilers.config import FlopsProfilerConfig
from dispatch_flops.profilers.flops_profiler import report
from dispatch_flops.profilers.step import ProfiledStep

# What a GradScaler asks of the gradients before it lets the optimizer step, or does not.
_UNSCALED = "aten._amp_foreach_non_finite_check_and_unscale_.default"


class StepProfiler(ProfiledStep):
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
    ends when the optimizer has stepped, or one that it holds, as SAM holds another; its
    micro-batches are profiled as one, and what runs between the blocks is not. At its end the
    profile is printed as DeepSpeed's engine prints it, and kept as ``profile``. What a GradScaler
    skips is no step: the next one is profiled, if gradients are unscaled inside the block. Hooks
    on these optimizers say when they step, and are gone then; ``close`` takes them away where no
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
        super().__init__(FlopsProfilerConfig.load(config))
        self._profiler = self._new_profiler(model)
        self._skipped = 0
        self._inside = self._stepped = self._unscaled = self._warned = False
        self._optimizer = optimizer
        self._hooks: list[RemovableHandle] = []  # on optimizers, while a step is under way

    @contextmanager
    def step(self, samples: SupportsIndex | None = None) -> Iterator[None]:
        """One step, or one micro-batch of it. samples: how many this block works on.

        Raises ConfigError if that is no count, and AlreadyActiveError inside another block.
        """
        count = _count(samples)
        if self._inside:
            raise AlreadyActiveError(
                "a step() block of this StepProfiler is active already: leave it first; "
                "micro-batches have blocks one after the other"
            )
        self._inside = True
        try:
            self._hook()
            if self._is_next():
                self._begin(count)
            yield
        except BaseException:
            self.steps_done += self._stepped
            self.close()
            raise
        finally:
            self._inside = False
            self._profiler.pause_profile()  # what runs between micro-batches is not of the step
        if self._stepped:
            self._end()
        elif self._profiler.started:
            self._go_on()

    def close(self) -> None:
        """Drop a step that is under way, as when the loop ends in its midst."""
        self._unhook()
        self._profiler.drop_profile()

    def _begin(self, samples: int | None) -> None:
        if self._unscaled:  # and nothing stepped since: a GradScaler has skipped that step
            self._unscaled = False
            self._skipped += 1
            self._profiler.drop_profile()
        if self._profiler.started:
            self._profiler.resume_profile()
        else:
            self._batches.clear()
            self._profiler.start_profile()
        self._batches.append(samples)

    def _go_on(self) -> None:
        """The block is over, the step is not."""
        profile = self._profiler.profile
        others = _optimizers_in(profile)
        self._unscaled = _UNSCALED in profile.by_operator() and not others
        if others and not self._warned:
            self._warned = True
            warnings.warn(
                f"{', '.join(others)} stepped in step {self.config.profile_step}, and the "
                f"{type(self._optimizer).__name__} that StepProfiler was given did not: it goes on "
                "until that one steps",
                stacklevel=4,
            )

    def _end(self, *notes: str) -> None:
        """The optimizer has stepped, and so the step is over."""
        self._unhook()
        self.steps_done += 1
        if self._profiler.started:
            self._finish(*notes)

    def _finish(self, *notes: str) -> None:
        if self._skipped:
            notes = (*notes, f"before it, steps skipped by the GradScaler: {self._skipped}")
        try:
            self._keep(self._profiler, *notes, world_size=_world_size())
        finally:
            report(self._text(), self.config.output_file)

    def _hook(self) -> None:
        if not self._hooks:
            self._hooks = [one.register_step_post_hook(self._note_step) for one in self._steppers()]

    def _unhook(self) -> None:
        self._stepped = self._unscaled = False
        while self._hooks:
            self._hooks.pop().remove()

    def _steppers(self) -> list[Optimizer]:
        """The optimizer and those that it holds; accelerate's holds one, and is none itself."""
        found = [self._optimizer]
        for optimizer in found:  # which grows
            held = (value for value in vars(optimizer).values() if isinstance(value, Optimizer))
            found += [other for other in held if other not in found]
        return [one for one in found if "_optimizer_step_post_hooks" in vars(one)]

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = True
        if not self._inside:
            self._end("the optimizer stepped outside the step() block: its work is not counted")


def _optimizers_in(profile: Profile) -> list[str]:
    """Classes of the optimizers that stepped: what else is done then has no name of one word."""
    parts = [part for part in profile.outside.children if part.total("optimizer").flops]
    return [part.name for part in parts if part.name.isidentifier()]


def _count(samples: Any) -> int | None:
    """How many samples that is; ConfigError if it is no count."""
    if samples is None:
        return None
    try:
        count = -1 if isinstance(samples, bool) else operator.index(samples)
    except TypeError:
        count = -1
    if count < 0:
        raise ConfigError(f"samples={samples!r}: pass how many samples the block works on")
    return count


def _world_size() -> int:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1
