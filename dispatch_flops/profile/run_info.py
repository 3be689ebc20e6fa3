"""Where and how a run took place: device, ranks, mesh, inputs and versions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from dispatch_flops.profile.fields import build, table
from dispatch_flops.profile.serialization import shape_from_row, to_row


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInput:
    """A tensor that the model was called with.

    name: the parameter's name, or the position, and the path in nested containers:
        "past_key_values.0.1".
    shape: the sizes; None for a nested tensor, and -1 for a size that is a symbol.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshDim:
    """A dimension of a device mesh.

    name: such as "dp". size: number of positions. coordinate: this rank's position; None for a
        rank outside the mesh.
    """

    name: str
    size: int
    coordinate: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Where and how the run took place. Every count is of this rank.

    batch_size: samples per rank and step, where known.
    expert_params: of ``total_params``, those of experts. model_expert_params: those of experts
        on all ranks. Both are known from an engine alone.
    step: number of the profiled step. causal: how causal attention was counted, "full" or "half".
    flops: which FLOPs were counted, "all" or those of "contractions" alone.
    subclass: on tensor subclasses, "executed" or "logical" operators were counted.
    target: the device, "cpu" or "cuda", whose rules chose the kernel of attention on tensors
        without data.
    inputs: the tensors of the model's first call. training, grad_mode ("grad", "no_grad" or
        "inference") and autocast (the dtype, or None where it is off) are of that call, too, and
        autocast is that of its first submodule. inputs, training and grad_mode are None where no
        call was seen.
    rank, world_size: of the default process group; None for ``world_size`` where none exists.
    mesh: the dimensions of the device mesh, outermost first; None where none is known.
    command: the command line, where there is one. date: when the profile was taken, UTC in
        ISO 8601. Two profiles may be equal with different commands and dates.
    """

    device: str = "cpu"
    device_name: str | None = None
    torch_version: str | None = None
    rank: int = 0
    world_size: int | None = None
    mesh: tuple[MeshDim, ...] | None = None
    data_parallel_size: int | None = None
    model_parallel_size: int = 1
    expert_params: int | None = None
    model_expert_params: int | None = None
    expert_tensor_parallel: bool | None = None
    batch_size: int | None = None
    step: int = 1
    causal: str = "full"
    flops: str = "all"
    subclass: str = "executed"
    target: str = "cpu"
    inputs: tuple[TensorInput, ...] | None = None
    training: bool | None = None
    grad_mode: str | None = None
    autocast: str | None = None
    python_version: str | None = None
    dispatch_flops_version: str | None = None
    platform: str | None = None
    command: str | None = field(default=None, compare=False)
    date: str | None = field(default=None, compare=False)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's position in each mesh dimension: ``{"dp": 1, "tp": 0}``."""
        return {dim.name: dim.coordinate for dim in self.mesh or () if dim.coordinate is not None}


# Fields of ``RunInfo`` that a saved profile has only if they were recorded.
_RECORDED = (
    "mesh", "inputs", "training", "grad_mode", "autocast", "python_version",
    "dispatch_flops_version", "platform", "command", "date",
)  # fmt: skip

# Conventions and their defaults, which a saved profile leaves out: older files have none of them.
_CONVENTIONS = {"flops": "all", "subclass": "executed", "target": "cpu"}


def run_to_row(run: RunInfo) -> dict[str, Any]:
    """Return the run as plain data."""
    row = dataclasses.asdict(run)
    for name in _RECORDED:
        if row[name] is None:
            del row[name]
    for name, default in _CONVENTIONS.items():
        if row[name] == default:
            del row[name]
    if run.mesh is not None:
        row["mesh"] = [to_row(dim) for dim in run.mesh]
    if run.inputs is not None:
        row["inputs"] = [
            {**to_row(tensor), "shape": None if tensor.shape is None else list(tensor.shape)}
            for tensor in run.inputs
        ]
    return row


def run_from_row(row: Any) -> RunInfo:
    """Return the run that ``run_to_row`` wrote; raises ValueError or KeyError for other data."""
    values = table(row)
    lists: dict[str, Any] = {}
    if values.get("inputs") is not None:
        lists["inputs"] = tuple(map(_input_from_row, values.pop("inputs")))
    if values.get("mesh") is not None:
        lists["mesh"] = tuple(build(MeshDim, dim) for dim in values.pop("mesh"))
    return build(RunInfo, values, **lists)


def _input_from_row(row: Any) -> TensorInput:
    values = table(row)
    shape = shape_from_row(values.pop("shape"))
    return build(TensorInput, values, shape=shape)
