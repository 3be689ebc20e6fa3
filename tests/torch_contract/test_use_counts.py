"""References to tensors and storages, by which memory finds what autograd computes in place."""

from __future__ import annotations

import torch

from dispatch_flops import _torch


def test_storage_of_one_tensor_has_two_references_and_a_view_adds_one() -> None:
    tensor = torch.ones(2, 3)
    storage = tensor.untyped_storage()
    assert _torch.storage_use_count(storage._cdata) == 2
    view = tensor.t()
    assert _torch.storage_use_count(storage._cdata) == 3
    del view
    assert _torch.storage_use_count(storage._cdata) == 2


def test_tensor_that_autograd_saves_has_one_more_reference() -> None:
    tensor = torch.ones(2, 3)
    alone = _torch.tensor_use_count(tensor)
    product = tensor * torch.ones(2, 3, requires_grad=True)
    assert _torch.tensor_use_count(tensor) == alone + 1
    del product
    assert _torch.tensor_use_count(tensor) == alone
