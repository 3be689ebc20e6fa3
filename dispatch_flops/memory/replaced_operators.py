"""Operators that nodes of autograd run only where a dispatch mode is on.

Under a mode, these nodes compute by operators of fixed shapes, and out of place. They take less
memory than what the nodes run without a mode, which cannot be seen.
Source: areAnyTensorSubclassLike in torch/csrc/autograd/FunctionsManual.cpp.
"""

from __future__ import annotations

from typing import Any

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload

_EXTREMES = frozenset(("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"))
_REFLECTIONS = frozenset(("LinalgHouseholderProductBackward0", "OrmqrBackward0"))
_NODES = {
    "aten::where.self": frozenset(("MaskedFillBackward1",)),
    "aten::eq.Tensor": _EXTREMES,
    "aten::sub.Scalar": _REFLECTIONS,
}


def may_replace(func: Any) -> bool:
    """Return True for an operator that some nodes run only under a dispatch mode."""
    return isinstance(func, OpOverload) and func.name() in _NODES


def node_replacing(func: OpOverload) -> str | None:
    """Return the node that runs ``func`` in place of what it runs without a mode, if one does.

    ``may_replace`` is true for ``func``.
    """
    node = _torch.current_node()
    name: str | None = None if node is None else node.name()
    return name if name in _NODES[func.name()] else None
