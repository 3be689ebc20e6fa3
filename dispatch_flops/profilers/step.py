"""What the loops have in common, one's own and other people's: one step of many is profiled."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from dispatch_flops.errors import NotProfiledError
from dispatch_flops.profile import Profile
from dispatch_flops.profilers.config import FlopsProfilerConfig
from dispatch_flops.profilers.flops_profiler import FlopsProfiler
from dispatch_flops.renderers import deepspeed


class ProfiledStep:
    """One optimizer step of a loop: which one, how many are done, and its profile."""

    def __init__(self, config: FlopsProfilerConfig) -> None:
        self.config = config
        self.steps_done = 0
        self._ended = False
        self._batches: list[int | None] = []  # samples of each micro-batch
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
            return f"step {step} never came: training ended after {done}"
        return f"step {step} is not over yet; {done} are done"

    def _is_next(self) -> bool:
        return self.config.enabled and self.steps_done + 1 == self.config.profile_step

    def _batch_size(self) -> int | None:
        """Samples of the step; None if those of a micro-batch are not known."""
        known = [samples for samples in self._batches if samples is not None]
        return sum(known) or None if len(known) == len(self._batches) else None

    def _new_profiler(self, model: nn.Module) -> FlopsProfiler:
        return FlopsProfiler(model, recompute_fwd_factor=self.config.recompute_fwd_factor)

    def _keep(self, profiler: FlopsProfiler, *notes: str, **scope: Any) -> None:
        """The step is over. What is known of it is kept also where the end raises a warning."""
        try:
            profiler.end_profile()
        finally:
            profiler.amend_scope(
                **scope, step=self.config.profile_step, batch_size=self._batch_size()
            )
            profile = profiler.profile
            self._profile = dataclasses.replace(profile, notes=(*profile.notes, *notes))

    def _text(self) -> str:
        return deepspeed.render(self.profile, deepspeed.make_view(**self.config.print_options()))
