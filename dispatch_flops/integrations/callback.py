"""Profile one optimizer step of another framework's training loop, by its callbacks."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from dispatch_flops.analysis.efficiency import hfu, machine_of, mfu
from dispatch_flops.analysis.machines import Machine, check_machine
from dispatch_flops.counting.meter_totals import MeterTotals
from dispatch_flops.distributed.gathering import gather_if_several
from dispatch_flops.operators.program_lines import stacklevel_of_program
from dispatch_flops.profile import Profile
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profilers.config import ConfigSource, FlopsProfilerConfig
from dispatch_flops.profilers.meter import FlopMeter
from dispatch_flops.profilers.training import ProfiledStep
from dispatch_flops.renderers import View, cluster_table, overview
from dispatch_flops.renderers.terminal import terminal_view
from dispatch_flops.timing.devices import CPU, Devices, Now, checked_clock
from dispatch_flops.timing.passes import ITERATION_METHOD


class StepCallback(ProfiledStep):
    """Base of callbacks that profile one optimizer step and time the next one of its size.

    The next step of as many micro-batches and samples runs without the profiler. Its duration is
    the profile's ``timing.iteration_s``, which MFU and HFU are based on; steps of another size,
    such as the last one of an epoch, are skipped. Then the profile is printed, as
    ``renderers.overview`` shows it; without such a step, ``finish`` prints it.

    In a program of several ranks, every rank profiles the step. Rank 0 then has the profiles of all
    as ``cluster``, and prints them merged below its own.

    profile_step: the optimizer step to profile; the first one of a run is 1. None (the default)
        takes it from ``config``.
    config: see ``FlopsProfilerConfig.load``; None (the default) for its defaults. Profiling is
        enabled unless the configuration says otherwise, or is given without ``profile_step``.
        ``module_depth``, ``detailed`` and ``output_file`` apply to the printout.
    machine: machine whose peaks MFU and HFU refer to; None (the default) for the device's own
        peaks, if they are known.
    every_step: follow every step with a ``FlopMeter``, as ``meter``, and log ``mfu``,
        ``flops_per_s`` and ``tokens_per_s`` of the last 100 steps and ``model_flops`` of the run,
        summed over ranks (default False). No step is then profiled, unless ``profile_step`` or
        ``config`` is given.
    now: clock that returns seconds (default ``time.perf_counter``).

    Raises ConfigError for a wrong step, configuration, machine or clock.
    """

    def __init__(
        self,
        profile_step: int | None = None,
        config: ConfigSource | None = None,
        machine: Machine | None = None,
        *,
        every_step: bool = False,
        now: Now = time.perf_counter,
    ) -> None:
        asked = profile_step is not None or (config is None and not every_step)
        loaded = FlopsProfilerConfig.load({} if config is None else config, enabled=asked)
        if profile_step is not None:
            section = {**dataclasses.asdict(loaded), "profile_step": profile_step}
            loaded = FlopsProfilerConfig.load(section)
        super().__init__(loaded)
        check_machine(machine)
        self.machine = machine
        self.meter: FlopMeter | None = None  # of the current run, from its first step on
        self._resumed: Mapping[str, Any] = {}  # state of the meter of the run that is resumed
        self._tokens = 0  # of the step that runs
        self._every_step = every_step
        self._metered: AbstractContextManager[None] | None = None  # the step that runs now
        self._now = checked_clock(now)
        self._devices = CPU
        self._begun_s: float | None = None  # when the step that is timed began
        self._iteration_s: float | None = None
        self._size: tuple[int, int | None] = (0, None)  # of the profiled step
        self._silent = False
        self._printed = False
        self._cluster: ClusterProfile | None = None

    @property
    def cluster(self) -> ClusterProfile | None:
        """The profiled step on all ranks; None on other ranks than 0, and where there is one rank.

        It is there when the profiled step has ended, and does not have ``timing.iteration_s``.
        """
        return self._cluster

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of the step; None if the peak or the duration is unknown.

        ``analysis.headline`` tells whether it is a lower bound, as the printout does by ">=".
        """
        return mfu(self.profile, self._machine_known(), self._iteration_s)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation: with recomputation and optimizer; None as for ``mfu``."""
        return hfu(self.profile, self._machine_known(), self._iteration_s)

    def _why_none(self) -> str:
        if self._every_step and not self.config.enabled:
            return (
                "every_step=True profiles no step: the figures of all are those of `meter`, such "
                "as `meter.window.mfu`; to profile one as well, pass profile_step"
            )
        return super()._why_none()

    def reset(self) -> None:
        """Begin a training run: drop an unfinished step, and forget the run before."""
        self.close()
        self.steps_done = 0
        self._profile = self._iteration_s = self._cluster = self.meter = None
        self._ended = self._printed = False

    def begin(self, model: nn.Module, inputs: tuple[Any, ...] | None = None) -> None:
        """Begin an optimizer step.

        inputs: as of ``FlopMeter.step``.
        """
        self._batches.clear()
        if self._is_next():
            self._devices = Devices.of(model.modules())
            self._start(model)
        elif self._profile is not None and not self._printed:
            self._devices.synchronize()
            self._begun_s = self._now()
        if self._every_step:
            self._tokens = 0
            self.meter = self.meter or self._make_meter(model)
            self.meter.is_timed = self._profiler is None
            self._metered = self.meter.step(inputs=inputs)
            self._metered.__enter__()

    def _make_meter(self, model: nn.Module) -> FlopMeter:
        meter = FlopMeter(model, machine=self.machine, now=self._now)
        if self._resumed:
            meter.load_state_dict(self._resumed)
            self._resumed = {}
        return meter

    def saved_totals(self) -> dict[str, Any]:
        """Return the state of the meter, for a checkpoint; ``{}`` without ``every_step``."""
        return dict(self._resumed) if self.meter is None else self.meter.state_dict()

    def resume(self, totals: Mapping[str, Any]) -> None:
        """Continue totals with the next run.

        totals: what ``saved_totals`` returned; ``{}`` to begin with 0. Raises ConfigError for other
            data.
        """
        if totals:
            MeterTotals(window=1).load_state_dict(totals)  # raises before training begins
        self._resumed = totals

    def figures(self) -> dict[str, float]:
        """Return what ``every_step`` logs, of all ranks; every rank must call this.

        A figure that is not known is omitted, such as ``mfu`` where a peak is not known.
        """
        if self.meter is None:
            return {}
        window, run = self.meter.window.over_ranks(), self.meter.run.over_ranks()
        found = {
            "mfu": window.mfu,
            "model_flops": run.model_flops,
            "flops_per_s": window.flops_per_s,
            "tokens_per_s": window.tokens_per_s,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def is_active(self) -> bool:
        """True during a step that is profiled or timed."""
        return self._profiler is not None or self._begun_s is not None

    def add_batch(self, batch: Any, main_input: str = "input_ids") -> None:
        """Note the numbers of samples and tokens in a micro-batch of the step.

        main_input: the name of the input that consists of token ids.
        """
        self._batches.append(rows_of(batch))
        self._tokens += tokens_of(batch, main_input) or 0

    def end(self, *, silent: bool = False, **run_facts: Any) -> None:
        """End an optimizer step.

        silent: do not print the profile. run_facts: fields of the profile's ``RunInfo``.
        """
        self.steps_done += 1
        metered, self._metered = self._metered, None
        if metered is not None and self.meter is not None:
            self.meter.note_size(self._batch_size(), self._tokens)
            metered.__exit__(None, None, None)
        size = (len(self._batches), self._batch_size())
        begun_s, self._begun_s = self._begun_s, None
        if self._profiler is not None:
            self._silent, self._size = silent, size
            self._keep(self._profiler, **run_facts)
            self._cluster = gather_if_several(self.profile)
        elif self._profile is not None and begun_s is not None and size == self._size:
            self._devices.synchronize()
            seconds = self._now() - begun_s
            if seconds >= 0:  # else the clock was set back
                self._add_iteration(self._profile, seconds)
                self._print()

    def finish(self) -> None:
        """End the training run: print the profile if it is not printed yet.

        Warns of a step to be profiled that the run did not reach.
        """
        self.close()
        was_over, self._ended = self._ended, True
        if self._profile is None and self.config.enabled and not was_over:
            warnings.warn(self._why_none(), stacklevel=stacklevel_of_program())
        self._print()

    def close(self) -> None:
        """Drop an unfinished step, as after an exception in it."""
        self._begun_s = self._metered = None
        if self.meter is not None:
            self.meter.stop()
        self._drop()

    def _print(self) -> None:
        if self._profile is None or self._printed:
            return
        self._printed = True
        if not self._silent:
            self._write()

    def _add_iteration(self, profile: Profile, seconds: float) -> None:
        step = self.steps_done
        note = f"the time of the whole iteration is that of step {step}, without the profiler"
        self._iteration_s = seconds
        self._profile = dataclasses.replace(
            profile,
            timing=dataclasses.replace(
                profile.timing,
                iteration_s=seconds,
                iteration_step=step,
                method=(profile.timing.method or "").replace(f"; {ITERATION_METHOD}", "") or None,
            ),
            notes=(*profile.notes, note),
        )

    def _machine_known(self) -> Machine | None:
        return machine_of(self.profile, self.machine)

    def _text(self) -> str:
        depth = None if self.config.module_depth < 0 else self.config.module_depth
        shown = {} if self.config.output_file else terminal_view()
        view = View(
            depth=depth if self.config.detailed else 0, machine=self._machine_known(), **shown
        )
        return with_cluster(overview.render(self.profile, view), self._cluster)


def with_cluster(text: str, cluster: ClusterProfile | None) -> str:
    """Return the printout of a profile, and below it that of all ranks, where there are others."""
    if cluster is None:
        return text
    return f"{text}\n\n{cluster_table.render(cluster, View(depth=1))}"


def rows_of(batch: Any) -> int | None:
    """Return the length of the first tensor in a nested batch, in dimension 0; None without one."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((rows for rows in map(rows_of, batch) if rows is not None), None)
    return None


def tokens_of(batch: Any, name: str) -> int | None:
    """Return the number of token ids in a nested batch; None without an integer tensor ``name``."""
    if isinstance(batch, Mapping):
        ids = batch.get(name)
        if isinstance(ids, torch.Tensor):
            return None if ids.is_floating_point() else ids.numel()
        batch = tuple(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((n for n in (tokens_of(one, name) for one in batch) if n is not None), None)
    return None
