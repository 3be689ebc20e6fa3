"""einsum under the counter costs what contracting its operands two at a time costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles import contractions as define
from tests.oracles.comparing import check, examples, flag, macs_of, size, tensor
from tests.oracles.counting import count

SIZES = {"a": 2, "b": 3, "c": 5, "d": 4, "e": 1}


@st.composite
def two_operands(draw: Any) -> str:
    """Any two terms, and an output of any of their letters in any order."""
    letters = st.permutations(list(SIZES)).map(lambda p: "".join(p))
    left, right = (draw(letters)[: draw(st.integers(1, 4))] for _ in "xy")
    both = draw(st.permutations(sorted(set(left + right))))
    return f"{left},{right}->{''.join(both[: draw(st.integers(0, len(both)))])}"


def _operands(equation: str, need: tuple[bool, ...] = ()) -> list[torch.Tensor]:
    terms = equation.split("->")[0].split(",")
    need = need or (False,) * len(terms)
    return [
        tensor(*(SIZES[c] for c in term), seed=i, grad=g)
        for i, (term, g) in enumerate(zip(terms, need, strict=False))
    ]


@examples(60)
@given(two_operands())
def test_einsum_of_two_operands_costs_its_definition(equation: str) -> None:
    operands = _operands(equation)
    check(lambda: torch.einsum(equation, *operands), count(define.einsum, equation, *operands))


@pytest.mark.parametrize(
    "equation", ["ab,bc->ac", "ab,cb->ca", "abc,acd->abd", "abc,cd->abd", "ab,ab->b", "abc,abc->a"]
)
@pytest.mark.parametrize("need", [(True, False), (False, True), (True, True)])
def test_einsum_backward_costs_its_definition(equation: str, need: tuple[bool, bool]) -> None:
    operands = _operands(equation, need)
    check(lambda: torch.einsum(equation, *operands), count(define.einsum, equation, *operands))


@pytest.mark.parametrize("equation", ["ab,bc,cd->ad", "ab,bc,ca->", "ab,ac,ad->bcd", "abc,bd,c->d"])
def test_einsum_of_three_operands_contracts_left_to_right(equation: str) -> None:
    operands = _operands(equation)
    with torch.backends.opt_einsum.flags(enabled=False):
        check(lambda: torch.einsum(equation, *operands), count(define.einsum, equation, *operands))


@examples(20)
@given(size, size, size, st.integers(2, 5), st.tuples(flag, flag))
def test_einsum_of_a_matrix_product_costs_as_matmul(
    b: int, m: int, n: int, k: int, need: tuple[bool, bool]
) -> None:
    x, y = tensor(b, m, k, grad=need[0]), tensor(b, k, n, grad=need[1], seed=1)
    assert macs_of(lambda: torch.einsum("bmk,bkn->bmn", x, y)) == macs_of(lambda: x @ y)


def test_einsum_in_every_call_style_costs_the_same() -> None:
    x, y = tensor(2, 3), tensor(3, 5)
    for call in (
        lambda: torch.einsum("ij,jk", x, y),
        lambda: torch.einsum("ij,jk->ik", [x, y]),
        lambda: torch.einsum(x, [0, 1], y, [1, 2], [0, 2]),
        lambda: torch.einsum("...j,jk->...k", x, y),
    ):
        assert macs_of(call) == (2 * 3 * 5, 0)
