"""Shard a model over a device mesh: FSDP2 over "dp", tensor parallelism over "tp"."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dispatch_flops.planning.tensor_parallel import parallelize
from dispatch_flops.planning.training_step import stacked_layers


def allocate(model: nn.Module) -> None:
    """Replace what the model holds on the meta device by empty tensors on the CPU.

    Parameters that modules share stay shared, which ``to_empty`` would part.
    """
    made: dict[torch.Tensor, Any] = {}  # keeps the old ones, so that no identity is used twice
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    if tensor not in made:
                        made[tensor] = _empty_like(tensor)
                    held[name] = made[tensor]


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def shard(model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype | None = None) -> None:
    """Shard the model: over "tp" by its plan, then each layer and the root by FSDP2 over "dp".

    Layers are those of the outermost stacks. Without a stack the root is sharded alone.

    compute_dtype: in which FSDP gathers parameters and layers compute, gradients being reduced in
        float32; None computes and reduces in the parameters' own dtype.
    """
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize(model, mesh["tp"])
    if "dp" not in names:
        return
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in (*stacked_layers(model), model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
