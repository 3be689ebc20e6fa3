"""Tensor subclasses of torch's own, by which dispatch_flops tells plain tensors from wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dispatch_flops import _torch


class Types(TorchDispatchMode):
    """Keeps the classes that operators came with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[type, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(tuple(types))
        return func(*args, **(kwargs or {}))


def test_disabled_torch_dispatch_is_that_of_classes_that_add_nothing() -> None:
    """dispatch_flops relies on this for subclasses without operators of their own, as most are
    (counting/tensor_subclasses.py: ``is_plain``): so they are written, and ``nn.Parameter`` is one.
    """
    disabled = torch._C._disabled_torch_dispatch_impl

    class Named(Tensor):
        __torch_dispatch__ = disabled

    assert Named.__torch_dispatch__ is disabled, "the class must keep the very same function"
    x = torch.ones(2).as_subclass(Named)
    assert torch.equal(x + 1, torch.full((2,), 2.0))


def test_subclass_without_torch_dispatch_has_the_disabled_one() -> None:
    """dispatch_flops relies on this for subclasses that override ``__torch_function__`` alone
    (counting/tensor_subclasses.py: ``is_plain``).
    """

    class Named(Tensor):
        pass

    assert Named.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


def test_fake_tensor_has_no_data_but_the_shape_and_device_of_one() -> None:
    """dispatch_flops relies on this for tensors without data (operators/tensors.py,
    counting/placement.py).
    """
    with FakeTensorMode():
        fake = torch.ones(2, 3)
    assert isinstance(fake, FakeTensor)
    assert (fake.shape, fake.device.type, fake.is_meta) == ((2, 3), "cpu", False)


def test_fake_tensor_reaches_a_mode_above_fake_tensor_mode_once() -> None:
    """dispatch_flops relies on this for counting fakes (counting/tensor_subclasses.py): whatever
    the order of entering, the user's mode sees each operator, once, before fakes are made of it.
    """
    for outer, inner in ((FakeTensorMode(), Types()), (Types(), FakeTensorMode())):
        mode = inner if isinstance(inner, Types) else outer
        with outer, inner:
            torch.ones(2, 3).sin()
        assert len(mode.seen) == 2, f"two operators were run, and {len(mode.seen)} were seen"


def test_jagged_nested_tensor_is_a_nested_tensor_and_the_strided_one_is_not() -> None:
    """dispatch_flops relies on this for what not to take apart (counting/dispatch_mode.py:
    ``_dispatch_on_subclass``).
    """
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert isinstance(jagged, NestedTensor)
    with Types() as mode:
        torch.sin(jagged)
    assert any(NestedTensor in types for types in mode.seen)


def test_strided_nested_tensor_keeps_its_sizes_in_a_tensor() -> None:
    """dispatch_flops relies on this for costs of strided nested tensors, whose ``shape`` raises
    (operators/tensors.py: ``nested_sizes``).
    """
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a prototype
        strided = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    assert strided.is_nested and strided.layout == torch.strided
    assert strided._nested_tensor_size().tolist() == [[2, 3], [4, 3]]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # before torch 2.13
def test_sparse_tensor_gives_its_indices_and_values() -> None:
    """dispatch_flops relies on this for bytes and costs of COO tensors (operators/tensors.py),
    uncoalesced ones included, for which the public ``values()`` raises.
    """
    indices, values = [[0, 0, 1]], [1.0, 2.0, 3.0]
    sparse = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
    assert not sparse.is_coalesced()
    assert (sparse._indices().shape, sparse._values().shape, sparse._nnz()) == ((1, 3), (3,), 3)


def test_is_lazy_is_true_of_parameters_without_shape() -> None:
    """dispatch_flops relies on this for counting lazy parameters as 0 (counting/parameters.py)."""
    lazy = torch.nn.LazyLinear(3)
    assert torch.nn.parameter.is_lazy(lazy.weight)
    assert not torch.nn.parameter.is_lazy(torch.nn.Linear(2, 3).weight)


def test_wrapper_subclass_names_its_inner_tensors() -> None:
    """dispatch_flops relies on this for the memory of wrappers (memory/storages.py)."""
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged)
    assert _torch.is_wrapper_subclass(nested)
    names, _ = nested.__tensor_flatten__()  # type: ignore[attr-defined]
    assert sum(getattr(nested, name).numel() for name in names if name == "_values") == 3 + 5
    assert not _torch.is_wrapper_subclass(torch.ones(3))
    assert not _torch.is_wrapper_subclass(torch.nn.Parameter(torch.ones(3)))
