"""DeepSpeed engines: replace the flops profiler that an engine starts, stops and prints."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dispatch_flops.distributed.gathering import check_timeout, gather_if_several
from dispatch_flops.errors import ConfigError
from dispatch_flops.integrations.callback import with_cluster
from dispatch_flops.operators.conventions import Flops
from dispatch_flops.profile import Profile
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profilers.flops_profiler import FlopsProfiler, engine_facts
from dispatch_flops.renderers import View

__all__ = ["attach"]


def attach(engine: Any, *, flops: Flops = "all", timeout_s: float = 300.0) -> EngineProfiler:
    """Make the engine profile with this package; return the profiler, for its ``profile``.

        engine, *_ = deepspeed.initialize(model=model, config=config)
        profiler = attach(engine)

    The engine's own ``flops_profiler`` configuration says which step is profiled and what is
    printed. As with DeepSpeed's profiler, ``profile_step`` is the number of steps before the
    profiled one: 1 is the second step. The profile covers the whole optimizer step: all its
    micro-batches, with measured backward and step.

    In a program of several ranks, every rank calls this and profiles the step. Rank 0 then has the
    profiles of all as ``cluster``, and prints them merged below its own.

    engine: a DeepSpeed engine, but not a pipeline engine: that never tells its profiler that a
        step is over.
    flops: see ``FlopCounterMode``. ``"contractions"`` is nearest to what DeepSpeed counts.
    timeout_s: longest time that ranks wait for each other's profiles, in seconds; see ``gather``.

    Raises ConfigError for anything else, and if the configuration does not enable the profiler.
    """
    name = type(engine).__name__
    enabled = getattr(engine, "flops_profiler_enabled", None)
    if enabled is None:
        raise ConfigError(
            f"{name} is not a DeepSpeed engine; pass what deepspeed.initialize returns first"
        )
    if any(base.__name__ == "PipelineEngine" for base in type(engine).__mro__):
        raise ConfigError(
            f"{name} never tells its flops profiler that a step is over; call its train_batch() "
            "inside a FlopCounterMode block instead"
        )
    if not enabled():
        raise ConfigError(
            "the engine's configuration does not enable its flops profiler; set "
            '{"flops_profiler": {"enabled": true}} in it'
        )
    profiler = EngineProfiler(
        engine.module,
        ds_engine=engine,
        recompute_fwd_factor=engine.flops_profiler_recompute_fwd_factor(),
        flops=flops,
        timeout_s=timeout_s,
    )
    engine.flops_profiler = profiler
    if engine.global_rank != 0 and not engine.autotuning_enabled():
        profiler.follow_engine()
    return profiler


class EngineProfiler(FlopsProfiler):
    """FlopsProfiler whose profile runs from the first forward of an optimizer step to its end.

    The engine starts a profile in a hook inside the model's forward, stops it after each forward,
    and prints it after each micro-batch. Here, a profile goes on until the optimizer has stepped.
    A forward in evaluation mode does not start one, but is counted between two micro-batches.

    The engine's autotuner multiplies the forward of one micro-batch: it gets the last one's.

    An engine does this on rank 0 alone. On other ranks, ``follow_engine`` does it.

    cluster: the profiled step on all ranks, once it is printed; None on other ranks than 0, and
        where there is one rank.
    """

    def __init__(
        self,
        model: nn.Module,
        ds_engine: Any = None,
        recompute_fwd_factor: float = 0.0,
        *,
        flops: Flops = "all",
        timeout_s: float = 300.0,
    ) -> None:
        check_timeout(timeout_s)
        super().__init__(model, ds_engine, recompute_fwd_factor, flops=flops)
        self.cluster: ClusterProfile | None = None
        self._timeout_s = timeout_s
        self._following = ExitStack()  # what is set on the engine and its model

    def follow_engine(self) -> None:
        """Profile the step that the engine profiles on rank 0, and send the profile to rank 0.

        A hook on the model and a wrapper of the engine's ``step`` do this, until the step is over.
        Source: rank 0 is asked for in deepspeed/runtime/engine.py, _forward_prologue and step.
        """
        engine = self.ds_engine
        step, due = engine.step, engine.flops_profiler_profile_step()

        # The engine's own hook starts the profile on rank 0. It precedes those of ZeRO-3.
        def start_if_due(module: nn.Module, args: Any) -> None:
            if engine.global_steps == due:
                self.start_profile()

        @functools.wraps(step)
        def step_and_end(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            if engine.global_steps > due:
                self._end_following()
            return result

        hook = self.model.register_forward_pre_hook(start_if_due, prepend=True)
        self._following.callback(hook.remove)
        self._following.callback(_replace_step(engine, step_and_end))

    def _end_following(self) -> None:
        self._following.close()
        if self.started:
            self._end_step(self.ds_engine.global_steps)
            self.started = False

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Start at the first forward of a step; see ``FlopsProfiler.start_profile``."""
        evaluating = not (self.model.training and torch.is_grad_enabled())
        if evaluating or (self._counter is not None and not self._autotuning()):
            return
        super().start_profile(ignore_list)
        assert self._counter is not None
        self._counter.note_running(self.model)

    def stop_profile(self) -> None:
        """Do nothing: the engine calls this after a forward, with backward and step to come."""

    def reset_profile(self) -> None:
        """Forget what was counted."""
        self.drop_profile()

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
        fold: bool = False,
    ) -> None:
        """Print the profile after the last micro-batch of the step, and nothing before.

        Parameters are those of ``FlopsProfiler.print_model_profile``.
        """
        if not self._at_boundary():
            return
        if not self.started:
            warnings.warn(
                f"step {profile_step} was not profiled: its forward ran in evaluation mode",
                stacklevel=2,
            )
            return
        self._end_step(profile_step)
        super().print_model_profile(
            profile_step, module_depth, top_modules, detailed, output_file, fold
        )

    def _end_step(self, step: int) -> None:
        """Stop the profile, and merge it with those of the other ranks on rank 0."""
        self.close()
        self.add_run_info(**self._run_facts(), step=step)
        self.cluster = gather_if_several(self.profile, timeout_s=self._timeout_s)

    def _text(self, profile: Profile, view: View) -> str:
        return with_cluster(super()._text(profile, view), self.cluster)

    def end_profile(self) -> None:
        """Stop the profile after the last micro-batch of the step; do nothing before."""
        if self._at_boundary():
            self.close()
            self.started = False

    def close(self) -> None:
        """Stop the profile now, even within a step. Call this after an exception in a step."""
        super().stop_profile()

    def _at_boundary(self) -> bool:
        return bool(self.ds_engine.is_gradient_accumulation_boundary())

    def _autotuning(self) -> bool:
        return bool(self.ds_engine.autotuning_enabled())

    def _run_facts(self) -> dict[str, Any]:
        """Return the sizes of world, groups and batch, and of experts, as ``RunInfo``'s fields."""
        micro_batches = self.profile.root.calls or self.ds_engine.gradient_accumulation_steps()
        return engine_facts(self.ds_engine, self.model, micro_batches)


def _replace_step(engine: Any, step: Callable[..., Any]) -> Callable[[], None]:
    """Set the engine's ``step``; return what sets back what was there."""
    own = vars(engine).get("step")
    engine.step = step

    def restore() -> None:
        if own is None:
            del engine.step
        else:
            engine.step = own

    return restore
