"""Custom operators that multiply two matrices.

``product`` has no formula, ``add_product`` writes to an argument, and ``ordered_product`` has an
effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from dispatch_flops import OpCost, overridden


@torch.library.custom_op("custom_products::add_product", mutates_args={"out"})
def add_product(x: Tensor, y: Tensor, out: Tensor) -> None:
    out.add_(x @ y)


@add_product.register_fake
def _(x: Tensor, y: Tensor, out: Tensor) -> None:
    return None


def _multiply(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


product, ordered_product = (
    torch.library.custom_op(f"custom_products::{name}", _multiply, mutates_args=())
    for name in ("product", "ordered_product")
)
for _operator in (product, ordered_product):
    _operator.register_fake(lambda x, y: x.new_empty(x.shape[0], y.shape[1]))
_register_effectful_op(torch.ops.custom_products.ordered_product.default, _EffectType.ORDERED)


def product_formula(x: Tensor, y: Tensor, *_: Any, out: Any) -> OpCost:
    macs = x.shape[0] * x.shape[1] * y.shape[1]
    return OpCost(macs=macs, flops=2 * macs)


@contextmanager
def with_formulas() -> Iterator[None]:
    """Give the last two their formula inside the block."""
    with overridden(dict.fromkeys((add_product, ordered_product), product_formula)):
        yield
