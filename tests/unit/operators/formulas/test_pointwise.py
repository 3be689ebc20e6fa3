"""Pointwise operators: closed forms, dtypes, arguments, lists, and completeness."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dispatch_flops.operators.registry import lookup
from tests.helpers.profiling import profile_of

N = 3 * 5 * 7


def real(*shape: int) -> torch.Tensor:
    return torch.rand(shape or (3, 5, 7)) + 1.5


def flops(fn: Any, *args: Any) -> int:
    return profile_of(fn, *args, strict=True).total().flops


@pytest.mark.parametrize(
    ("fn", "per_element"),
    [
        (lambda x: x + x, 1),
        (lambda x: x + 2, 1),
        (lambda x: torch.add(x, x, alpha=3), 2),
        (lambda x: torch.sub(x, x, alpha=3), 2),
        (lambda x: torch.rsub(x, x, alpha=3), 2),
        (lambda x: 2 - x, 1),
        (lambda x: -x, 1),
        (lambda x: x * x, 1),
        (lambda x: x / x, 1),
        (lambda x: torch.div(x, x, rounding_mode="floor"), 2),
        (lambda x: x // 2, 2),
        (lambda x: x % 2, 1),
        (lambda x: x**3, 1),
        (lambda x: x > 0, 1),
        (lambda x: x == x, 1),
        (lambda x: torch.maximum(x, x), 1),
        (lambda x: torch.max(x, x), 1),
        (lambda x: torch.relu(x), 1),
        (lambda x: torch.sigmoid(x), 1),
        (lambda x: torch.special.gammaln(x), 1),
        (lambda x: torch.special.bessel_j0(x), 1),
        (lambda x: x.clamp(min=0), 1),
        (lambda x: x.clamp(0, 1), 2),
        (lambda x: x.clamp(x, x), 2),
        (lambda x: F.relu6(x), 2),
        (lambda x: torch.round(x), 1),
        (lambda x: torch.round(x, decimals=2), 3),
        (lambda x: torch.lerp(x, x, 0.3), 3),
        (lambda x: torch.lerp(x, x, x), 6),
        (lambda x: torch.addcmul(x, x, x), 3),
        (lambda x: torch.addcdiv(x, x, x, value=2), 3),
        (lambda x: torch.where(x > 0, x, x), 1),
        (lambda x: x.masked_fill(x > 0, 0), 1),
        (lambda x: torch.frexp(x), 1),
        (lambda x: x.add_(x, alpha=2), 2),
        (lambda x: x.mul_(2), 1),
        (lambda x: F.gelu(x), 5),
        (lambda x: F.gelu(x, approximate="tanh"), 9),
        (lambda x: F.silu(x), 2),
        (lambda x: F.hardswish(x), 5),
        (lambda x: F.leaky_relu(x), 2),
        (lambda x: x.clone(), 0),
        (lambda x: x.transpose(0, 1).contiguous(), 0),
        (lambda x: x.to(torch.float64), 0),
    ],
)
def test_pointwise_cost_per_element(fn: Any, per_element: int) -> None:
    assert flops(fn, real()) == per_element * 3 * 5 * 7


def test_pointwise_on_a_tensor_without_dimensions_counts_one() -> None:
    assert flops(torch.exp, torch.tensor(2.0)) == 1
    assert flops(torch.exp, torch.empty(0, 3)) == 0


@pytest.mark.parametrize(
    ("fn", "per_element"),
    [
        (lambda i: i + i, 0),
        (lambda i: i > 1, 0),
        (lambda i: i // 2, 0),
        (lambda i: i & i, 0),
        (lambda i: (i > 1) & (i < 3), 0),
        (lambda i: i.clamp(0, 2), 0),
        (lambda i: torch.eq(i, 2, out=torch.empty(3, 5, 7)), 0),
        (lambda i: i / i, 1),
        (lambda i: i * 1.5, 1),
        (lambda i: i > 1.5, 1),
        (lambda i: i.eq_(1.0), 1),
        (lambda i: i == 1j, 2),
        (lambda i: i.bool() < 0.5, 1),
        (lambda i: torch.isin(i, 0.5), 1),
        (lambda i: torch.sigmoid(i), 1),
    ],
)
def test_pointwise_on_integers_is_free_unless_torch_computes_in_reals(
    fn: Any, per_element: int
) -> None:
    assert flops(fn, torch.ones(3, 5, 7, dtype=torch.int64)) == per_element * 3 * 5 * 7


@pytest.mark.parametrize(
    ("fn", "per_element"),
    [
        (lambda z: z + z, 2),
        (lambda z: z - z, 2),
        (lambda z: torch.add(z, z, alpha=2), 8),
        (lambda z: z * z, 6),
        (lambda z: z * z.real, 6),
        (lambda z: z / z, 6 + 3 + 2),
        (lambda z: -z, 2),
        (lambda z: z**2, 6),
        (lambda z: z**3, 6 + 6 + 5),
        (lambda z: z.abs(), 4),
        (lambda z: z.angle(), 1),
        (lambda z: z.conj(), 0),
        (lambda z: z.conj().resolve_conj(), 0),
        (lambda z: torch.conj_physical(z), 1),
        (lambda z: torch.exp(z), 5),
        (lambda z: torch.tanh(z), 6 + 6 + 11),
        (lambda z: torch.polar(z.real, z.real), 4),
        (lambda z: torch.complex(z.real, z.real), 0),
        (lambda z: torch.addcmul(z, z, z), 6 + 6 + 2),
        (lambda z: F.silu(z), (2 + 5 + 1 + 6) + 6),
        (lambda z: z == z, 2),
    ],
)
def test_pointwise_on_complex_numbers_counts_real_operations(fn: Any, per_element: int) -> None:
    assert flops(fn, torch.complex(real(), real())) == per_element * 3 * 5 * 7


def test_conj_physical_of_reals_is_free() -> None:
    assert flops(torch.ops.aten.conj_physical, real()) == 0


def test_pointwise_on_sparse_tensors_counts_stored_elements() -> None:
    """3 of 30 numbers."""
    sparse = torch.eye(10)[:3].to_sparse()
    assert flops(lambda: sparse * 2) == 3
    assert flops(lambda: torch.relu(sparse)) == 3


LISTS = [torch.rand(3), torch.rand(5, 7)]
TOTAL = 3 + 5 * 7


@pytest.mark.parametrize(
    ("fn", "per_element"),
    [
        (lambda x: torch._foreach_add(x, x), 1),
        (lambda x: torch._foreach_add(x, x, alpha=2), 2),
        (lambda x: torch._foreach_add_(x, 1.0), 1),
        (lambda x: torch._foreach_add_(x, [1.0, 2.0]), 1),
        (lambda x: torch._foreach_add_(x, torch.tensor(1.0), alpha=2), 2),
        (lambda x: torch._foreach_mul_(x, torch.tensor(2.0)), 1),
        (lambda x: torch._foreach_sqrt(x), 1),
        (lambda x: torch._foreach_lerp_(x, x, 0.1), 3),
        (lambda x: torch._foreach_addcmul_(x, x, x, value=0.1), 3),
        (lambda x: torch._foreach_addcdiv_(x, x, x, [0.1, 0.2]), 3),
        (lambda x: torch._foreach_clamp_max_(x, 1.0), 1),
        (lambda x: torch._foreach_zero_(x), 0),
        (lambda x: torch._foreach_copy_(x, x), 0),
    ],
)
def test_foreach_costs_the_sum_of_its_items(fn: Any, per_element: int) -> None:
    assert flops(fn, [t.clone() for t in LISTS]) == per_element * (3 + 5 * 7)


def test_foreach_in_place_moves_what_it_reads_and_writes() -> None:
    others = [t.clone() for t in LISTS]
    total = profile_of(lambda: torch._foreach_add_(LISTS, others)).total()
    assert (total.bytes_read, total.bytes_written) == (2 * 4 * TOTAL, 4 * TOTAL)


def overloads() -> Iterator[Any]:
    """Yield every overload of aten."""
    for name in torch._C._dispatch_get_all_op_names():
        library, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if library == "aten":
            op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if op is not None:
                yield op


def test_every_foreach_operator_of_torch_has_a_rule() -> None:
    lists = [op for op in overloads() if op.name().startswith("aten::_foreach_")]
    assert len(lists) > 200
    assert [str(op) for op in lists if lookup(op) is None] == []


def test_every_pointwise_operator_of_torch_has_a_rule_or_is_decomposed() -> None:
    pointwise = [op for op in overloads() if torch.Tag.pointwise in op.tags]
    assert len(pointwise) > 500
    bare = [str(op) for op in pointwise if lookup(op) is None and not op._can_decompose()]
    assert bare == []


def test_silu_backward_is_six_per_element() -> None:
    """y = silu(x): 2·n. Its backward: 6·n; the gradient of the sum is a view of ones."""
    x = real().requires_grad_()
    profile = profile_of(lambda: F.silu(x).sum().backward(), strict=True)
    assert profile.total("forward").flops == 2 * N + N - 1
    assert profile.total("backward").flops == 6 * N


@pytest.mark.parametrize(
    ("activation", "forward", "backward"),
    [
        (F.relu, 1, 1),
        (F.gelu, 5, 11),
        (lambda x: F.gelu(x, approximate="tanh"), 9, 18),
        (F.mish, 5, 11),
        (F.elu, 5, 7),
        (F.hardswish, 5, 5),
        (F.hardsigmoid, 4, 3),
        (F.hardtanh, 2, 2),
        (F.leaky_relu, 2, 2),
        (F.softplus, 3, 7),
        (F.logsigmoid, 6, 6),
        (F.softshrink, 6, 2),
        (F.hardshrink, 2, 2),
        (lambda x: F.threshold(x, 0.1, 0.2), 1, 1),
        (torch.sigmoid, 1, 3),
        (torch.tanh, 1, 3),
    ],
)
def test_activation_forward_and_backward_cost_per_element(
    activation: Any, forward: int, backward: int
) -> None:
    x = real().requires_grad_()
    y = None

    def run() -> None:
        nonlocal y
        y = activation(x)
        y.backward(torch.ones(3, 5, 7))

    profile = profile_of(run, strict=True)
    assert profile.total("forward").flops == forward * N
    assert profile.total("backward").flops == backward * N


def test_prelu_backward_sums_the_gradient_of_its_weights() -> None:
    """x[3,5,7], w[5]: forward 2·n; backward 4·n and a sum of n to 5."""
    x, w = real().requires_grad_(), real(5).requires_grad_()
    profile = profile_of(lambda: F.prelu(x, w).backward(torch.ones(3, 5, 7)), strict=True)
    assert profile.total("forward").flops == 2 * N
    assert profile.total("backward").flops == 4 * N + (N - 5)


def test_glu_counts_half_of_its_input() -> None:
    x = real(3, 5, 14).requires_grad_()
    profile = profile_of(lambda: F.glu(x).backward(torch.ones(3, 5, 7)), strict=True)
    assert profile.total("forward").flops == 2 * N
    assert profile.total("backward").flops == 6 * N


def test_glu_tangents_match_the_product_rule() -> None:
    """glu's tangent: s, da·s, s·db, db - that, glu·that, sum: 6·n. Its backward's: 4 + 3 + 10."""
    half, whole = real(), real(3, 5, 14)
    aten = torch.ops.aten
    assert flops(aten.glu_jvp, half, whole, whole, -1) == 6 * N
    assert flops(aten.glu_backward_jvp, whole, half, whole, half, whole, -1) == 17 * N
