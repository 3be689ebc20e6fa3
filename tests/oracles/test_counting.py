"""The counting numbers, on cases counted by hand."""

from __future__ import annotations

import torch

from tests.oracles import contractions as define
from tests.oracles.comparing import tensor
from tests.oracles.counting import Complex, Number, OperationCounts, count, dot


def test_number_counts_each_operation_once() -> None:
    counts = OperationCounts()
    a, b = Number(2.0, counts), Number(3.0, counts)
    assert ((a + b) * a - b / a).value == 10 - 1.5
    assert counts.operations == {"add": 1, "mul": 1, "sub": 1, "div": 1}
    assert counts.flops == 4 and counts.macs == 0


def test_dot_of_numbers_counts_one_mac_per_product() -> None:
    counts = OperationCounts()
    a = [Number(v, counts) for v in (1.0, 2.0, 3.0)]
    assert dot(zip(a, a, strict=True)).value == 14
    assert (counts.macs, counts.flops, counts.backward_macs) == (3, 2 * 3, 0)


def test_dot_of_complex_numbers_counts_four_macs_per_product() -> None:
    a = tensor(2, 3, dtype=torch.complex128)
    b = tensor(3, 5, dtype=torch.complex128, grad=True)
    assert count(define.mm, a, b).macs == 4 * (2 * 3 * 5)
    assert count(define.mm, a, b).backward_macs == 4 * (2 * 3 * 5)


def test_complex_sum_counts_two_flops_and_product_six() -> None:
    counts = OperationCounts()
    z = Complex(Number(1.0, counts), Number(2.0, counts))
    assert (z * z).value == (1 + 2j) ** 2 and counts.flops == 6
    assert (z + z).value == 2 + 4j and counts.flops == 6 + 2


def test_backward_macs_count_only_needed_gradients() -> None:
    for grad_a in (False, True):
        for grad_b in (False, True):
            a, b = tensor(2, 3, grad=grad_a), tensor(3, 5, grad=grad_b)
            assert count(define.mm, a, b).backward_macs == (grad_a + grad_b) * (2 * 3 * 5)


def test_needs_of_a_result_come_from_its_operands() -> None:
    def chain(x, v, w):  # type: ignore[no-untyped-def]
        return define.mm(define.mm(x, v), w)

    x, v, w = tensor(2, 3), tensor(3, 5, grad=True), tensor(5, 7)
    # dv only; then nothing for w, but its product's left factor depends on v.
    assert count(chain, x, v, w).backward_macs == 2 * 3 * 5 + 2 * 5 * 7


def test_backward_macs_of_a_product_are_two_products() -> None:
    """da = g b^T and db = a^T g, counted as products of their own."""
    a, b, g = tensor(2, 3), tensor(3, 5), tensor(2, 5)
    owed = count(define.mm, a.requires_grad_(), b.requires_grad_()).backward_macs
    with torch.no_grad():
        explicit = count(define.mm, g, b.T).macs + count(define.mm, a.T, g).macs
    assert owed == explicit == 2 * (2 * 3 * 5)
