"""A DeepSpeed engine that uses this profiler, by its own ``flops_profiler`` configuration.

    engine, *_ = deepspeed.initialize(model=model, config=config)
    dispatch_flops.integrations.deepspeed.attach(engine)

The engine then starts, stops and prints as before. What is printed covers the whole optimizer
step: all its micro-batches, measured backward and step, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dispatch_flops.errors import ConfigError
from dispatch_flops.profiler import FlopsProfiler

_EXPERT_GROUP = "ep_size_"


def attach(engine: Any) -> EngineProfiler:
    """Make ``engine`` profile with this package; returns the profiler, for its ``profile``.

    Raises ConfigError if the engine's configuration does not enable ``flops_profiler``.
    """
    enabled = getattr(engine, "flops_profiler_enabled", None)
    if enabled is None:
        raise ConfigError(f"{type(engine).__name__} is no DeepSpeed engine: it has no flops profiler")
    if not enabled():
        raise ConfigError(
            'the engine\'s configuration does not enable its profiler: set {"flops_profiler": '
            '{"enabled": true}} in it'
        )
    profiler = EngineProfiler(
        engine.module,
        ds_engine=engine,
        recompute_fwd_factor=engine.flops_profiler_recompute_fwd_factor(),
    )
    engine.flops_profiler = profiler
    return profiler


class EngineProfiler(FlopsProfiler):
    """What the engine calls at its own times, made right.

    The engine starts a profile in a hook of the root's forward, so that forward is running
    already; it stops after each forward, and prints after each micro-batch. Here a profile
    runs from the first forward of an optimizer step to its end.
    """

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        if self._counter is None:
            super().start_profile(ignore_list)
            assert self._counter is not None
            self._counter.note_running(self.model)

    def stop_profile(self) -> None:
        """After a forward: backward and step are still to come."""

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
        fold: bool = False,
    ) -> None:
        """Print at the end of the optimizer step; nothing after the micro-batches before it."""
        if not self._at_boundary():
            return
        super().stop_profile()
        self.amend_scope(**_scope_of(self.ds_engine, self.model), step=profile_step)
        super().print_model_profile(
            profile_step, module_depth, top_modules, detailed, output_file or None, fold
        )

    def end_profile(self) -> None:
        if self._at_boundary():
            super().stop_profile()
            self.started = False

    def _at_boundary(self) -> bool:
        return bool(self.ds_engine.is_gradient_accumulation_boundary())


def _scope_of(engine: Any, model: nn.Module) -> dict[str, Any]:
    """World, parallel and batch sizes and expert parameters, as the engine knows them."""
    data_parallel = engine.dp_world_size
    if data_parallel is None:  # with sequence parallelism the two are one group
        data_parallel = engine.seq_dp_world_size
    model_parallel = engine.mp_world_size or 1
    scope: dict[str, Any] = {
        "rank": engine.global_rank,
        "world_size": engine.world_size,
        "data_parallel_size": data_parallel,
        "model_parallel_size": model_parallel,
        "batch_size": engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps(),
    }
    if engine.has_moe_layers:
        across = model_parallel if _experts_are_tensor_parallel(model) else 1
        scope["model_expert_params"] = across * sum(
            p.numel() * _expert_parallel_size(p) for p in model.parameters()
        )
        scope["expert_params"] = sum(p.numel() for p in model.parameters() if _expert_parallel_size(p))
        scope["expert_tensor_parallel"] = across > 1
    return scope


def _expert_parallel_size(parameter: Any) -> int:
    """Ranks over which an expert's group is spread; 0 for what belongs to no expert."""
    group = str(getattr(parameter, "group_name", ""))
    size = group.removeprefix(_EXPERT_GROUP)
    return int(size) if group.startswith(_EXPERT_GROUP) and size.isdigit() else 0


def _experts_are_tensor_parallel(model: nn.Module) -> bool:
    return any(getattr(m, "enable_expert_tensor_parallelism", False) for m in model.modules())
