"""Comparisons of tensors in C++, by which calls that are like earlier ones are found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dispatch_flops import _torch

aten = torch.ops.aten


def test_tensors_are_the_same_if_all_that_a_cost_depends_on_is() -> None:
    """dispatch_flops relies on this for the costs of repeated calls (counting/known_calls.py)."""
    x, y = torch.ones(3, 5), torch.ones(5, 7)
    is_same = _torch.tensor_comparison((x, y))
    assert is_same(x, y)
    assert is_same(torch.ones(3, 5), torch.ones(5, 7))
    assert is_same(torch.ones(3, 5, 2)[..., 0].contiguous(), y)
    others = [
        torch.ones(3, 6),
        torch.ones(4, 5),
        torch.ones(5, 3),
        torch.ones(5, 3).t(),
        torch.ones(3, 10)[:, :5],
        torch.ones(1, 5).expand(3, 5),
        torch.ones(1, 3, 5),
        torch.ones(3, 5, dtype=torch.int32),
        torch.ones(3, 5, dtype=torch.complex64).conj(),
        torch.ones(3, 5, device="meta"),
        torch.ones(3, 5).to_sparse(),
        torch.ones(3, 5).to_mkldnn(),
        torch.ones(3, 5, requires_grad=True),
        nn.Parameter(torch.ones(3, 5), requires_grad=False),
        None,
        2.0,
    ]
    assert not any(is_same(other, y) for other in others)


def test_tensor_that_is_given_twice_is_never_the_same() -> None:
    """dispatch_flops relies on this to read its memory once (counting/known_calls.py)."""
    x = torch.ones(3, 3)
    is_same = _torch.tensor_comparison((x, torch.ones(3, 3)))
    assert not is_same(x, x)


def test_tensors_without_elements_or_dimensions_are_compared() -> None:
    is_same = _torch.tensor_comparison((torch.ones(()), torch.ones(0, 3)))
    assert is_same(torch.ones(()), torch.ones(0, 3))
    assert not is_same(torch.ones(1), torch.ones(0, 3))
    assert not is_same(torch.ones(()), torch.ones(3, 0))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_share_a_storage(device: str) -> None:
    """dispatch_flops relies on this for bytes that several arguments show."""
    x, y = torch.ones(6, device=device), torch.ones(6, device=device)
    assert _torch.share_storage((x[:3], y, x[3:]))
    assert _torch.share_storage((x, x.detach()))
    assert _torch.share_storage((x, x))
    assert not _torch.share_storage((x, y))
    assert not _torch.share_storage((x,))
    assert not _torch.share_storage((x, None, y, None))
    assert _torch.share_storage((x[:3], None, x[3:]))
    assert not _torch.share_storage(())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_known_without_their_shape() -> None:
    """dispatch_flops relies on this never to compare one, which ends the process."""
    nested = torch.nested.as_nested_tensor([torch.ones(3, 5)])
    with pytest.raises(RuntimeError):
        _ = nested.shape
    assert nested.is_nested
    assert not nn.Parameter(torch.ones(3)).is_nested
    with pytest.raises((RuntimeError, NotImplementedError)):
        aten.addmm.default(torch.ones(5), nested, torch.ones(5, 5))
