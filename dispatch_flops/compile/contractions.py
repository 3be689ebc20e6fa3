"""Contractions that inductor computes as a product and a sum.

Inductor takes a product of matrices apart where a size is 1, and a product with a vector always:
``torch._inductor.decomposition``, ``torch._decomp.decompositions``. The nodes that it makes keep
the name of the operator that they come from.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from dispatch_flops import _torch
from dispatch_flops.operators.registry import Rule
from dispatch_flops.profile.cost import OpCost, contraction

aten = torch.ops.aten
# By name: the operators in a node's meta are copies.
_ORIGINS = frozenset(
    f"aten.{name}.default" for name in "mm addmm bmm baddbmm mv addmv dot vdot".split()
)
_SUMS = (aten.sum.default, aten.sum.dim_IntList)


def _elementwise_contraction(a: Tensor, b: Tensor, *, out: Any) -> OpCost:
    """sum of a * b over some dimensions, or a * b where the size of these is 1.

    MACs: elements of a * b. FLOPs: 2·MACs, as for the operator that it was.
    Source: torch/_inductor/decomposition.py.
    """
    macs = math.prod(torch.broadcast_shapes(a.shape, b.shape))
    return contraction(macs, complex_numbers=a.is_complex() and b.is_complex())


RULE = Rule(kind="formula", formula=_elementwise_contraction)


def is_product(node: fx.Node) -> bool:
    """Return True for the product of a contraction that was taken apart."""
    return (
        _origin(node) is not None
        and node.target is aten.mul.Tensor
        and all(isinstance(arg, fx.Node) for arg in node.args)
    )


def is_remainder(node: fx.Node) -> bool:
    """Return True for a node whose cost is that of the product: the sum, or a scaling by 1."""
    if _origin(node) is None:
        return False
    if node.target in _SUMS:
        return isinstance(node.args[0], fx.Node) and is_product(node.args[0])
    return node.target is aten.mul.Tensor and node.args[1] in (1, 1.0)


def operator_of(product: fx.Node) -> Any:
    """Return the operator that was taken apart."""
    return _origin(product)


def result_of(product: fx.Node) -> Any:
    """Return what the whole contraction returns."""
    for user in product.users:
        if is_remainder(user):
            return user.meta.get("val")
    return product.meta.get("val")


def _origin(node: fx.Node) -> Any:
    first_trace = node.meta.get("custom") or {}
    origin = first_trace.get(_torch.ORIGIN) or node.meta.get("original_aten")
    return origin if str(origin) in _ORIGINS and str(node.target) != str(origin) else None
