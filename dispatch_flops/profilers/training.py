"""Profile one optimizer step of a training loop."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, SupportsIndex

from torch import distributed, nn
from torch.optim import Optimizer

from dispatch_flops import _torch
from dispatch_flops.counting.meter_totals import sample_count
from dispatch_flops.errors import AlreadyActiveError, NotProfiledError, TargetError
from dispatch_flops.profile import Profile
from dispatch_flops.profile.holders import ProfileHolder
from dispatch_flops.profilers.config import ConfigSource, FlopsProfilerConfig
from dispatch_flops.profilers.flops_profiler import FlopsProfiler, followed_by, write_or_warn
from dispatch_flops.profilers.inputs import check_model
from dispatch_flops.renderers import deepspeed

# A GradScaler has no hook that tells of a step that it skips. The only trace is that gradients
# were unscaled by this operator, and then no optimizer stepped.
# Source: torch/amp/grad_scaler.py, GradScaler._unscale_grads_.
_UNSCALE: Final = "aten._amp_foreach_non_finite_check_and_unscale_.default"


class ProfiledStep(ProfileHolder):
    """One optimizer step of a loop: which one, how many are done, and its profile.

    Base of ``StepProfiler`` and of the callbacks for other frameworks' loops.
    """

    def __init__(self, config: FlopsProfilerConfig) -> None:
        self.config = config
        self.steps_done: int = 0
        self._ended = False  # the loop is over
        self._batches: list[int | None] = []  # samples of each micro-batch
        self._profiler: FlopsProfiler | None = None  # None outside the step to profile
        self._profile: Profile | None = None

    @property
    def profile(self) -> Profile:
        """The profile of the step; raises NotProfiledError saying why there is none."""
        if self._profile is None:
            raise NotProfiledError(self._why_none())
        return self._profile

    def _why_none(self) -> str:
        step, done = self.config.profile_step, self.steps_done
        if not self.config.enabled:
            return "nothing is profiled: `enabled` is false in the configuration; set it to true"
        if done >= step:
            return f"step {step} was not profiled to its end: an exception or close() ended it"
        if self._ended:
            return f"step {step} was never reached: training ended after {done}"
        return f"step {step} is not over yet; {done} are done"

    def _is_next(self) -> bool:
        return self.config.enabled and self.steps_done + 1 == self.config.profile_step

    def _batch_size(self) -> int | None:
        """Return the samples of the step; None if those of a micro-batch are not known."""
        known = [samples for samples in self._batches if samples is not None]
        return sum(known) or None if len(known) == len(self._batches) else None

    def _start(self, model: nn.Module) -> None:
        profiler = FlopsProfiler(model, recompute_fwd_factor=self.config.recompute_fwd_factor)
        profiler.start_profile()
        self._profiler = profiler

    def _keep(self, profiler: FlopsProfiler, *notes: str, **run_facts: Any) -> None:
        """End the step and keep its profile, even if ending it raises a warning as an error."""
        self._profiler = None

        def keep() -> None:
            profiler.add_run_info(
                **run_facts, step=self.config.profile_step, batch_size=self._batch_size()
            )
            profile = profiler.profile
            self._profile = dataclasses.replace(profile, notes=(*profile.notes, *notes))

        with followed_by(keep):
            profiler.end_profile()

    def _drop(self) -> None:
        """Stop profiling the step, and forget it."""
        if self._profiler is not None:
            self._profiler.drop_profile()
            self._profiler = None

    def _text(self) -> str:
        return deepspeed.render(self.profile, deepspeed.make_view(**self.config.print_options()))

    def _write(self) -> None:
        write_or_warn(self._text(), self.config.output_file)


class StepProfiler(ProfiledStep):
    """Profiler of one optimizer step of a loop; the other steps run untouched.

        model = torch.nn.Linear(3, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        profiler = StepProfiler(model, optimizer, {"enabled": True, "profile_step": 2})
        for x in torch.ones(4, 2, 3):
            with profiler.step(samples=len(x)):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        profiler.profile.root.total("forward").macs  # 2*3*5

    model: the module to profile.
    optimizer: the optimizer that ends a step, itself or through an optimizer that it holds (such
        as SAM's base optimizer).
    config: see ``FlopsProfilerConfig.load``; nothing is profiled unless it says ``enabled``.

    Each micro-batch of a step may have a ``step()`` block of its own. All blocks up to the
    optimizer's step are profiled as one; what runs between them is not profiled. After the step,
    the profile is printed as DeepSpeed's engine prints it, and is kept as ``profile``.

    A step that a GradScaler skips is not counted as a step: the next one is profiled. This needs
    gradients to be unscaled inside the block.

    Raises TargetError if ``model`` or ``optimizer`` is something else, and ConfigError for a wrong
    configuration.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: ConfigSource) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TargetError(
                f"optimizer is of type {type(optimizer).__name__}; pass a torch.optim.Optimizer"
            )
        super().__init__(FlopsProfilerConfig.load(config))
        check_model(model)
        self._model = model
        self._optimizer = optimizer
        self._skipped = 0
        self._inside = self._stepped = self._unscaled = self._warned = False
        self._hooked: list[Optimizer] = []  # until the step is over

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy gets: the steps done so far, without the one that is not over."""
        outside = dict.fromkeys(("_inside", "_stepped", "_unscaled"), False)
        return vars(self) | outside | {"_profiler": None, "_hooked": [], "_batches": []}

    @contextmanager
    def step(self, samples: SupportsIndex | None = None) -> Iterator[None]:
        """Mark one step, or one micro-batch of it.

        samples: number of samples in this block, for the samples per second of the printout;
            None (the default) if it is not known.

        Raises ConfigError if ``samples`` is not a count, and AlreadyActiveError inside another
        block.
        """
        count = sample_count(samples)
        if self._inside:
            raise AlreadyActiveError(
                "a step() block of this StepProfiler is active already: leave it first; "
                "micro-batches have blocks one after the other"
            )
        self._inside = True
        try:
            try:
                self._hook_optimizers()
                if self._is_next():
                    self._begin_block(count)
                yield
            finally:
                self._inside = False
                if self._profiler is not None:
                    self._profiler.pause_profile()
            if self._stepped:
                self._end_step()
            elif self._profiler is not None:
                self._note_who_else_stepped(self._profiler.profile)
        except BaseException:
            self.steps_done += self._stepped
            self.close()
            raise

    def close(self) -> None:
        """Drop an unfinished step and remove the hooks on the optimizers.

        Call this if the loop ends between two micro-batches of a step.
        """
        self._unhook_optimizers()
        self._drop()

    def _begin_block(self, samples: int | None) -> None:
        if self._unscaled:  # and no step since: the GradScaler skipped it
            self._unscaled = False
            self._skipped += 1
            self._drop()
        if self._profiler is None:
            self._batches.clear()
            self._start(self._model)
        else:
            self._profiler.resume_profile()
        self._batches.append(samples)

    def _note_who_else_stepped(self, profile: Profile) -> None:
        """After a block without a step of the optimizer: note a GradScaler or other optimizers."""
        others = _optimizers_in(profile)
        self._unscaled = _UNSCALE in profile.by_operator() and not others
        if others and not self._warned:
            self._warned = True
            warnings.warn(
                f"{', '.join(others)} stepped in step {self.config.profile_step}, but the "
                f"{type(self._optimizer).__name__} that StepProfiler was given did not: the step "
                "continues until that one steps",
                stacklevel=4,
            )

    def _end_step(self, *notes: str) -> None:
        self._unhook_optimizers()
        self.steps_done += 1
        if self._profiler is None:
            return
        if self._skipped:
            notes = (*notes, f"steps skipped by the GradScaler before this one: {self._skipped}")
        with followed_by(self._write):
            self._keep(self._profiler, *notes, world_size=_world_size())

    def _hook_optimizers(self) -> None:
        if not self._hooked:
            self._hooked = with_inner_optimizers(self._optimizer)
            for optimizer in self._hooked:
                optimizer.register_step_post_hook(self._note_step)

    def _unhook_optimizers(self) -> None:
        self._stepped = self._unscaled = False
        for optimizer in self._hooked:
            _, after = _torch.step_hooks(optimizer)
            for key in [key for key, hook in after.items() if hook == self._note_step]:
                after.pop(key, None)
        self._hooked = []

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = True
        if not self._inside:
            self._end_step("the optimizer stepped outside the step() block: it is not counted")


def with_inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer and those that it holds, as far as they can have hooks.

    accelerate's optimizer cannot: it is an Optimizer without an Optimizer's own state.
    """
    found = [optimizer]
    for outer in found:  # grows inside the loop
        held = (value for value in vars(outer).values() if isinstance(value, Optimizer))
        found += [inner for inner in held if inner not in found]
    return [one for one in found if "_optimizer_step_post_hooks" in vars(one)]


def _optimizers_in(profile: Profile) -> list[str]:
    """Return the class names of the optimizers that stepped.

    Other parts of the optimizer phase, such as "gradient clipping", are not named by identifiers.
    """
    parts = [part for part in profile.outside.children if part.total("optimizer").flops]
    names = dict.fromkeys(part.class_name for part in parts)
    return [name for name in names if name.isidentifier()]


def _world_size() -> int:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1
