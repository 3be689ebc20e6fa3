"""Families of kernels whose peak rates differ: products, convolution, attention, recurrent."""

from __future__ import annotations

from typing import Literal

KernelFamily = Literal["product", "convolution", "attention", "recurrent"]

# Parts of an overload's name; the first family with one of them is the operator's. Attention and
# recurrent layers come first, for they contain products.
_PARTS: dict[KernelFamily, tuple[str, ...]] = {
    "attention": ("attention", "flash"),
    "recurrent": ("lstm", "gru", "rnn"),
    "convolution": ("conv",),
    "product": ("mm", "linear", "matmul", "einsum", "dot", "mv"),
}


def family_of(op: str) -> KernelFamily | None:
    """Return the family of an overload such as ``"aten.addmm.default"``; None if it has none.

    The name of a family stands for all of its operators.
    """
    if op in _PARTS:
        return op
    name = op.split(".")[1] if op.count(".") > 1 else op
    for family, parts in _PARTS.items():
        if any(part in name for part in parts):
            return family
    return None
