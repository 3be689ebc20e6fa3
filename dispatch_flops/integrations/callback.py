"""One optimizer step of a training loop that somebody else runs and reports on by callbacks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dispatch_flops.analysis.efficiency import hfu, machine_of, mfu
from dispatch_flops.analysis.headline import ABOVE_PEAK
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.profile import Profile
from dispatch_flops.profilers.config import FlopsProfilerConfig
from dispatch_flops.profilers.flops_profiler import FlopsProfiler, report
from dispatch_flops.profilers.step import ProfiledStep
from dispatch_flops.timing.devices import CPU, Devices, Now
from dispatch_flops.units import fraction_text

ConfigSource = FlopsProfilerConfig | Mapping[str, Any] | str | Path


class StepWatch(ProfiledStep):
    """Profiles one optimizer step, and takes the time of the next step of its size.

    That one runs as it always does, without the profiler: its time is the profile's
    ``timing.iteration_s``, which utilisations are of. It has as many micro-batches and samples;
    a shorter one, as at an epoch's end, is let go by. Then the profile is printed, or, if no such
    step comes, by ``finish``.

    profile_step: the step to profile, the first of a run being 1; None for the config's.
    config: what is printed and where to, as StepProfiler takes it; None for the defaults. With
        neither, or with a step and a config that does not say, profiling is enabled.
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
        asked = config is None or profile_step is not None
        loaded = FlopsProfilerConfig.load({} if config is None else config, enabled=asked)
        if profile_step is not None:
            section = {**dataclasses.asdict(loaded), "profile_step": profile_step}
            loaded = FlopsProfilerConfig.load(section)
        super().__init__(loaded)
        self.machine = machine
        self._now = now
        self._devices = CPU
        self._profiler: FlopsProfiler | None = None
        self._begun: float | None = None
        self._unprofiled_s: float | None = None
        self._size: tuple[int, int | None] = (0, None)  # of the step that was profiled
        self._silent = False
        self._reported = False

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of the step; None if the peak or the step's time is unknown."""
        return mfu(self.profile, self._machine_known(), self._unprofiled_s)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation, recomputation and optimizer included; None likewise."""
        return hfu(self.profile, self._machine_known(), self._unprofiled_s)

    def reset(self) -> None:
        """A run begins: forget the one before, and stop what it may have left at work."""
        self.close()
        self.steps_done = 0
        self._profile = self._unprofiled_s = None
        self._ended = self._reported = False

    def begin(self, model: nn.Module) -> None:
        """An optimizer step begins."""
        self._batches.clear()
        if self._is_next():
            self._devices = Devices.of(model.modules())
            self._profiler = self._new_profiler(model)
            self._profiler.start_profile()
        elif self._profile is not None and not self._reported:
            self._devices.synchronize()
            self._begun = self._now()

    @property
    def at_work(self) -> bool:
        """True in a step that is profiled or timed."""
        return self._profiler is not None or self._begun is not None

    def add_batch(self, batch: Any) -> None:
        """What a micro-batch of the step works on."""
        self._batches.append(rows_of(batch))

    def end(self, *, silent: bool = False, **scope: Any) -> None:
        """It is over.

        silent: print nothing. scope: what is known of the run, for its ``RunInfo``.
        """
        self.steps_done += 1
        size = (len(self._batches), self._batch_size())
        profiler, self._profiler = self._profiler, None
        begun, self._begun = self._begun, None
        if profiler is not None:
            self._silent, self._size = silent, size
            self._keep(profiler, **scope)
        elif self._profile is not None and begun is not None and size == self._size:
            self._devices.synchronize()
            self._add_iteration(self._profile, self._now() - begun)
            self._print()

    def finish(self) -> None:
        """No step follows: print what was profiled, if that is still to be done."""
        self.close()
        self._ended = True
        self._print()

    def close(self) -> None:
        """Stop at once and drop the step at work, as when training ended in its midst."""
        profiler, self._profiler = self._profiler, None
        self._begun = None
        if profiler is not None:
            profiler.drop_profile()

    def _print(self) -> None:
        if self._profile is None or self._reported:
            return
        self._reported = True
        if not self._silent:
            report(self._text(), self.config.output_file)

    def _add_iteration(self, profile: Profile, seconds: float) -> None:
        note = f"iter latency is that of step {self.steps_done}, which ran without the profiler"
        self._unprofiled_s = seconds
        self._profile = dataclasses.replace(
            profile,
            timing=dataclasses.replace(profile.timing, iteration_s=seconds),
            notes=(*profile.notes, note),
        )

    def _machine_known(self) -> Machine | None:
        return machine_of(self.profile, self.machine)

    def _text(self) -> str:
        text = super()._text()
        machine = self._machine_known()
        if machine is None or self.mfu is None or self.hfu is None:
            return text
        text += f"\nMFU {fraction_text(self.mfu)}, HFU {fraction_text(self.hfu)}"
        if max(self.mfu, self.hfu) > 1:
            text += f" ({ABOVE_PEAK})"
        return f"{text} of {machine.name}'s dense peak ({machine.source})"


def rows_of(batch: Any) -> int | None:
    """Length of the first tensor in a nested batch along its first dimension; None without one."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((rows for rows in map(rows_of, batch) if rows is not None), None)
    return None
