"""Bytes that tensors cover together, against an enumeration of their elements' addresses."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dispatch_flops.operators import memory
from dispatch_flops.operators.memory import has_overlap, nbytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


def addresses(tensor: Tensor) -> set[int]:
    """Return the address of every byte that a tensor shows, by way of its storage's indices."""
    storage, item = tensor.untyped_storage(), tensor.element_size()
    index = torch.arange(storage.nbytes() // item)
    shown = index.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    first = storage.data_ptr()
    return {first + item * i + byte for i in shown.flatten().tolist() for byte in range(item)}


def random_view(base: Tensor, draw: random.Random) -> Tensor:
    if draw.random() < 0.2:
        base = base.view(torch.int8)
    while True:
        shape = [
            draw.randint(0 if draw.random() < 0.05 else 1, 5) for _ in range(draw.randint(0, 4))
        ]
        strides = [draw.choice([0, 1, 2, 3, 4, 5, 6, 10, 12, 15, 20]) for _ in shape]
        offset = draw.randint(0, 20)
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if last < base.numel():
            return base.as_strided(shape, strides, offset)


def test_nbytes_of_random_views_is_that_of_the_addresses_they_show() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        dtype = draw.choice([torch.int8, torch.int16, torch.float32])
        base = torch.empty(draw.choice([30, 60, 200]), dtype=dtype)
        views = [random_view(base, draw) for _ in range(draw.choice([1, 1, 2, 3]))]
        shown = set().union(*map(addresses, views))
        assert nbytes(views) == len(shown), [(v.shape, v.stride(), v.dtype) for v in views]
        for view in views:
            overlaps = has_overlap(view.shape, view.stride())
            shared = len(addresses(view)) < view.numel() * view.element_size()
            assert overlaps or not shared


def test_element_that_two_indices_show_counts_once() -> None:
    """3 + 5 = 8: of eight sums of these strides, two are equal."""
    line = torch.empty(3 + 5 + 8 + 1, dtype=torch.int8)
    assert nbytes(line.as_strided((2, 2, 2), (3, 5, 8))) == 2 * 2 * 2 - 1


def test_nbytes_of_views_with_a_pattern_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of which a mask of every byte would take 4 GB and more."""
    monkeypatch.setattr(memory, "_LARGEST_MASK", 0)
    line = torch.empty(2**32, device="meta")
    assert nbytes(line.unfold(0, 1024, 256)) == 4 * 2**32
    assert nbytes(line.expand(2**20, -1)) == 4 * 2**32
    square = line.view(2**16, 2**16)
    assert nbytes(square, square.t()) == 4 * 2**32
    assert nbytes(square[:, 1:], square[:, :-1]) == 4 * 2**32
    assert nbytes(square[1:], square[:-1]) == 4 * 2**32
    even = square[:, ::2]
    assert nbytes(even, even.unflatten(1, (2**7, 2**8))) == 4 * 2**16 * 2**15
    assert nbytes(line[::2].unfold(0, 4, 2)) == 4 * 2**31  # windows of 4 at every second one
    query, key, value, _ = square.unflatten(1, (64, 4, 256)).unbind(2)
    assert nbytes(query, key, value) == 3 * 2**32
    planes = line.view(2**12, 2, 2**7, 2**12)[:, :1, :100]
    left, right = planes[..., : 5 * 2**9], planes[:, 0, :, 2 * 2**9 : 7 * 2**9]
    assert nbytes(left, right) == 4 * 2**12 * 100 * 7 * 2**9
    image = torch.empty(8, 3, 1001, 1003, device="meta")
    assert nbytes(image.unfold(2, 3, 1).unfold(3, 3, 1)) == 4 * 8 * 3 * 1001 * 1003


@pytest.mark.parametrize(
    ("make", "elements", "index_bytes"),
    [
        (lambda x: x, 6 * 6, 0),
        (lambda x: x.to_sparse(), 3, 8 * 2 * 3),
        (lambda x: x.to_sparse_csr(), 3, 8 * (7 + 3)),
        (lambda x: x.to_sparse_csc(), 3, 8 * (7 + 3)),
        (lambda x: x.to_sparse_bsr((2, 3)), 3 * 2 * 3, 8 * (4 + 3)),
        (lambda x: x.to_sparse_bsc((2, 3)), 3 * 2 * 3, 8 * (3 + 3)),
        (lambda x: x.to_mkldnn(), 6 * 6, 0),
    ],
    ids=["strided", "coo", "csr", "csc", "bsr", "bsc", "mkldnn"],
)
def test_nbytes_of_every_layout_is_what_it_stores(
    make: Callable[[Tensor], Tensor], elements: int, index_bytes: int
) -> None:
    dense = torch.zeros(6, 6)
    dense[0, 1] = dense[2, 3] = dense[5, 5] = 1.0
    assert nbytes(make(dense)) == 4 * elements + index_bytes


def test_nbytes_of_a_nested_tensor_counts_its_real_lengths() -> None:
    items = [torch.ones(2, 5), torch.ones(3, 5)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(items, layout=layout)
        assert nbytes([nested]) == 4 * (2 + 3) * 5
