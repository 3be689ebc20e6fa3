"""Storages: which tensors show the same memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch_flops import _torch


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_address_of_a_storage_is_the_same_for_its_views_alone(device: str) -> None:
    """dispatch_flops relies on this to count shared elements once (operators/memory.py)."""
    x, other = torch.ones(3, 5, device=device), torch.ones(3, 5, device=device)
    address = _torch.storage_address(x)
    for view in (x.t(), x[1:], x.detach(), x.view(torch.int32), x.view(15), x.expand(2, 3, 5)):
        assert _torch.storage_address(view) == address
    assert _torch.storage_address(other) != address
    assert _torch.storage_address(x.clone()) != address


def test_address_of_a_fake_tensors_storage_is_the_same_for_its_views() -> None:
    with FakeTensorMode():
        x, other = torch.ones(3, 5), torch.ones(3, 5)
        assert _torch.storage_address(x) == _torch.storage_address(x.t())
        assert _torch.storage_address(x) != _torch.storage_address(other)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_address_of_a_storage_of_a_tensor_without_one_raises() -> None:
    """dispatch_flops relies on this for costs that no signature tells (counting/signatures.py)."""
    dense = torch.eye(3)
    for tensor in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_mkldnn()):
        with pytest.raises(NotImplementedError):
            _torch.storage_address(tensor)
