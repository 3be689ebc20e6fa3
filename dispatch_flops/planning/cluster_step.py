"""One step on every kind of rank of a device mesh: built, sharded, simulated and counted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dispatch_flops import _torch
from dispatch_flops.distributed.library_checks import without_tracing_checks
from dispatch_flops.distributed.simulation import Job, as_step, simulate
from dispatch_flops.operators.conventions import Causal, Target
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.planning.model_inputs import converted, model_and_inputs, samples_and_tokens
from dispatch_flops.planning.sharding import allocate, shard
from dispatch_flops.planning.training_step import ROUNDING, checkpoint_stacks, step_of
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profilers.counter import FlopCounterMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedStep:
    """How a model is built, sharded and run.

    mixed_precision: FSDP keeps the parameters in float32 and computes in ``dtype``.
    """

    optimizer: str | None
    dtype: torch.dtype | None
    checkpoint: bool
    mixed_precision: bool
    target: Target

    def job(self, build: Callable[..., Any], sizes: Mapping[str, Any], seen: set[Any]) -> Job:
        """Return a job that builds the model of these sizes and shards it.

        seen: receives samples and tokens of a rank's inputs.
        """

        def run(mesh: DeviceMesh) -> tuple[Any, Callable[[], None]]:
            with _torch.without_fake_mode(), torch.device("meta"):
                model, args, kwargs = model_and_inputs(build(**sizes))
                held = torch.float32 if self.mixed_precision else self.dtype
                if held is not None:
                    model = model.to(held)
                if self.dtype is not None:
                    args, kwargs = (converted(part, self.dtype) for part in (args, kwargs))
            seen.add(samples_and_tokens(list(tensors_in([args, kwargs]))))
            model.train(self.optimizer is not None)
            if self.checkpoint and self.optimizer is not None:
                checkpoint_stacks(model)
            allocate(model)
            shard(model, mesh, self.dtype if self.mixed_precision else None)
            args, kwargs = _on_cpu((args, kwargs))
            return model, step_of(model, args, kwargs, self.optimizer, self.target)

        return run


def _on_cpu(inputs: Any) -> Any:
    """Return nested inputs on the CPU; one that occurs twice, as ids that are labels, stays one."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            made[tensor] = torch.empty_like(tensor, device="cpu")
        return made[tensor]

    return _torch.tree_map_only(torch.Tensor, move, inputs)


def simulate_step(
    job: Job, mesh: Mapping[str, int], *, causal: Causal, target: Target
) -> ClusterProfile:
    """Return the profiles of a steady step on one rank of each kind, memory included.

    A first step, which is not counted, makes the optimizer's state and sets a pipeline up.
    """

    def steady(device_mesh: DeviceMesh) -> tuple[Any, Callable[[], Any]]:
        model, step = as_step(job(device_mesh))
        with without_tracing_checks(), FlopCounterMode(model, display=False, target=target):
            step()
        return model, step

    with warnings.catch_warnings():
        # Nothing changes the output of the root in place here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        return simulate(
            steady,
            mesh,
            causal=causal,
            target=target,
            memory=True,
            memory_rounding=ROUNDING,
            timeout_s=None,
        )
