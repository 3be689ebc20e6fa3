"""Tensor parallelism of a model by the plan that it states, with torch's own styles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dispatch_flops.errors import TargetError


def _gathering() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _splitting() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


def _replicating() -> ParallelStyle:
    """Return the style of a norm of heads: its weight's gradients are added over the ranks."""
    return SequenceParallel(sequence_dim=2, use_local_output=True)


# The names are those of transformers, distributed/tensor_parallel.py, ALL_PARALLEL_STYLES.
STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": _gathering,
    "colwise_gather_output": _gathering,
    "rowwise_rep": _splitting,
    "rowwise_split_input": _splitting,
    "embedding_rowwise": _splitting,
    "embedding_colwise": _gathering,
    "replicated_with_grad_allreduce": _replicating,
}


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the model over the ranks of a mesh of one dimension by the plan that it states.

    The plan is ``{name of modules: style}`` as transformers has it: the model's ``tp_plan``, or
    ``base_model_tp_plan`` of its config. Raises TargetError if there is none, if it has a style
    that torch's ``parallelize_module`` lacks, and if heads cannot be divided.
    """
    stated = stated_plan(model)
    if not stated:
        raise TargetError(
            f"{type(model).__name__} states no tensor-parallel plan (tp_plan, as models of "
            "transformers do); plan it without tp, or write a job that calls parallelize_module"
        )
    unknown = sorted({style for style in stated.values() if style not in STYLES})
    if unknown:
        raise TargetError(
            f"the tensor-parallel plan of {type(model).__name__} has the style "
            f"{', '.join(unknown)}, which parallelize_module lacks; write a job that shards it"
        )
    _check_heads(model, mesh.size())
    _check_sizes(model, stated, mesh.size())
    ties = _ties(model)
    plan = {name: STYLES[style]() for name, style in stated.items()}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    _tie_again(ties)


def stated_plan(model: nn.Module) -> dict[str, str]:
    """Return the tensor-parallel plan that a model or its config states; empty without one."""
    found = getattr(model, "tp_plan", None)
    if isinstance(found, Mapping) and found:
        return dict(found)
    below = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    is_wrapped = bool(prefix) and isinstance(getattr(model, prefix, None), nn.Module)
    return {f"{prefix}.{name}" if is_wrapped else name: style for name, style in below.items()}


def _check_heads(model: nn.Module, size: int) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if type(heads) is int and heads % size:
            raise TargetError(f"tp={size} does not divide {name}={heads}; choose a divisor")


def _check_sizes(model: nn.Module, stated: Mapping[str, str], size: int) -> None:
    """Raise TargetError where parts of a row would differ in size between ranks.

    A rowwise module takes the parts of a colwise one as they are, and torch's styles take all parts
    for equal. Rows of a head and of an embedding may differ, for they are gathered or summed.
    """
    for name, module in model.named_modules():
        style = next((stated[rule] for rule in stated if fnmatch(name, rule)), None)
        side = {"colwise": "out_features", "rowwise": "in_features"}.get(style or "")
        features = getattr(module, side, None) if side else None
        if type(features) is int and features % size:
            raise TargetError(
                f"tp={size} does not divide {side}={features} of {name}; choose a divisor"
            )


_Site = tuple[nn.Module, str]


def _ties(model: nn.Module) -> list[list[_Site]]:
    """Return the modules and names of each parameter that several modules hold."""
    sites: defaultdict[int, list[_Site]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                sites[id(parameter)].append((module, name))
    return [found for found in sites.values() if len(found) > 1]


def _tie_again(ties: list[list[_Site]]) -> None:
    """Make modules share a parameter again that parallelize_module sharded for each of them."""
    for (first, first_name), *others in ties:
        kept: Any = first._parameters[first_name]
        for module, name in others:
            found: Any = module._parameters[name]
            if _placements(found) != _placements(kept):
                raise TargetError(
                    f"the tensor-parallel plan shards {name} of {type(first).__name__} and of "
                    f"{type(module).__name__} differently, which is one parameter; write a job"
                )
            module._parameters[name] = kept


def _placements(parameter: Any) -> object:
    return parameter.placements if isinstance(parameter, DTensor) else None
