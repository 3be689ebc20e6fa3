"""Which storages a tensor consists of, and memory of tensors that consist of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _disable_current_modes

from dispatch_flops import FlopCounterMode, _torch
from dispatch_flops.memory.storages import allocation_of, storages_of, tensors_taken
from tests.helpers.allocator import counted_peak_bytes, peak_bytes

Step = Callable[[Tensor, Tensor], Tensor]
F32, I64 = 4, 8
aten = torch.ops.aten


@pytest.fixture
def ranks() -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield 4
    dist.destroy_process_group()


def nbytes(tensor: torch.Tensor) -> list[int]:
    return [storage.nbytes() for storage, _ in storages_of(tensor)]


def test_storages_of_a_sparse_tensor_are_those_of_its_parts() -> None:
    dense = torch.eye(5)
    assert nbytes(dense.to_sparse()) == [2 * 5 * I64, 5 * F32]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_storages_of_a_compressed_tensor_are_those_of_its_parts() -> None:
    ends, at, values = torch.arange(6), torch.arange(5), torch.ones(5)
    rows = torch.sparse_csr_tensor(ends, at, values, (5, 5), check_invariants=False)
    columns = torch.sparse_csc_tensor(ends, at, values, (5, 5), check_invariants=False)
    assert nbytes(rows) == nbytes(columns) == [6 * I64, 5 * I64, 5 * F32]


def test_storages_of_a_jagged_tensor_include_its_values() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    assert (2 + 4) * 3 * F32 in nbytes(nested)


def test_opaque_tensor_has_no_storages() -> None:
    if torch.backends.mkldnn.is_available():
        assert nbytes(torch.eye(3).to_mkldnn()) == []


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.mm.default, "result"),
        (aten.view.default, "none"),
        (aten.add_.Tensor, "in place"),
        (aten._foreach_add_.List, "none"),
        (aten.add.out, "argument"),
        (aten.resize_.default, "argument"),
        (aten.set_.source_Storage, "argument"),
        (aten.lift_fresh.default, "arrival"),
        (aten._efficientzerotensor.default, "none"),
        (aten.mul.Scalar, "result or zeros"),
    ],
)
def test_allocation_of_an_operator_follows_from_its_schema(op: object, expected: str) -> None:
    assert allocation_of(op) == expected


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.empty.memory_format, "none"),
        (aten.view.default, "one"),
        (aten.add.Tensor, "two"),
        (aten.mm.default, "two"),
        (aten.addmm.default, "three"),
        (aten.mm.out, "any"),
        (aten.cat.default, "any"),
        (aten.index.Tensor, "any"),
        (aten.native_layer_norm.default, "any"),
        (aten.normal.float_Tensor, "any"),
        (torch.ops.higher_order.cond, "any"),
    ],
)
def test_tensors_taken_by_an_operator_follow_from_its_schema(op: object, expected: str) -> None:
    assert tensors_taken(op) == expected


def test_sharded_parameters_count_with_this_ranks_shard(ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    model = nn.Linear(8, 12, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    x = distribute_tensor(torch.ones(3, 8), mesh, [Replicate()])
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model(x)
    memory = counter.profile.memory
    assert memory is not None
    assert memory.by_role()["parameters"] == 8 * 12 * F32 // ranks
    assert counter.profile.root.memory is not None
    assert counter.profile.root.memory.own.parameters == 8 * 12 * F32 // ranks
    with FlopCounterMode(model, display=False, memory=True, memory_rounding=512) as counter:
        model(x)
    assert counter.profile.root.memory is not None
    assert counter.profile.root.memory.own.parameters == 512


@pytest.mark.parametrize(
    "run",
    [lambda x: x.sum(1, dtype=torch.float64), lambda x: x.sort(1)],
    ids=["sum", "sort"],
)
def test_workspace_on_a_sharded_tensor_is_that_of_this_ranks_shard(
    ranks: int, run: Callable[[Tensor], object]
) -> None:
    """The first counts for the bytes of its workspace, the other is asked of the allocator."""
    mesh, shard = init_device_mesh("cpu", (ranks,)), torch.rand(7, 101)
    whole = DTensor.from_local(shard, mesh, [Shard(0)])
    found = []
    for x in (shard, whole):
        with FlopCounterMode(display=False, memory=True) as counter:
            run(x)
        memory = counter.profile.memory
        assert memory is not None
        found.append((memory.peak_bytes, memory.by_role().get("workspace"), memory.unseen))
    assert found[0] == found[1]


class OfNoOperator(TwoTensor):
    """A pair whose sums with others are computed where no mode sees it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        with _disable_current_modes():
            return super().__torch_dispatch__(func, types, args, kwargs)


def test_result_that_a_subclass_makes_with_modes_disabled_is_allocated() -> None:
    pair = OfNoOperator(torch.ones(101), torch.ones(101))
    with FlopCounterMode(display=False, memory=True) as counter:
        total = pair + 1
        torch.ones(3)
    assert counter.profile.memory is not None
    assert counter.profile.memory.peak_bytes == (2 * 101 + 2 * 101 + 3) * F32
    del total


def test_fake_tensors_count_as_if_they_had_data() -> None:
    with FakeTensorMode():
        model, x = nn.Linear(3, 5, bias=False), torch.ones(2, 3)
        with FlopCounterMode(model, display=False, memory=True) as counter:
            model(x)
    assert counter.profile.memory is not None
    assert counter.profile.memory.peak_bytes == (3 * 5 + 2 * 3 + 2 * 5) * F32


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "step",
    [torch.mul, torch.div, lambda x, w: torch.add(x, w, alpha=2)],
    ids=["mul", "div", "add, alpha=2"],
)
def test_zero_tangents_of_forward_mode_take_no_memory(step: Step) -> None:
    """Each step makes that of ``w``; the more steps, the more would be counted."""
    x, w, tangent = torch.rand(3, 101).unbind()

    def run() -> None:
        with forward_ad.dual_level():
            y = forward_ad.make_dual(x, tangent)
            for _ in range(5):
                y = step(y, w)

    run()
    assert counted_peak_bytes(run, None) == peak_bytes(run, [x, w, tangent])


def test_arrays_beside_each_other_count_once_each() -> None:
    """The memory of the last is also shown by its first and its last elements."""
    data = np.ones((3, 101), dtype=np.float32)
    rows = [torch.from_numpy(data[at]) for at in (1, 0, 2)]  # after it, before it
    with FlopCounterMode(display=False, memory=True) as counter:
        for x in rows:
            x.sum()
        for part in (data[2, :7], data[2, 94:]):
            torch.from_numpy(part).sum()
    assert counter.profile.memory is not None
    assert counter.profile.memory.by_role()["inputs"] == 3 * 101 * F32
    assert counter.profile.memory.peak_bytes == 3 * 101 * F32 + F32  # with one sum


def test_parameter_of_a_class_that_refuses_unknown_functions_is_held() -> None:
    class Refusing(nn.Parameter):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            assert getattr(func, "__name__", "") != "_is_zerotensor"
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    model = nn.Linear(5, 3, bias=False)
    model.weight = Refusing(torch.ones(3, 5))
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model(torch.ones(2, 5))
    assert counter.profile.memory is not None
    assert counter.profile.memory.by_role()["parameters"] == 3 * 5 * F32


def test_tensors_from_data_count_from_their_arrival() -> None:
    with FlopCounterMode(display=False, memory=True) as counter:
        first = torch.tensor([1.0] * 7)
        del first
        torch.tensor([1.0] * 11)
    assert counter.profile.memory is not None
    assert counter.profile.memory.peak_bytes == 11 * F32


def test_tensor_from_data_that_arrives_after_a_backward_pass_is_no_input() -> None:
    """A later step begins with it."""
    weight = torch.ones(3, requires_grad=True)
    with FlopCounterMode(display=False, memory=True) as counter:
        weight.sum().backward()
        data = torch.tensor([1.0] * 101)
    assert counter.profile.memory is not None
    assert counter.profile.memory.by_role()["activations"] == data.nbytes == 101 * F32


def test_offloading_from_the_cpu_to_itself_takes_no_memory() -> None:
    x = torch.ones(101, requires_grad=True)
    with FlopCounterMode(display=False, memory=True) as counter:
        with torch.autograd.graph.save_on_cpu():
            total = x.exp().sum()
        del total
    assert counter.profile.memory is not None
    # x, its exponential and the sum.
    assert counter.profile.memory.peak_bytes == 2 * 101 * F32 + F32


def test_tensors_by_which_dtensor_infers_a_shape_are_not_memory(ranks: int) -> None:
    """It runs the operator on fake tensors of the whole size, the first time that it meets it."""
    mesh = init_device_mesh("cpu", (ranks,))
    a = distribute_tensor(torch.ones(2 * ranks, 5), mesh, [Shard(0)])
    b = distribute_tensor(torch.ones(5, 7), mesh, [Replicate()])
    _torch.clear_sharding_caches()
    peaks = []
    for _ in range(2):
        with FlopCounterMode(display=False, memory=True) as counter:
            a @ b
        assert counter.profile.memory is not None
        peaks.append(counter.profile.memory.peak_bytes)
    assert peaks == [F32 * (2 * 5 + 5 * 7 + 2 * 7)] * 2
