"""What simulated ranks and ``gather`` rely on in torch.distributed."""

from __future__ import annotations

import importlib
import inspect
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dispatch_flops import _torch


@pytest.fixture
def fake_rank() -> Iterator[None]:
    _torch.join_fake_group(3, 4)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("fake_rank")
def test_fake_group_has_the_rank_and_size_it_was_given() -> None:
    assert (distributed.get_rank(), distributed.get_world_size()) == (3, 4)
    assert distributed.get_backend() == "fake"


@pytest.mark.usefixtures("fake_rank")
def test_future_of_the_fake_group_has_no_value() -> None:
    """If this fails, ``completed_communication`` needs no handle of its own."""
    work = distributed.all_reduce(torch.ones(2), async_op=True)
    assert work.get_future().value() is None


def test_communication_operators_return_outputs_and_a_handle() -> None:
    for name in ("allreduce_", "broadcast_", "_allgather_base_", "scatter_"):
        returns = getattr(torch.ops.c10d, name).default._schema.returns
        assert [str(result.type).rpartition(".")[2] for result in returns][1:] == ["Work"]
    for name in ("send", "recv_", "barrier", "alltoall_base_"):
        assert len(getattr(torch.ops.c10d, name).default._schema.returns) == 1


def test_default_store_is_that_of_the_process_group() -> None:
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        _torch.default_store().set("dispatch_flops", "here")
    finally:
        distributed.destroy_process_group()
    assert any("dispatch_flops" in key for key in store.list_keys())


def test_fake_mode_is_left_for_a_block() -> None:
    with _torch.FakeTensorMode():
        with _torch.without_fake_mode():
            assert type(torch.ones(1)) is torch.Tensor
        assert isinstance(torch.ones(1), _torch.FakeTensor)


def test_mesh_computes_with_tensors_in_these_methods() -> None:
    assert {"__init__", "__getitem__", "mesh"} <= vars(DeviceMesh).keys()
    assert isinstance(vars(DeviceMesh)["mesh"], property)


@pytest.mark.usefixtures("fake_rank")
def test_ranks_of_a_mesh_are_numbered_by_this_argument() -> None:
    """If this fails, a simulated job cannot call ``init_device_mesh``."""
    with mock.patch.object(DeviceMesh, "__init__", return_value=None) as initialize:
        init_device_mesh("cpu", (2, 2))
    assert initialize.call_args.kwargs[_torch.RANK_MAP].tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("fake_rank")
def test_slice_of_a_mesh_knows_the_whole() -> None:
    """dispatch_flops relies on this for the mesh of a run (counting/ranks.py)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert _torch.whole_mesh(mesh["tp"]) is _torch.whole_mesh(mesh) is mesh


def test_ddp_compares_parameters_by_this_name() -> None:
    assert hasattr(importlib.import_module(_torch.DDP_MODULE), _torch.DDP_VERIFY)


def test_pipeline_stages_vote_in_the_schedule() -> None:
    from torch.distributed.pipelining import PipelineStage, stage

    if not hasattr(stage, "InferenceMode"):
        pytest.skip("this torch has no vote")
    votes = [hasattr(_torch.pipeline_schedule_class(), name) for name in _torch.PIPELINE_VOTES]
    assert votes.count(True) == 1
    _torch.join_fake_group(0, 2)
    try:
        part = PipelineStage(nn.Linear(3, 3), 0, 2, torch.device("cpu"))
        _torch.set_inference_modes([part], has_backward=True)
        assert part._inference_mode is stage.InferenceMode.DYNAMIC
    finally:
        distributed.destroy_process_group()


def test_sharding_caches_can_be_cleared() -> None:
    _torch.clear_sharding_caches()


def test_dtensor_asks_for_tracing_in_these_modules() -> None:
    """A fake tensor mode alone makes the answer yes."""
    modules = _torch.modules_that_ask_for_tracing()
    collectives = modules[0]
    assert collectives.__name__ == "torch.distributed._functional_collectives"
    assert len({getattr(module, _torch.ARE_WE_TRACING) for module in modules}) == 1
    with _torch.FakeTensorMode():
        assert getattr(collectives, _torch.ARE_WE_TRACING)()
    holding = {
        name
        for name, module in list(sys.modules.items())
        if name.startswith("torch.distributed") and hasattr(module, _torch.ARE_WE_TRACING)
    }
    assert holding == {module.__name__ for module in modules}


def test_results_of_functional_collectives_are_waited_for_by_these_operators() -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    for name in _torch.RESULT_OPERATORS:
        packet = getattr(torch.ops._c10d_functional, name.partition("::")[2])
        assert packet.default.name() == name
        tensor = torch.ones(3)
        result = _torch.collective_result(packet.default, tensor)
        inner = result.elem if isinstance(result, AsyncCollectiveTensor) else result
        assert inner is tensor


def test_sharded_parameter_of_fsdp2_is_reset_by_this_method() -> None:
    cls = _torch.fsdp_param_class()
    source = inspect.getsource(cls.reset_sharded_param)
    for name in ("_module_info", "sharded_param", "_sharded_param_data", "_local_tensor"):
        assert name in source


@pytest.mark.usefixtures("fake_rank")
@pytest.mark.parametrize("is_waited_for", [False, True])
def test_handle_of_a_reduction_is_held_until_it_is_asked(is_waited_for: bool) -> None:
    works = _torch.CompletedWorks()
    reduced = torch.ones(3)
    alive = weakref.ref(reduced)
    reduce = torch.ops.c10d.allreduce_.default
    handle = _torch.completed_communication(reduce, ([reduced], None), works)[1]
    del reduced, handle
    assert alive() is not None  # C++ holds what Python does not see
    (work,) = works._kept.values()
    if is_waited_for:
        assert work.wait() and not works._kept
    future = work.get_future()
    del work
    assert not works._kept and future.value()[0] is alive()
    del future
    assert alive() is None


@pytest.mark.usefixtures("fake_rank")
def test_handle_of_a_send_holds_what_is_sent_until_it_is_released() -> None:
    works = _torch.CompletedWorks()
    sent = torch.ones(3)
    alive = weakref.ref(sent)
    group = distributed.group.WORLD
    assert group is not None
    send = torch.ops.c10d.send.default
    handle = _torch.completed_communication(send, ([sent], group.boxed(), 1, 0), works)
    work = distributed.Work.unbox(handle)
    works.hand_over()
    del sent, handle
    assert work.wait() and alive() is not None
    del work
    assert alive() is None


@pytest.mark.parametrize(
    ("modules", "name"),
    [
        (_torch.ASKING_FOR_ALLOCATION, _torch.ALLOCATED),
        (_torch.MAKING_RESHARDING_MESH, _torch.RESHARDING_MESH),
        ([_torch.FOREACH_MODULE], _torch.FOREACH_TYPES),
    ],
)
def test_modules_of_torch_hold_what_simulated_ranks_replace(
    modules: Sequence[str], name: str
) -> None:
    for module in modules:
        assert hasattr(importlib.import_module(module), name)


def test_storage_of_a_flat_parameter_is_allocated_if_it_has_an_address() -> None:
    (utils, _) = map(importlib.import_module, _torch.ASKING_FOR_ALLOCATION)
    tensor = torch.ones(3)
    assert getattr(utils, _torch.ALLOCATED)(tensor)
    tensor.untyped_storage().resize_(0)
    assert not getattr(utils, _torch.ALLOCATED)(tensor)


def test_tensors_of_these_classes_are_passed_to_foreach_operators() -> None:
    module = importlib.import_module(_torch.FOREACH_MODULE)
    assert torch.Tensor in getattr(module, _torch.FOREACH_TYPES)


@pytest.mark.skipif(
    not hasattr(_torch.pipeline_stage_class(), _torch.STAGE_RELEASES), reason="since torch 2.15"
)
def test_stage_of_a_pipeline_releases_outputs_of_plain_tensors_alone() -> None:
    """If this fails, a simulated rank asks the stage itself."""
    asked = getattr(_torch.pipeline_stage_class(), _torch.STAGE_RELEASES)
    assert "type(output) is not torch.Tensor" in inspect.getsource(asked)


@pytest.mark.usefixtures("fake_rank")
def test_reducer_has_these_methods_which_can_be_replaced() -> None:
    """They read integers that they have written, for which fake tensors have no data."""
    calls: list[str] = []
    reducer = _torch.reducer_class()

    def noting(name: str) -> Any:
        method = getattr(reducer, name)

        def run(*args: Any) -> Any:
            calls.append(name)
            return method(*args)

        return run

    with ExitStack() as stack:
        for name in _torch.REDUCER_METHODS:
            stack.enter_context(mock.patch.object(reducer, name, noting(name)))
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 5), static_graph=True)
        model(torch.ones(2, 3))
    assert {*calls} == {*_torch.REDUCER_METHODS}
