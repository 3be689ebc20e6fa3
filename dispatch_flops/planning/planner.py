"""``plan``: does a step fit, how long does it take at least, and what MFU can it reach."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from dispatch_flops.analysis.machines import MACHINES, Machine, find, is_finite
from dispatch_flops.analysis.planned import Plan, PlannedStep, planned_step, profiles_of
from dispatch_flops.analysis.planned_cluster import planned_cluster
from dispatch_flops.errors import ConfigError
from dispatch_flops.operators.conventions import Causal, Target
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.planning.assumptions import (
    of_communication,
    of_machine,
    of_memory,
    of_sharding,
    of_unknown_costs,
)
from dispatch_flops.planning.meshes import check_dims, is_job, observed_samples, of_all_ranks
from dispatch_flops.planning.model_inputs import converted, model_and_inputs, samples_and_tokens
from dispatch_flops.planning.search import followed, largest_that_fits, without_batch
from dispatch_flops.planning.training_step import check_optimizer, checkpoint_stacks, count_step
from dispatch_flops.profile import Profile

Build = Callable[..., Any]
Size = int | float | str | bool


def plan(
    build: Build,
    machine: Machine | str,
    *,
    sizes: Mapping[str, Size | Sequence[Size]] | None = None,
    optimizer: str | None = "adamw",
    dtype: torch.dtype | None = None,
    checkpoint: bool = False,
    causal: Causal = "full",
    target: Target = "cuda",
    host_s_per_operator: float | None = None,
    search_batch: bool = True,
    mesh: Mapping[str, int] | None = None,
    mixed_precision: bool = False,
) -> Plan:
    """Plan training steps of a model on one device or on a mesh of them, without the devices.

        def build(batch, seq):
            return torch.nn.Linear(3, 5), (torch.ones(batch, seq, 3),)

        planned = plan(build, "NVIDIA H100 80GB HBM3", sizes={"batch": [1, 2], "seq": 4096})
        planned.steps[0].fits, planned.steps[0].bounds.least_s
        print(renderers.plan_table.render(planned))

        planned = plan(build, "H100", sizes={"batch": 1, "seq": 4096}, mesh={"dp": 64})
        planned.steps[0].cluster.communication  # calls, bytes and seconds of each dimension

    build: called with one value of each size as keyword arguments; returns the model and its
        inputs, a tuple of positional ones or a dict of keyword arguments. It runs with the meta
        device as default, so that tensors have no data.
    machine: a Machine, or the name of one in ``analysis.MACHINES``.
    sizes: values to choose from; every combination is planned. "batch" is the micro-batch.
    optimizer: "adamw" (the default), "adam" or "sgd"; None plans a forward pass without gradients.
    dtype: of the model's parameters and floating-point inputs; None keeps theirs.
    checkpoint: recompute every layer of the model's stacks in backward.
    causal, target: as for FlopCounterMode; ``target`` is "cuda" here, so that attention is counted
        as a fused kernel.
    host_s_per_operator: seconds that the host takes to launch one operator, as
        ``dispatch-flops plan --host-cost`` measures them; None leaves the host out.
    search_batch: search the largest "batch" that fits, by running.
    mesh: name and size of each dimension, outermost first; None plans one device. The model is
        sharded over "dp" by FSDP2, each layer of its stacks and then the root, and over "tp" by
        the tensor-parallel plan that it states, as models of transformers do. Sizes and inputs
        are of one rank of "dp". One rank of each kind is simulated, see ``distributed.simulate``.
        With other dimensions ``build`` is a job: a function with a parameter ``mesh``, a
        DeviceMesh, and the sizes. It shards its model and returns what runs a step, or a pair of
        the model and that; optimizer, dtype and checkpoint are then its own.
    mixed_precision: with "dp", FSDP keeps parameters, gradients and optimizer state in float32,
        gathers and computes in ``dtype``, and reduces gradients in float32.

    The model is in training mode. Backward starts at the output's ``loss``, else at the sum of the
    outputs. Times are lower bounds, with the assumptions in the plan.

    Raises ConfigError for an unknown machine or optimizer, arguments of another type, and a mesh
    that does not suit ``build``. Raises TargetError if ``build`` does not return a model and its
    inputs, if nothing requires a gradient, and if the model states no tensor-parallel plan.
    """
    check_types(build, sizes, dtype, made="the model and its inputs")
    if not isinstance(mesh, Mapping | None):
        raise ConfigError(f'mesh={mesh!r:.60}: pass names and sizes, such as {{"dp": 2, "tp": 4}}')
    check_host_s(host_s_per_operator)
    planner = _Planner(
        build, machine_of(machine), optimizer, dtype, checkpoint, causal, target,
        host_s_per_operator, dict(mesh) if mesh is not None else None, mixed_precision,
    )  # fmt: skip
    planner.check(sizes or {})
    steps = [planner.step(choice) for choice in choices_of(sizes or {})]
    if search_batch:
        steps = planner.with_largest_batches(steps)
    return Plan(
        machine=planner.machine, steps=tuple(steps), assumptions=tuple(planner.assumptions(steps))
    )


def check_types(build: Any, sizes: Any, dtype: Any, *, made: str) -> None:
    """Raise ConfigError for an argument of the wrong type. made: what ``build`` returns."""
    if not callable(build) or isinstance(build, torch.nn.Module):
        raise ConfigError(
            f"build is of type {type(build).__name__}; pass a function that returns {made}"
        )
    if not isinstance(sizes, Mapping | None):
        raise ConfigError(f"sizes={sizes!r:.60}: pass a dict of names and values")
    if not isinstance(dtype, torch.dtype | None):
        raise ConfigError(f"dtype={dtype!r:.60}: pass a dtype of torch, such as torch.bfloat16")


def check_host_s(host_s_per_operator: Any) -> None:
    """Raise ConfigError for what are not seconds of the host for one operator."""
    if host_s_per_operator is not None and not (
        is_finite(host_s_per_operator) and host_s_per_operator >= 0
    ):
        raise ConfigError(
            f"host_s_per_operator={host_s_per_operator!r:.60}: pass seconds of 0 or more, or None"
        )


def machine_of(machine: Machine | str) -> Machine:
    """Return a machine, also by its name; raise ConfigError for an unknown one."""
    found = find(machine) if isinstance(machine, str) else machine
    if not isinstance(found, Machine):
        raise ConfigError(
            f"machine={machine!r:.60} is unknown; pass a Machine or one of {', '.join(MACHINES)}"
        )
    return found


def choices_of(sizes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of the sizes; raise ConfigError for a name without values."""
    columns = {
        name: list(values) if isinstance(values, (list, tuple, range)) else [values]
        for name, values in sizes.items()
    }
    if not all(columns.values()):
        raise ConfigError(f"sizes={dict(sizes)!r:.60}: pass at least one value for each name")
    return [
        dict(zip(columns, chosen, strict=True)) for chosen in itertools.product(*columns.values())
    ]


@dataclass(slots=True)
class _Planner:
    """Counts steps of one model and compares them with one machine."""

    build: Build
    machine: Machine
    optimizer: str | None
    dtype: torch.dtype | None
    checkpoint: bool
    causal: Causal
    target: Target
    host_s_per_operator: float | None
    mesh: dict[str, int] | None
    mixed_precision: bool

    def check(self, sizes: Mapping[str, Any]) -> None:
        """Raise ConfigError for options that cannot be combined."""
        if self.optimizer is not None:
            check_optimizer(self.optimizer)
        if self.mesh is None and is_job(self.build) and "mesh" not in sizes:
            raise ConfigError("build has a parameter mesh; pass mesh=, such as mesh={'dp': 8}")
        if self._is_job and (self.dtype or self.checkpoint or self.mixed_precision):
            raise ConfigError("a job sets its precision and checkpointing itself; leave them out")
        if self.mesh is not None and not self._is_job:
            check_dims(self.mesh)
        can_mix = self.dtype is not None and "dp" in (self.mesh or ()) and not self._is_job
        if self.mixed_precision and not can_mix:
            raise ConfigError("mixed_precision needs a dtype, and a mesh with dp; pass both")

    @property
    def _is_job(self) -> bool:
        return self.mesh is not None and is_job(self.build)

    def step(self, sizes: Mapping[str, Any]) -> PlannedStep:
        """Return the figures of one choice."""
        if self.mesh is not None:
            return self._step_on(self.mesh, sizes)
        profile, inputs = self._count(sizes)
        samples, tokens = samples_and_tokens(inputs)
        return planned_step(
            profile,
            self.machine,
            sizes,
            host_s_per_operator=self.host_s_per_operator,
            samples=samples,
            tokens=tokens,
        )

    def _step_on(self, mesh: dict[str, int], sizes: Mapping[str, Any]) -> PlannedStep:
        # Torch may have been built without torch.distributed.
        from dispatch_flops.planning.cluster_step import ShardedStep, simulate_step

        seen: set[tuple[int | None, int | None]] = set()
        job: Callable[..., Any] = partial(self.build, **sizes)
        if not self._is_job:
            sharded = ShardedStep(
                optimizer=self.optimizer,
                dtype=self.dtype,
                checkpoint=self.checkpoint,
                mixed_precision=self.mixed_precision,
                target=self.target,
            )
            job = sharded.job(self.build, sizes, seen)
        simulated = simulate_step(job, mesh, causal=self.causal, target=self.target)
        cluster = planned_cluster(simulated, mesh, self.machine, self.host_s_per_operator)
        found = seen.pop() if seen else observed_samples(simulated.profiles.values())
        samples, tokens = of_all_ranks(found, mesh)
        return PlannedStep(
            sizes=dict(sizes),
            machine=self.machine,
            profile=cluster.slowest.profile,
            bounds=cluster.bounds,
            samples=samples,
            tokens=tokens,
            cluster=cluster,
        )

    def with_largest_batches(self, steps: Sequence[PlannedStep]) -> list[PlannedStep]:
        """Return the steps with the largest batch that fits, searched once for equal others."""
        found: dict[tuple[Any, ...], int] = {}
        changed = []
        for step in steps:
            batch = step.sizes.get("batch")
            if type(batch) is not int or batch < 1 or self.machine.memory_bytes is None:
                changed.append(step)
                continue
            others = without_batch(step.sizes)
            if others not in found:
                alike = [each for each in steps if without_batch(each.sizes) == others]
                found[others] = self._largest_batch(step.sizes, alike)
            changed.append(replace(step, largest_batch=found[others]))
        return changed

    def _largest_batch(self, sizes: Mapping[str, Any], alike: Sequence[PlannedStep]) -> int:
        """Return the largest batch that fits. alike: steps that differ in the batch alone."""
        known = {step.sizes["batch"]: followed(step.peak_bytes) for step in alike}

        def peak(batch: int) -> int:
            if batch in known:
                return known[batch]
            return followed(self.step({**sizes, "batch": batch}).peak_bytes)

        assert self.machine.memory_bytes is not None
        return largest_that_fits(peak, self.machine.memory_bytes, sizes["batch"])

    def _count(self, sizes: Mapping[str, Any]) -> tuple[Profile, list[torch.Tensor]]:
        with torch.device("meta"):
            model, args, kwargs = model_and_inputs(self.build(**sizes))
        if self.dtype is not None:
            model = model.to(self.dtype)
            args, kwargs = (converted(part, self.dtype) for part in (args, kwargs))
        model.train(self.optimizer is not None)
        if self.checkpoint and self.optimizer is not None:
            checkpoint_stacks(model)
        with torch.device("meta"):
            profile = count_step(
                model, args, kwargs,
                optimizer=self.optimizer, causal=self.causal, target=self.target,
            )  # fmt: skip
        return profile, list(tensors_in([args, kwargs]))

    def assumptions(self, steps: Sequence[PlannedStep]) -> list[str]:
        """Return what the figures assume, in words."""
        found = ["one device, without communication; a value that the model reads is taken as 1"]
        if self.mesh is not None:
            found = self._assumptions_of(self.mesh, steps)
        found += [
            "step, all traffic saved: every counted FLOP at the machine's peak",
            "step, unfused: every operator takes the longer of its FLOPs at the peak and its bytes "
            "at the memory's bandwidth; fusion moves less",
            "kernels do not reach their peaks, so that real steps take longer",
        ]
        if self.causal == "full":
            found.append(
                "causal attention is counted in full; a kernel that skips the masked half is "
                'faster: plan with causal="half"'
            )
        if self.host_s_per_operator is not None:
            found.append(
                "step, nothing hidden: adds the host's "
                f"{self.host_s_per_operator * 1e6:.1f} us for each operator"
            )
        if self.optimizer is not None and not self._is_job:
            found.append(
                f"{self.optimizer} updates one parameter after the other, its state in the "
                "parameters' dtype; a steady step, gradients freed at its end"
            )
            found.append("gradients start at the model's loss, or at the sum of its outputs")
        profiles = [run for step in steps for run in profiles_of(step)]
        found += of_machine(profiles, self.machine)
        found += of_unknown_costs(profiles)
        found += of_memory(step.memory for step in steps)
        return found

    def _assumptions_of(self, mesh: Mapping[str, int], steps: Sequence[PlannedStep]) -> list[str]:
        clusters = [step.cluster for step in steps if step.cluster is not None]
        return [
            *of_sharding(
                mesh,
                is_job=self._is_job,
                dtype=self.dtype,
                mixed_precision=self.mixed_precision,
            ),
            *dict.fromkeys(note for cluster in clusters for note in cluster.notes),
            *of_communication(self.machine),
            "memory is that of the fullest rank, time that of the rank that takes longest",
        ]
