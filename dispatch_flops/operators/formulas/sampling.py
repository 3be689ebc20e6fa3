"""Random numbers, which are free, and the arithmetic done with them."""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import declare_free, register_flops
from dispatch_flops.profile.cost import OpCost, flops

Tensor = torch.Tensor

_DRAWN = """
    binomial poisson multinomial _sample_dirichlet _standard_gamma normal
    _cudnn_init_dropout_state rand randn randint randperm
"""
# The first argument is filled, or its shape gives the number of samples.
_FILLED = """
    cauchy exponential geometric log_normal normal_ normal_functional random uniform rand_like
    randn_like randint_like _no_grad_normal_ _no_grad_uniform_ _fill_mem_eff_dropout_mask_
    _philox_normal _philox_uniform _philox_key_fold_in _philox_key_split
"""


def _filled(first: Any, *args: Any, out: Any = None, **kwargs: Any) -> OpCost:
    """Bytes: reads the other arguments, writes the result."""
    return OpCost(
        bytes_read=nbytes(args, kwargs), bytes_written=nbytes(first if out is None else out)
    )


def _bernoulli(self: Tensor, p: Any = None, *_: Any, out: Tensor, **__: Any) -> OpCost:
    """Bytes: reads the probabilities, ``p`` or else ``self``, and writes the result."""
    return OpCost(bytes_read=nbytes(self if p is None else p), bytes_written=nbytes(out))


declare_free(
    ops(*_DRAWN.split())
    + ops("philox_rand", library="rngprims")
    + ops("inductor_reserve_rng_state", library="inductor_prims"),
    "random numbers",
)
declare_free(ops(*_FILLED.split(), "bernoulli_.float"), "random numbers", formula=_filled)
declare_free(ops("bernoulli"), "random numbers", formula=_bernoulli)


@register_flops(ops("native_dropout"))
@tells_apart(0, 1)
def native_dropout(self: Tensor, p: float, train: bool | None, *, out: Any, **_: Any) -> OpCost:
    """A mask that keeps with probability 1 - p, and out = mask * self / (1 - p).

    FLOPs: 2 per element, the two products, as on devices without fused dropout; 1 if everything is
    dropped, a product with 0; none if nothing is. torch._decomp's native_dropout compares with p
    to draw the mask, and random numbers are free.
    """
    if not train or p == 0:
        return flops(0)
    return flops((1 if p == 1 else 2) * self.numel())


@register_flops(ops("_fused_dropout"))
def fused_dropout(self: Tensor, p: float, *_args: Any, out: Any, **_: Any) -> OpCost:
    """``native_dropout`` with p as the probability to keep."""
    return flops(2 * self.numel())


@register_flops(ops("_masked_scale"))
def masked_scale(self: Tensor, mask: Tensor, scale: float, *, out: Tensor, **_: Any) -> OpCost:
    """The backward of ``_fused_dropout``: self * mask * scale."""
    return flops(2 * out.numel())


@register_flops(ops("_standard_gamma_grad", "_dirichlet_grad"))
def implicit_gradient(*_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Derivative of a sample by its parameter: one special function per element."""
    return flops(out.numel())
