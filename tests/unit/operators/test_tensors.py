"""Properties of tensors: what they store, whether they have data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch_flops.operators.tensors import (
    has_no_data,
    is_given,
    is_inexact,
    is_inexact_dtype,
    stored_elements,
    tensors_in,
    untraced,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

DENSE = torch.zeros(6, 6)
DENSE[0, 1] = DENSE[2, 3] = DENSE[5, 5] = 1.0


@dataclass
class Output:
    logits: Tensor
    states: tuple[Tensor, ...]
    loss: Tensor | None = None


def test_tensors_in_finds_tensors_in_every_container() -> None:
    a, b, c, d, e = (torch.full((1,), float(i)) for i in range(5))
    nested = [a, (1, {"x": b}), Output(logits=c, states=(d,)), "text", None, deque([e])]
    assert [int(t) for t in tensors_in(nested)] == [0, 1, 2, 3, 4]


def test_tensors_in_ends_in_a_container_that_holds_itself() -> None:
    output: dict[str, object] = {"y": torch.tensor(0)}
    output["parts"] = [output, torch.tensor(1)]
    assert [int(t) for t in tensors_in(output)] == [0, 1]
    first, second, third = [torch.tensor(0)], [torch.tensor(1)], [torch.tensor(2)]
    for holder, held in ((first, second), (second, third), (third, first), (first, first)):
        holder.append(held)  # type: ignore[arg-type]
    assert [int(t) for t in tensors_in(first)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, True), (torch.complex64, True), (torch.int8, False), (torch.bool, False)],
)
def test_is_inexact_of_dtype_and_tensor_agree(dtype: torch.dtype, expected: bool) -> None:
    assert is_inexact_dtype(dtype) == expected
    assert (
        is_inexact(None, torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=dtype)) == expected
    )


def test_is_given_of_none_or_an_empty_tensor_is_false() -> None:
    assert not is_given(None)
    assert not is_given(torch.empty(0))
    assert is_given(torch.ones(1))


@pytest.mark.parametrize(
    ("make", "elements"),
    [
        (lambda: DENSE, 6 * 6),
        (lambda: DENSE.to_sparse(), 3),
        (lambda: DENSE.to_sparse_csr(), 3),
        (lambda: DENSE.to_sparse_csc(), 3),
        (lambda: DENSE.to_sparse_bsr((2, 3)), 3 * 2 * 3),
        (lambda: DENSE.to_sparse_bsc((2, 3)), 3 * 2 * 3),
    ],
    ids=["strided", "coo", "csr", "csc", "bsr", "bsc"],
)
def test_stored_elements_of_every_layout(make: Callable[[], Tensor], elements: int) -> None:
    assert stored_elements(make()) == elements


def test_has_no_data_of_meta_and_fake_tensors_is_true() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    assert has_no_data(fake)
    assert has_no_data(torch.ones(2, device="meta"))
    assert not has_no_data(torch.ones(2))
    assert not has_no_data(3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_untraced_during_jit_trace_adds_nothing_to_the_graph() -> None:
    def call(x: Tensor) -> Tensor:
        with untraced():
            assert x.shape[0] * 2 == 6
        return x + 1

    traced = torch.jit.trace(call, (torch.ones(3),))
    assert [node.kind() for node in traced.graph.nodes()] == ["prim::Constant"] * 2 + ["aten::add"]
