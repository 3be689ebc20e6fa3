"""One optimizer step of a training loop that somebody else runs and reports on by callbacks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dispatch_flops.config import FlopsProfilerConfig
from dispatch_flops.devices import CPU, Devices, Now
from dispatch_flops.efficiency import hfu, mfu
from dispatch_flops.errors import NotProfiledError
from dispatch_flops.hardware import Machine
from dispatch_flops.profiler import FlopsProfiler, report
from dispatch_flops.renderers import deepspeed
from dispatch_flops.renderers.headline import ABOVE_PEAK, machine_of
from dispatch_flops.tree import Profile
from dispatch_flops.units import fraction_text

ConfigSource = FlopsProfilerConfig | Mapping[str, Any] | str | Path


class StepWatch:
    """Profiles one optimizer step, and takes the time of the step after it.

    That next step runs as it always does, without the profiler: its time is the profile's
    ``timing.iteration_s``, which utilisations are of. Then the profile is printed, or, if there
    is no next step, by ``finish``.

    profile_step: the step to profile, the first of this run being 1; None for the config's.
    config: what is printed and where to, as StepProfiler takes it; None for the defaults.
    machine: whose peaks utilisations are of; None for the device's own, where they are known.
    """

    def __init__(
        self,
        profile_step: int | None = None,
        config: ConfigSource | None = None,
        machine: Machine | None = None,
        *,
        now: Now = time.perf_counter,
    ) -> None:
        loaded = FlopsProfilerConfig.load({"enabled": True} if config is None else config)
        if profile_step is not None:
            section = {**dataclasses.asdict(loaded), "profile_step": profile_step}
            loaded = FlopsProfilerConfig.load(section)
        self.config = loaded
        self.machine = machine
        self.steps_done = 0
        self._now = now
        self._devices = CPU
        self._profiler: FlopsProfiler | None = None
        self._profile: Profile | None = None
        self._begun: float | None = None
        self._unprofiled_s: float | None = None
        self._silent = False
        self._reported = False

    @property
    def profile(self) -> Profile:
        """The profile of the step; raises NotProfiledError before that step is over."""
        if self._profile is None:
            raise NotProfiledError(
                f"step {self.config.profile_step} is not over yet; {self.steps_done} are done"
            )
        return self._profile

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of the step; None if the peak or the step's time is unknown."""
        return mfu(self.profile, self._machine_known(), self._unprofiled_s)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation, recomputation and optimizer included; None likewise."""
        return hfu(self.profile, self._machine_known(), self._unprofiled_s)

    def begin(self, model: nn.Module) -> None:
        """An optimizer step begins."""
        if not self.config.enabled or self._reported:
            return
        step = self.steps_done + 1
        if step == self.config.profile_step:
            self._profiler = FlopsProfiler(
                model, recompute_fwd_factor=self.config.recompute_fwd_factor
            )
            self._profiler.start_profile()
            self._devices = Devices.of(model.modules())
        elif self._profile is not None:
            self._devices.synchronize()
            self._begun = self._now()

    def end(self, *, silent: bool = False, **scope: Any) -> None:
        """It is over.

        silent: print nothing. scope: what is known of the run, for its ``Scope``.
        """
        self.steps_done += 1
        if self._profiler is not None:
            self._silent = silent
            self._take(self._profiler, scope)
        elif self._profile is not None and self._begun is not None:
            self._devices.synchronize()
            self._add_iteration(self._profile, self._now() - self._begun)
            self.finish()

    def finish(self) -> None:
        """No step follows: print what was profiled, if that is still to be done."""
        self.close()
        if self._profile is None or self._reported:
            return
        self._reported = True
        if not self._silent:
            report(self._render(self._profile), self.config.output_file)

    def close(self) -> None:
        """Stop at once and drop the step at work, as when training ended in its midst."""
        profiler, self._profiler = self._profiler, None
        self._begun = None
        if profiler is not None:
            profiler.end_profile()

    def _take(self, profiler: FlopsProfiler, scope: Mapping[str, Any]) -> None:
        profiler.stop_profile()
        profiler.amend_scope(**scope, step=self.config.profile_step)
        self._profile = profiler.profile
        self._profiler = None

    def _add_iteration(self, profile: Profile, seconds: float) -> None:
        note = (
            f"iter latency is that of step {self.config.profile_step + 1}, "
            "which ran without the profiler"
        )
        self._unprofiled_s = seconds
        self._profile = dataclasses.replace(
            profile,
            timing=dataclasses.replace(profile.timing, iteration_s=seconds),
            notes=(*profile.notes, note),
        )

    def _machine_known(self) -> Machine | None:
        return machine_of(self.profile, self.machine)

    def _render(self, profile: Profile) -> str:
        text = deepspeed.render(profile, **self.config.print_options())
        machine = self._machine_known()
        if machine is None or self.mfu is None or self.hfu is None:
            return text
        text += f"\nMFU {fraction_text(self.mfu)}, HFU {fraction_text(self.hfu)}"
        if max(self.mfu, self.hfu) > 1:
            text += f" ({ABOVE_PEAK})"
        return f"{text} of {machine.name}'s dense peak ({machine.source})"


class Watching:
    """A callback that has a step watched, and tells what was seen."""

    _watch: StepWatch

    @property
    def profile(self) -> Profile:
        """The profile of the step; raises NotProfiledError before that step is over."""
        return self._watch.profile

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of the step; None if the peak or the step's time is unknown."""
        return self._watch.mfu

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation, recomputation and optimizer included; None likewise."""
        return self._watch.hfu
