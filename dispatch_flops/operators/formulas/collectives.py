"""Communication between ranks: no FLOPs, and the bytes of inputs and outputs.

The sum of an all-reduce is computed by some of the ranks or by the switch, depending on the
network library's algorithm. A counter cannot know which, so it is not counted for this rank. A
torch built without distributed has none of these operators.

Symmetric memory fuses some collectives with matrix products, which count.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from dispatch_flops.operators.communication import FORMS, moved_bytes
from dispatch_flops.operators.formulas._arithmetic import contract
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.operator_keys import to_keys
from dispatch_flops.operators.registry import Rule, add_rules, declare_free, register_flops
from dispatch_flops.profile.cost import OpCost

for _name, _form in FORMS.items():
    _rule = Rule(
        kind="free",
        formula=partial(moved_bytes, _name),
        note="communication, not compute",
        by_name=True,
        cacheable=False,  # a broadcast's bytes depend on the rank in the group
        moves=_form.kind != "barrier",
    )
    add_rules(to_keys(_name), _rule)

_OTHERS = {
    "c10d": "check_for_nan gather_into_tensor_",
    "_c10d_functional": "batch_p2p_ops",
    "symm_mem": """
        _barrier _low_contention_all_gather _low_contention_all_gather_ce_multicast
        _low_contention_all_gather_ce_multicast_out _low_contention_reduce_scatter _rendezvous
        all_to_all_vdev all_to_all_vdev_2d all_to_all_vdev_2d_offset get_remote_tensors
        memcpy_to_multicast_ memset32_ multi_root_tile_reduce multimem_all_gather_out
        multimem_all_reduce_ multimem_one_shot_all_reduce multimem_one_shot_all_reduce_out
        multimem_one_shot_reduce_out nccl_all_to_all_nd nccl_get nccl_get_out nccl_put
        nccl_put_signal nccl_put_with_signal nccl_reduce_scatter_offset nccl_wait_for_signal
        nccl_wait_signal nvshmem_all_to_all nvshmem_broadcast nvshmem_get nvshmem_get_out
        nvshmem_put nvshmem_put_with_signal nvshmem_wait_for_signal one_shot_all_reduce
        one_shot_all_reduce_copy one_shot_all_reduce_copy_out one_shot_all_reduce_out
        reduce_scatter_out stream_write_value32_ tile_reduce two_shot_all_reduce_
        two_shot_all_reduce_out
    """,
}

for _library, _names in _OTHERS.items():
    declare_free(ops(*_names.split(), library=_library), "communication, not compute")

declare_free(
    ops("wait_tensor", "wait_tensors", "_wrap_tensor_autograd", library="_c10d_functional"),
    "waits for communication, and returns what it is given",
    moves=False,
)


@register_flops(ops("_async_input_mm", library="symm_mem"))
def async_input_mm(a: torch.Tensor, b: torch.Tensor, *_args: Any, out: Any, **_: Any) -> OpCost:
    """a[M, K] @ b[K, N], waiting for chunks of a. MACs: M·N·K."""
    return contract(a.numel() * b.shape[-1], a, b)


@register_flops(
    ops("fused_all_gather_matmul", "fused_all_gather_scaled_matmul", library="symm_mem")
)
def all_gather_matmul(
    A_shard: torch.Tensor, Bs: Sequence[torch.Tensor], *_args: Any, out: Any, **_: Any
) -> OpCost:
    """A[M, K] gathered from all ranks, by rows or columns, then A @ B[K, N] for each B.

    MACs: M·N·K each. FLOPs: 2·MACs. (Scales and biases of the scaled form are not counted.)
    """
    macs = sum(product.numel() * B.shape[0] for product, B in zip(out[1], Bs, strict=True))
    return contract(macs, A_shard)


@register_flops(
    ops("fused_matmul_reduce_scatter", "fused_scaled_matmul_reduce_scatter", library="symm_mem")
)
def matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, *_args: Any, out: Any, **_: Any
) -> OpCost:
    """A[..., M, K] @ B[K, N], then summed over ranks and scattered.

    MACs: M·N·K. FLOPs: 2·MACs. (Scales and biases of the scaled form are not counted.)
    """
    return contract(A.numel() * B.shape[-1], A, B)
