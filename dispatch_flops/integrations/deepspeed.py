"""A DeepSpeed engine that uses this profiler, by its own ``flops_profiler`` configuration.

    engine, *_ = deepspeed.initialize(model=model, config=config)
    dispatch_flops.integrations.deepspeed.attach(engine)

The engine then starts, stops and prints as before. What is printed covers the whole optimizer
step: all its micro-batches, measured backward and step, once. As with DeepSpeed's own profiler
``profile_step`` counts the steps that are done before it: 1 is the second one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dispatch_flops.counting.parameters import elements_of
from dispatch_flops.errors import ConfigError
from dispatch_flops.profilers.flops_profiler import FlopsProfiler

_EXPERT_GROUP = "ep_size_"


def attach(engine: Any) -> EngineProfiler:
    """Make ``engine`` profile with this package; returns the profiler, for its ``profile``.

    Raises ConfigError if the engine's configuration does not enable ``flops_profiler``, and for
    pipeline engines, which never tell their profiler that a step is over.
    """
    name = type(engine).__name__
    enabled = getattr(engine, "flops_profiler_enabled", None)
    if enabled is None:
        raise ConfigError(f"{name} is no DeepSpeed engine: it has no flops profiler")
    if any(base.__name__ == "PipelineEngine" for base in type(engine).__mro__):
        raise ConfigError(
            f"{name} never tells its flops profiler that a step is over: put its train_batch() "
            "into a FlopCounterMode block"
        )
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
    runs from the first forward of an optimizer step to its end. Evaluation starts none, but
    between two micro-batches it is counted with them.

    Its autotuner wants one micro-batch's forward and multiplies: it gets the last one's.
    """

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        evaluating = not (self.model.training and torch.is_grad_enabled())
        if evaluating or (self._counter is not None and not self._autotuning()):
            return
        super().start_profile(ignore_list)
        assert self._counter is not None
        self._counter.note_running(self.model)

    def stop_profile(self) -> None:
        """After a forward: backward and step are still to come."""

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
        """Print at the end of the optimizer step; nothing after the micro-batches before it."""
        if not self._at_boundary():
            return
        if not self.started:
            warnings.warn(
                f"step {profile_step} was not profiled: its forward ran in evaluation mode",
                stacklevel=2,
            )
            return
        self.close()
        self.amend_scope(**self._scope(), step=profile_step)
        super().print_model_profile(
            profile_step, module_depth, top_modules, detailed, output_file or None, fold
        )

    def end_profile(self) -> None:
        if self._at_boundary():
            self.close()
            self.started = False

    def close(self) -> None:
        """Stop counting now, also in the midst of a step: after an exception in it, call this."""
        super().stop_profile()

    def _at_boundary(self) -> bool:
        return bool(self.ds_engine.is_gradient_accumulation_boundary())

    def _autotuning(self) -> bool:
        return bool(self.ds_engine.autotuning_enabled())

    def _scope(self) -> dict[str, Any]:
        """World, parallel and batch sizes and expert parameters, as the engine knows them."""
        engine = self.ds_engine
        data_parallel = engine.dp_world_size
        if data_parallel is None:  # with sequence parallelism the two are one group
            data_parallel = engine.seq_dp_world_size
        micro_batches = self.profile.root.calls or engine.gradient_accumulation_steps()
        scope: dict[str, Any] = {
            "rank": engine.global_rank,
            "world_size": engine.world_size,
            "data_parallel_size": data_parallel,
            "model_parallel_size": engine.mp_world_size or 1,
            "batch_size": engine.train_micro_batch_size_per_gpu() * micro_batches,
        }
        return scope | (_experts(engine, self.model) if engine.has_moe_layers else {})


def _experts(engine: Any, model: nn.Module) -> dict[str, Any]:
    """Parameters of experts: those that this rank holds, and of the whole model."""
    split = any(getattr(m, "enable_expert_tensor_parallelism", False) for m in model.modules())
    across = engine.mp_world_size if split else 1
    sizes = [(elements_of(p), _expert_parallel_size(p)) for p in model.parameters()]
    return {
        "expert_params": sum(elements for elements, ranks in sizes if ranks),
        "model_expert_params": across * sum(elements * ranks for elements, ranks in sizes),
        "expert_tensor_parallel": across > 1,
    }


def _expert_parallel_size(parameter: Any) -> int:
    """Ranks over which an expert's group is spread; 0 for what belongs to no expert."""
    group = str(getattr(parameter, "group_name", ""))
    size = group.removeprefix(_EXPERT_GROUP)
    return int(size) if group.startswith(_EXPERT_GROUP) and size.isdigit() else 0
