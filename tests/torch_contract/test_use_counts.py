"""References to tensors and storages, by which memory finds what autograd computes in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class FirstTerms(TorchDispatchMode):
    """Notes the references to the first term of each sum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor:
            self.counts.append(_torch.tensor_use_count(args[0]))
        return out


def test_sum_of_gradients_that_only_the_engine_holds_has_four_references() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    loss = (x.sin() + x.cos()).sum()
    with FirstTerms() as terms:
        loss.backward()
    assert terms.counts == [4]


def test_sum_of_gradients_that_begins_another_sum_has_five_references() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    one, two, three = (x.view(2, 3) for _ in range(3))
    loss = (one + two).mean() + (one + three).mean()
    with FirstTerms() as terms:
        loss.backward()
    assert terms.counts == [5, 4, 4]  # of ``one``; of ``x``, twice
