"""Cost of an operator's reference decomposition, for test_decompositions.py.

The operator is traced with torch's own decompositions, dead code is removed, and the rest is
counted by rules that are independent of the package's formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

_ELEMENTWISE = """
    abs add clamp clamp_min clamp_max cos div eq erf erfc exp exp2 expm1 ge gt isinf isneginf
    isposinf isnan le lgamma log log1p lt maximum minimum mul ne neg pow reciprocal relu rsqrt
    rsub sigmoid sign sin special_erfcx sqrt sub tan tanh trunc logical_not floor
"""
_COMPARISONS = "eq ne lt le gt ge"
_REDUCTIONS = "sum amax amin prod max min"
_FREE = """
    _to_copy _unsafe_view alias arange as_strided bitwise_and bitwise_not bitwise_or bitwise_xor
    cat clone constant_pad_nd copy detach empty empty_like expand fill full full_like gather
    index lift_fresh lift_fresh_copy masked_fill narrow new_empty new_full new_ones new_zeros
    ones ones_like permute rand rand_like reshape scalar_tensor scatter select slice split
    split_with_sizes squeeze t transpose unsqueeze view where zeros zeros_like conj_physical
    logical_and logical_or any diagonal convert_element_type broadcast_in_dim
"""
#: Core ATen keeps these whole; their decompositions come from the full table.
_KEPT_WHOLE = """
    elu gelu leaky_relu hardtanh _softmax _log_softmax native_layer_norm native_group_norm
    _native_batch_norm_legit _native_batch_norm_legit_functional native_batch_norm
    _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update
    batch_norm_backward rrelu_with_noise_backward _fused_rms_norm adaptive_max_pool2d
    max_pool2d_with_indices max_pool2d_with_indices_backward _adaptive_avg_pool2d
    embedding_dense_backward linalg_vector_norm norm dist ldexp
"""


def reference_flops(op: Any, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of the primitives that ``op`` decomposes into."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        given, named = tree_unflatten(filled, spec)
        return op(*given, **named)

    traced = make_fx(call, decomposition_table=_table(), tracing_mode="fake")
    graph = traced(*(leaves[place] for place in places)).graph
    graph.eliminate_dead_code()
    return sum(_cost(node) for node in graph.nodes if node.op == "call_function")


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    kept = set(_KEPT_WHOLE.split())
    primitive = set((_ELEMENTWISE + _REDUCTIONS + _FREE).split()) | {"mean", "var", "var_mean"}
    table = dict(core_aten_decompositions())
    table.update((op, rule) for op, rule in decomposition_table.items() if _packet_name(op) in kept)
    return {op: rule for op, rule in table.items() if _packet_name(op) not in primitive}


def _packet_name(op: Any) -> str:
    packet = getattr(op, "overloadpacket", op)
    return str(getattr(packet, "__name__", packet))


def _cost(node: torch.fx.Node) -> int:
    """Return the FLOPs of a primitive: 1 per element, n-m for a reduction, 4·n for a variance."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0  # getitem
    name = _packet_name(node.target).rstrip("_")
    inputs = [n.meta["val"] for n in node.all_input_nodes if _is_tensor(n.meta.get("val"))]
    value = node.meta["val"]
    result = value[0] if isinstance(value, (list, tuple)) else value
    is_inexact = any(t.is_floating_point() or t.is_complex() for t in [*inputs, result])
    if name in _COMPARISONS.split():  # of whole numbers with 3.5: as floating-point numbers
        is_inexact |= any(isinstance(arg, float) for arg in node.args)
    if name in _FREE.split() or not is_inexact:
        return 0
    n = inputs[0].numel() if inputs else 0
    if name == "reciprocal" and all(_by_a_number(user) for user in node.users):
        return 0  # number / tensor: one division, which Python makes a reciprocal and a product
    if name in _ELEMENTWISE.split():
        return int(result.numel()) * _steps(name, node)
    if name in _REDUCTIONS.split():
        return int(n - result.numel())
    if name in ("scatter_add", "index_put"):
        values = inputs[-1]
        return int(values.numel()) if name == "scatter_add" or node.args[3] else 0
    return {"mean": n, "var": 4 * n, "var_mean": 4 * n}[name]


def _steps(name: str, node: torch.fx.Node) -> int:
    """Return operations per element: one, plus a scaling, a rounding or a second bound."""
    if name == "clamp":
        return sum(bound is not None for bound in node.args[1:])
    scaled = node.kwargs.get("alpha", 1) != 1
    return 1 + scaled + ("rounding_mode" in node.kwargs)


def _by_a_number(node: torch.fx.Node) -> bool:
    return _packet_name(node.target) == "mul" and not isinstance(node.args[1], torch.fx.Node)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
