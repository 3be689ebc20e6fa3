"""Families of kernels whose peak rates differ: products, convolution, attention, recurrent."""

from __future__ import annotations

import re
from typing import Literal

KernelFamily = Literal["product", "convolution", "attention", "recurrent"]

# Words of an overload's name; the first family with one of them is the operator's. Attention and
# recurrent layers come first, for they contain products. A word ends there: lgamma has no "mm".
_WORDS: dict[KernelFamily, re.Pattern[str]] = {
    "attention": re.compile(r"attention|flash|attn"),
    "recurrent": re.compile(r"(lstm|gru|rnn)(?![a-z])"),
    "convolution": re.compile(r"conv(olution)?(?![a-z])"),
    "product": re.compile(
        r"(mm|mv|dot|matmul|einsum|linear)(?![a-z])"
        r"|euclidean_dist|matrix_exp|affine_grid|encoder_layer|mx_fp8"  # made of products
    ),
}
_INTERPOLATION = "upsample"  # as upsample_bilinear2d, which is pointwise


def family_of(op: str) -> KernelFamily | None:
    """Return the family of an overload such as ``"aten.addmm.default"``; None if it has none.

    The name of a family stands for all of its operators.
    """
    if op in _WORDS:
        return op
    library, name = op.split(".")[:2] if op.count(".") > 1 else ("", op)
    if "flash" in library:  # as of flash_attn_3.fwd
        return "attention"
    name = name.lower()  # as of module.Linear, a class with a formula
    for family, words in _WORDS.items():
        if words.search(name) and _INTERPOLATION not in name:
            return family
    return None
