"""Linear layers that are one operator: nested tensors, oneDNN, MKL, MPS.

Letters: T tokens (the product of all leading dimensions), K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import adds, contract, same_shaped
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.matmul import product_and_bias
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_sparse, stored_elements
from dispatch_flops.profile.cost import OpCost

aten = torch.ops.aten


@register_flops(ops("linear", "mkldnn_linear"))
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """out[T,N] = x[T,K] @ weight[N,K].T + bias[N]; nested x: T is the sum of the lengths.

    MACs: T·N·K. FLOPs: 2·MACs + T·N (bias). Source: aten::linear schema.
    """
    return product_and_bias(_linear_macs(x, weight), x, weight, out, bias=bias)


def _linear_macs(x: torch.Tensor, weight: torch.Tensor) -> int:
    if is_sparse(weight):
        return stored_elements(weight) * prod(x.shape[:-1])
    return stored_elements(x) * (weight.shape[0] if weight.dim() > 1 else 1)


@register_flops(ops("linear_backward", "mkldnn_linear_backward"))
def linear_backward(
    x: torch.Tensor,
    grad_out: torch.Tensor,
    weight: torch.Tensor,
    output_mask: Sequence[bool],
    *,
    out: Any,
    **_: Any,
) -> OpCost:
    """Gradients of ``linear`` for x, weight and bias, each if its mask is set.

    MACs: T·N·K for x (grad @ weight), T·N·K for weight (grad.T @ x).
    FLOPs: 2·MACs + (T-1)·N for bias (sum over T).
    """
    to_x, to_weight, to_bias = output_mask
    return _linear_gradients(
        x.numel(), grad_out, weight, bool(to_x) + bool(to_weight), to_bias=to_bias
    )


@register_flops(ops("mkldnn_linear_backward_input"))
def mkldnn_linear_backward_input(
    input_size: Sequence[int], grad_out: torch.Tensor, weight: torch.Tensor, *, out: Any, **_: Any
) -> OpCost:
    """Gradient of ``linear`` for x. MACs: T·N·K. FLOPs: 2·MACs."""
    return _linear_gradients(prod(input_size), grad_out, weight, 1, to_bias=False)


@register_flops(ops("mkldnn_linear_backward_weights"))
def mkldnn_linear_backward_weights(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_defined: bool,
    *,
    out: Any,
    **_: Any,
) -> OpCost:
    """Gradients of ``linear`` for weight and bias. MACs: T·N·K. FLOPs: 2·MACs + (T-1)·N."""
    return _linear_gradients(x.numel(), grad_out, weight, 1, to_bias=bias_defined)


def _linear_gradients(
    elements: int, grad_out: torch.Tensor, weight: torch.Tensor, products: int, *, to_bias: bool
) -> OpCost:
    features = weight.shape[0] if weight.dim() > 1 else 1
    summed = max(0, grad_out.numel() - features) if to_bias else 0
    return contract(
        products * elements * features, grad_out, weight, extra_flops=adds(summed, grad_out)
    )


# -- as emitted by inductor's freezing ----------------------------------------------------------

POST_OPS = {
    "relu": aten.relu,
    "sigmoid": aten.sigmoid,
    "tanh": aten.tanh,
    "swish": aten.silu,
    "hardswish": aten.hardswish,
    "hardsigmoid": aten.hardsigmoid,
    "hardtanh": aten.hardtanh,
    "leaky_relu": aten.leaky_relu,
    "gelu": aten.gelu,
}


def post_op(name: str | None, algorithm: str | None, out: torch.Tensor) -> OpCost:
    """Return the cost of the activation that a oneDNN kernel applies to its result.

    ``"none"``, ``""`` and None cost nothing. Raises KeyError for an unknown activation.
    """
    if name in (None, "none", ""):
        return OpCost()
    kwargs = {"approximate": algorithm or "none"} if name == "gelu" else {}
    return same_shaped(POST_OPS[str(name)], out, **kwargs)


@register_flops(ops("_mkl_linear", library="mkl"), by_name=True)
def mkl_linear(
    *, X: torch.Tensor, ORI_W: torch.Tensor, B: torch.Tensor | None, out: torch.Tensor, **_: Any
) -> OpCost:
    """``linear`` with a weight packed by MKL; the original weight is passed too.

    MACs: T·N·K. FLOPs: 2·MACs + T·N (bias).
    """
    return linear(X, ORI_W, B, out=out)


@register_flops(ops("_linear_pointwise.default", library="mkldnn"), by_name=True)
def linear_pointwise(
    *,
    X: torch.Tensor,
    B: torch.Tensor | None,
    attr: str,
    algorithm: str | None,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """``linear`` and an activation. The packed weight may lack a plain shape: N is the result's.

    MACs: T·N·K. FLOPs: 2·MACs + T·N (bias) + the activation's.
    """
    macs = X.numel() * out.shape[-1]
    return product_and_bias(macs, X, out, out, bias=B) + post_op(attr, algorithm, out)


@register_flops(ops("_linear_pointwise.binary", library="mkldnn"), by_name=True)
def linear_pointwise_binary(
    *, X: torch.Tensor, B: torch.Tensor | None, out: torch.Tensor, **_: Any
) -> OpCost:
    """``linear``, then add, sub or mul with another tensor.

    MACs: T·N·K. FLOPs: 2·MACs + T·N (bias) + T·N (binary op).
    """
    macs = X.numel() * out.shape[-1]
    return product_and_bias(macs, X, out, out, bias=B) + OpCost(flops=adds(out.numel(), out))
