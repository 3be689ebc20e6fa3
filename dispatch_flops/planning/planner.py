"""``plan``: does a step fit, how long does it take at least, and what MFU can it reach."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dispatch_flops.analysis.machines import MACHINES, Machine, find
from dispatch_flops.analysis.planned import Plan, PlannedStep, planned_step
from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.operators.conventions import Causal, Target
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.planning.search import largest_that_fits
from dispatch_flops.planning.training_step import checkpoint_stacks, count_step
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
) -> Plan:
    """Plan training steps of a model on one device, without the device.

        def build(batch, seq):
            return torch.nn.Linear(3, 5), (torch.ones(batch, seq, 3),)

        planned = plan(build, "NVIDIA H100 80GB HBM3", sizes={"batch": [1, 2], "seq": 4096})
        planned.steps[0].fits, planned.steps[0].bounds.least_s
        print(renderers.plan_table.render(planned))

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
    host_s_per_operator: measured seconds of the host for one operator; see
        ``planning.host_cost``. None leaves the host out.
    search_batch: search the largest "batch" that fits, by running.

    The model is in training mode. Backward starts at the output's ``loss``, else at the sum of the
    outputs. Figures are of one device; times are lower bounds, with the assumptions in the plan.

    Raises ConfigError for an unknown machine or optimizer, and TargetError if ``build`` does not
    return a model and its inputs, or nothing requires a gradient.
    """
    planner = _Planner(
        build,
        machine_of(machine),
        optimizer,
        dtype,
        checkpoint,
        causal,
        target,
        host_s_per_operator,
    )
    steps = [planner.step(choice) for choice in choices_of(sizes or {})]
    if search_batch:
        steps = planner.with_largest_batches(steps)
    return Plan(
        machine=planner.machine, steps=tuple(steps), assumptions=tuple(planner.assumptions(steps))
    )


def machine_of(machine: Machine | str) -> Machine:
    """Return a machine, also by its name; raise ConfigError for an unknown one."""
    found = find(machine) if isinstance(machine, str) else machine
    if not isinstance(found, Machine):
        raise ConfigError(
            f"machine={machine!r} is unknown; pass a Machine or one of {', '.join(MACHINES)}"
        )
    return found


def choices_of(sizes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of the sizes; raise ConfigError for a name without values."""
    columns = {
        name: list(values) if isinstance(values, (list, tuple, range)) else [values]
        for name, values in sizes.items()
    }
    if not all(columns.values()):
        raise ConfigError(f"sizes={dict(sizes)!r}: pass at least one value for each name")
    return [
        dict(zip(columns, chosen, strict=True)) for chosen in itertools.product(*columns.values())
    ]


@dataclass(slots=True)
class _Planner:
    """Counts steps of one model and holds them against one machine."""

    build: Build
    machine: Machine
    optimizer: str | None
    dtype: torch.dtype | None
    checkpoint: bool
    causal: Causal
    target: Target
    host_s_per_operator: float | None

    def step(self, sizes: Mapping[str, Any]) -> PlannedStep:
        """Return the figures of one choice."""
        profile, inputs = self._count(sizes)
        samples, tokens = _samples_and_tokens(inputs)
        return planned_step(
            profile,
            self.machine,
            sizes,
            host_s_per_operator=self.host_s_per_operator,
            samples=samples,
            tokens=tokens,
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
            others = tuple((name, v) for name, v in step.sizes.items() if name != "batch")
            if others not in found:
                found[others] = self._largest_batch(step.sizes, steps)
            changed.append(_with_largest(step, found[others]))
        return changed

    def _largest_batch(self, sizes: Mapping[str, Any], steps: Sequence[PlannedStep]) -> int:
        known = {
            step.sizes["batch"]: step.peak_bytes
            for step in steps
            if {**step.sizes, "batch": 0} == {**sizes, "batch": 0}
        }

        def peak(batch: int) -> int:
            if batch in known:
                return known[batch]
            return planned_step(
                self._count({**sizes, "batch": batch})[0], self.machine, sizes
            ).peak_bytes

        assert self.machine.memory_bytes is not None
        return largest_that_fits(peak, self.machine.memory_bytes, sizes["batch"])

    def _count(self, sizes: Mapping[str, Any]) -> tuple[Profile, list[torch.Tensor]]:
        with torch.device("meta"):
            model, args, kwargs = _model_and_inputs(self.build(**sizes))
        if self.dtype is not None:
            model = model.to(self.dtype)
            args, kwargs = (_converted(part, self.dtype) for part in (args, kwargs))
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
        found = [
            "one device, without communication; a value that the model reads is taken as 1",
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
        if self.optimizer is not None:
            found.append(
                f"{self.optimizer} updates one parameter after the other, its state in the "
                "parameters' dtype; a steady step, gradients freed at its end"
            )
            found.append("gradients start at the model's loss, or at the sum of its outputs")
        if any(step.profile.memory and step.profile.memory.is_lower_bound for step in steps):
            found.append("memory is a lower bound: some kernels allocate an unknown workspace")
        found.append(
            "memory: blocks rounded to 512 bytes; without fragmentation and the driver's own part"
        )
        return found


def _with_largest(step: PlannedStep, batch: int) -> PlannedStep:
    return PlannedStep(
        sizes=step.sizes,
        machine=step.machine,
        profile=step.profile,
        bounds=step.bounds,
        samples=step.samples,
        tokens=step.tokens,
        largest_batch=batch,
    )


def _model_and_inputs(made: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise TargetError(
            f"build returned a {type(made).__name__}; return a pair of the model and its inputs"
        )
    model, inputs = made
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs)
    return model, tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,), {}


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _converted(part, dtype) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_converted(part, dtype) for part in value)
    return value


def _samples_and_tokens(inputs: Sequence[torch.Tensor]) -> tuple[int | None, int | None]:
    """Return the rows of the first input, and its elements if it is token ids [batch, sequence]."""
    first = next((tensor for tensor in inputs if tensor.dim()), None)
    if first is None:
        return None, None
    is_ids = first.dim() == 2 and not first.is_floating_point()
    return first.shape[0], math.prod(first.shape) if is_ids else None
