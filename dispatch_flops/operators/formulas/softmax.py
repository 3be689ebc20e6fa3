"""Softmax and its relatives.

n: elements of the input. m: rows, n divided by the length of the reduced dimensions.
A reduction of n to m is n-m. Source: torch._decomp.decompositions, torch._refs.
"""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import dtype_of_result
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.pointwise import recipe_cost
from dispatch_flops.operators.formulas.reduction import rows
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_inexact


def filled_rows(tensor: torch.Tensor, dim: int) -> int:
    """Number of rows, 0 for an empty tensor, which has nothing to sum."""
    return rows(tensor, dim) if tensor.numel() else 0


@register_flops(ops("_softmax", "softmax"), computes_in=dtype_of_result)
def softmax(self: torch.Tensor, dim: int, *_: Any, out: Any, **__: Any) -> int:
    """e = exp(x - max x); e / Σe.

    FLOPs: max n-m, subtract n, exp n, sum n-m, divide n: 5·n - 2·m.
    """
    return 5 * self.numel() - 2 * filled_rows(self, dim)


@register_flops(ops("_safe_softmax"), computes_in=dtype_of_result)
def safe_softmax(self: torch.Tensor, dim: int, dtype: Any = None, *, out: Any, **_: Any) -> int:
    """Softmax in which rows of only -inf become 0: n comparisons more (6·n - 2·m)."""
    return 6 * self.numel() - 2 * filled_rows(self, dim)


@register_flops(ops("_log_softmax", "log_softmax"), computes_in=dtype_of_result)
def log_softmax(self: torch.Tensor, dim: int, *_: Any, out: Any, **__: Any) -> int:
    """d = x - max x; d - log Σ exp d.

    FLOPs: max n-m, subtract n, exp n, sum n-m, log m, subtract n: 5·n - m.
    """
    return 5 * self.numel() - filled_rows(self, dim)


@register_flops(ops("_softmax_backward_data", "_log_softmax_backward_data"))
def softmax_backward_data(
    grad_output: torch.Tensor, output: torch.Tensor, dim: int, *_: Any, out: Any, **__: Any
) -> int:
    """softmax: p = g·y; p - y·Σp. log-softmax: g - exp(y)·Σg.

    FLOPs, both: two pointwise steps around a sum n-m, and a subtraction: 4·n - m.
    """
    return 4 * output.numel() - filled_rows(output, dim)


@register_flops(ops("logsumexp"))
def logsumexp(self: torch.Tensor, dim: Any, keepdim: bool = False, *, out: Any, **_: Any) -> int:
    """log Σ exp(x - M) + M, M = max x (of the real parts) with infinities set to 0.

    FLOPs: max n-m, |M| and its comparison 2·m, subtract n, exp n, sum n-m, log m, add m:
    4·n + 2·m; of complex numbers 10·n + 7·m.
    """
    if not is_inexact(self, out):
        return 0
    n, m = self.numel(), rows(self, dim)

    def each(recipe: str) -> int:
        return recipe_cost(recipe, complex_numbers=self.is_complex())

    maxima = n + m  # n-m, and 2 for each
    return maxima + n * each("sub exp") + (n - m) * each("add") + m * each("log add")
