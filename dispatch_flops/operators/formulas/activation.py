"""Fused activations, forward and backward: what their reference decompositions cost.

n is the number of elements of the result. A recipe names the primitives, each done once per
element; pointwise.py has the costs of primitives. Selecting (``where``) is free, but its
comparison counts. ``relu`` is a maximum, see pointwise.py.
Source, unless a docstring names another: torch._decomp.decompositions and
torch._refs.nn.functional.
"""

from __future__ import annotations

from typing import Any

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.pointwise import (
    elementwise,
    recipe_cost,
    register_rule,
    register_table,
)
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_inexact

_SOFTPLUS = "exp log1p gt"

register_table(
    {
        "silu": "sigmoid mul",
        # (1 + x·(1 - s)) · s · grad
        "silu_backward": "sigmoid sub mul add mul mul",
        "mish": f"{_SOFTPLUS} tanh mul",
        # grad · (t + x·s·(1 - t²)), t = tanh softplus x
        "mish_backward": f"{_SOFTPLUS} tanh sigmoid mul mul sub mul add mul",
        "selu": "expm1 mul gt mul",
        "elu": "gt mul mul expm1 mul",
        "leaky_relu": "gt mul",
        "leaky_relu_backward": "gt mul",
        "_prelu_kernel": "gt mul",
        # min(max(x + 3, 0), 6) / 6
        "hardsigmoid": "add maximum minimum div",
        "hardsigmoid_backward": "gt lt mul",
        "hardswish": "add maximum minimum mul div",
        "hardswish_backward": "le lt div add mul",
        "hardtanh": "maximum minimum",
        "hardtanh_backward": "le ge",
        "hardshrink": "abs le",
        # Both shrinks pass the gradient outside [-λ, λ]. Source: aten's HardShrink kernel.
        "hardshrink_backward": "ge le",
        "softshrink": "abs gt sign mul sub mul",
        "softshrink_backward": "ge le",
        "threshold": "le",
        "threshold_backward": "le",
        "log_sigmoid_forward": "minimum abs neg exp log1p sub",
        # x <= 0 is multiplied by a random slope; drawing it is free.
        "rrelu_with_noise": "le mul",
        "rrelu_with_noise_functional": "le mul",
        "glu": "sigmoid mul",
        # da·s + glu·(db - s·db): the tangent of a·s. Source: aten's glu_jvp.
        "glu_jvp": "sigmoid mul mul sub mul add",
    }
)


def gelu(self: Any, *, approximate: str = "none", out: Any, **_: Any) -> int:
    """x/2·(1 + erf(x/√2)): 5. tanh: x/2·(1 + tanh(β·(x + κ·x³))): 9."""
    exact, fast = "mul mul erf add mul", "mul mul mul add mul tanh mul add mul"
    return elementwise(fast if approximate == "tanh" else exact, self, out)


def gelu_backward(grad: Any, self: Any, *, approximate: str = "none", out: Any, **_: Any) -> int:
    """grad·(Φ(x) + x·φ(x)): 11, of which Φ is 4 and φ is 4.

    tanh: 18. inner = β·(x + κ·x³): 5; tanh: 1; x/2, 1+t, (1+t)/2: 3; 1 - t²: 2;
    inner' = β·(1 + 3κ·x²): 3; left·tanh'·inner': 2; their sum, times grad: 2.
    """
    if approximate == "tanh":
        recipe = "mul mul mul add mul tanh mul add mul mul sub mul add mul mul mul add mul"
    else:
        recipe = "mul erf add mul mul mul exp mul mul add mul"
    return elementwise(recipe, (grad, self), out)


@tells_apart(1)
def celu(self: Any, alpha: Any = 1.0, *, out: Any, **_: Any) -> int:
    """x > 0 ? x : α·expm1(x/α); neither division nor product if α = 1."""
    return elementwise("gt expm1" if alpha == 1 else "div expm1 mul gt", self, out)


@tells_apart(1)
def softplus(self: Any, beta: Any = 1, threshold: Any = 20, *, out: Any, **_: Any) -> int:
    """x·β > threshold ? x : log1p(exp(x·β))/β; neither product nor division if β = 1."""
    return elementwise(_SOFTPLUS if beta == 1 else f"mul {_SOFTPLUS} div", self, out)


def softplus_backward(grad_output: Any, self: Any, *_: Any, out: Any, **__: Any) -> int:
    """z = exp(x·β); x·β > threshold ? grad : grad·z/(z + 1): 7 (the product is computed twice)."""
    return elementwise("mul exp mul gt mul add div", (grad_output, self), out)


def elu_backward(
    grad_output: Any,
    alpha: Any,
    scale: Any,
    input_scale: Any,
    is_result: bool,
    self_or_result: Any,
    *,
    out: Any,
    **_: Any,
) -> int:
    """y <= 0 ? grad·a·(y + b) : grad·s, from the result: 5; with exp(x·a), from the input: 7."""
    recipe = "le mul add mul mul" if is_result else "le mul mul mul exp mul mul"
    return elementwise(recipe, (grad_output, self_or_result), out)


def log_sigmoid_backward(grad_output: Any, self: Any, buffer: Any, *, out: Any, **_: Any) -> int:
    """grad·(m - sign·z/(1 + z)): 6. z = exp(-|x|): 3 more if the forward saved no buffer."""
    recipe = "lt add div mul sub mul" + (" abs neg exp" if buffer.numel() == 0 else "")
    return elementwise(recipe, (grad_output, self), out)


def rrelu_with_noise_backward(
    grad_output: Any,
    self: Any,
    noise: Any,
    lower: Any,
    upper: Any,
    training: bool,
    *_: Any,
    out: Any,
    **__: Any,
) -> int:
    """Training: grad·noise. Evaluation: leaky_relu's backward."""
    return elementwise("mul" if training else "gt mul", (grad_output, self), out)


@register_flops(ops("_prelu_kernel_backward"))
def prelu_kernel_backward(grad_output: Any, self: Any, weight: Any, *, out: Any, **_: Any) -> int:
    """grad[n] for the input: x > 0, w·grad; for the weight, before its sum: x > 0, x·grad.

    FLOPs: 4·n.
    """
    return 4 * int(self.numel()) if is_inexact(self) else 0


@register_flops(ops("glu_backward"))
def glu_backward(grad_output: Any, self: Any, dim: int, *, out: Any, **_: Any) -> int:
    """x = [a; b], y[n] = a·s(b). ga = grad·s; gb = (1-s)·s·a·grad. FLOPs: 6·n."""
    return int(grad_output.numel()) * recipe_cost("sigmoid sub mul mul mul mul")


@register_flops(ops("glu_backward_jvp"))
def glu_backward_jvp(
    grad_x: Any, grad_glu: Any, x: Any, dgrad_glu: Any, dx: Any, dim: int, *, out: Any, **_: Any
) -> int:
    """Tangent of glu's backward, with u = s·(1-s) and ds = u·db, n elements of glu.

    s, u, ds: 4. dga = dg·s + g·ds: 3. dgb = (dg·a + g·da)·u + g·a·ds·(1-2s): 10.
    FLOPs: 17·n. Source: the product rule.
    """
    return 17 * int(grad_glu.numel())


for _name, _formula, _note in (
    ("gelu", gelu, "5; 9 with tanh"),
    ("gelu_backward", gelu_backward, "11; 18 with tanh"),
    ("celu", celu, "2; 4 if alpha != 1"),
    ("softplus", softplus, "3; 5 if beta != 1"),
    ("softplus_backward", softplus_backward, "7"),
    ("elu_backward", elu_backward, "7; 5 from the result"),
    ("log_sigmoid_backward", log_sigmoid_backward, "6; 9 without a buffer"),
    ("rrelu_with_noise_backward", rrelu_with_noise_backward, "1; 2 in evaluation"),
):
    register_rule(_name, _formula, _note)
