"""One rank of a cluster in this process: a fake process group, its mesh and fake tensors."""

from __future__ import annotations

import importlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.modules.module import register_module_forward_pre_hook

from dispatch_flops import _torch
from dispatch_flops._torch import FakeTensor
from dispatch_flops.distributed.fake_tensors import SimulatedTensorMode
from dispatch_flops.distributed.messages import Mailbox, delivering, outside_fake_mode
from dispatch_flops.errors import TargetError

_WITH_PEERS = (
    "send_object_list", "recv_object_list", "broadcast_object_list", "scatter_object_list",
)  # fmt: skip
_GATHERING = ("all_gather_object", "gather_object")


@contextmanager
def virtual_rank(
    rank: int, mesh: Mapping[str, int], mode: SimulatedTensorMode, mailbox: Mailbox
) -> Iterator[DeviceMesh]:
    """Make this process one rank of a cluster for a block; yield the device mesh.

    Tensors that the block makes have no data. Process groups of the block, environment variables
    and everything of torch that is replaced here are as before after it.
    """
    world_size = math.prod(mesh.values())
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, _variables(rank, world_size)))
        # init_process_group names the rank in the tracebacks of this process, from then on.
        stack.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))
        _torch.join_fake_group(rank, world_size)
        stack.callback(distributed.destroy_process_group)
        _torch.clear_sharding_caches()
        stack.callback(_torch.clear_sharding_caches)
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        for owner, name, replacement in _replacements(mode, mailbox):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        # FSDP1 compares the addresses of shards, which are all 0 here.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        stack.enter_context(mode)
        yield device_mesh


@contextmanager
def training_models_of_the_job() -> Iterator[None]:
    """Raise TargetError in the block where a model is trained that was built before it.

    Its parameters have data. They would keep the gradients of this rank, which are fake tensors,
    and the next rank would add its own to them.
    """

    def check(module: nn.Module, args: object) -> None:
        own = module._parameters.values()
        if torch.is_grad_enabled() and any(map(_has_data_and_trains, own)):
            raise TargetError(
                f"the job trains a {type(module).__name__} that was built before it, and would "
                "leave simulated gradients on it; build the model in the job"
            )

    hook = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def _has_data_and_trains(parameter: nn.Parameter | None) -> bool:
    """Return True for a parameter that is not a fake tensor, which is of another type."""
    return type(parameter) is nn.Parameter and parameter.requires_grad and not parameter.is_meta


def _variables(rank: int, world_size: int) -> dict[str, str]:
    """Return what torchrun tells a process about its rank. Each rank has a machine of its own."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
    }


def _replacements(mode: SimulatedTensorMode, mailbox: Mailbox) -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and replacement of what needs data or peers."""
    for name in _torch.MESH_METHODS:
        if name in vars(DeviceMesh):
            yield DeviceMesh, name, _with_real_tensors(vars(DeviceMesh)[name])
    yield DeviceMesh, "__init__", _knowing_ranks(_with_real_tensors(DeviceMesh.__init__))
    for name in _WITH_PEERS:
        yield distributed, name, delivering(getattr(distributed, name), mailbox)
    for name in _GATHERING:
        yield distributed, name, _counted(outside_fake_mode(getattr(distributed, name)), mode)
    # All ranks run one program here, so the shapes of their parameters agree.
    ddp = importlib.import_module(_torch.DDP_MODULE)
    yield ddp, _torch.DDP_VERIFY, lambda *args, **kwargs: None
    reducer = _torch.reducer_class()
    for name in _torch.REDUCER_METHODS:
        yield reducer, name, _keeping_integers(getattr(reducer, name), mode)
    for module in _torch.modules_that_ask_for_tracing():
        yield module, _torch.ARE_WE_TRACING, torch.compiler.is_dynamo_compiling
    for module in _importing(_torch.ASKING_FOR_ALLOCATION, _torch.ALLOCATED):
        yield module, _torch.ALLOCATED, lambda tensor: tensor.untyped_storage().size() > 0
    for module in _importing(_torch.MAKING_RESHARDING_MESH, _torch.RESHARDING_MESH):
        made = getattr(module, _torch.RESHARDING_MESH)
        yield module, _torch.RESHARDING_MESH, outside_fake_mode(made)
    for module in _importing([_torch.FOREACH_MODULE], _torch.FOREACH_TYPES):
        classes = getattr(module, _torch.FOREACH_TYPES)
        yield module, _torch.FOREACH_TYPES, [*classes, FakeTensor]
    yield torch.utils, "swap_tensors", _forgetting(torch.utils.swap_tensors, mode)
    parameter = _torch.fsdp_param_class()
    yield parameter, "reset_sharded_param", _padding_once(parameter.reset_sharded_param)
    schedule = _torch.pipeline_schedule_class()
    for name in _torch.PIPELINE_VOTES:
        if hasattr(schedule, name):
            yield schedule, name, _agreeing(getattr(schedule, name), mode)
    stage = _torch.pipeline_stage_class()
    if hasattr(stage, _torch.STAGE_RELEASES):
        asked = getattr(stage, _torch.STAGE_RELEASES)
        yield stage, _torch.STAGE_RELEASES, _of_plain_tensors(asked)


def _importing(names: Iterable[str], attribute: str) -> list[Any]:
    """Import modules; return those that have the attribute, for releases of torch differ."""
    modules = [importlib.import_module(name) for name in names]
    return [module for module in modules if hasattr(module, attribute)]


def _with_real_tensors(member: Any) -> Any:
    if isinstance(member, property):
        assert member.fget is not None
        return property(outside_fake_mode(member.fget))
    return outside_fake_mode(member)


def _forgetting(swap: Callable[..., Any], mode: SimulatedTensorMode) -> Callable[..., Any]:
    """Return a function that swaps tensors, also those of which the mode has weak references."""

    def run(*args: Any) -> Any:
        _torch.forget_conversions(mode)
        return swap(*args)

    return run


def _counted(gather: Callable[..., Any], mode: SimulatedTensorMode) -> Callable[..., Any]:
    """Return a function that gathers objects; it gathers as many of this rank's own."""

    def run(*args: Any, **kwargs: Any) -> Any:
        mode.objects_gathered += 1
        return gather(*args, **kwargs)

    return run


def _knowing_ranks(initialize: Callable[..., None]) -> Callable[..., None]:
    """Return DeviceMesh's constructor so that it knows the ranks that ``init_device_mesh`` passes.

    Where a job calls that, they are in a fake tensor.
    """

    def run(*args: Any, **kwargs: Any) -> None:
        ranks = kwargs.get(_torch.RANK_MAP)
        if isinstance(ranks, FakeTensor):
            with _torch.without_fake_mode():
                kwargs[_torch.RANK_MAP] = torch.arange(ranks.numel(), dtype=ranks.dtype)
        initialize(*args, **kwargs)

    return run


def _padding_once(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return FSDP2's reset of a sharded parameter, which keeps a shard that it has padded."""

    def run(parameter: Any) -> None:
        module = parameter._module_info
        current = getattr(module.module, module.param_name)
        kept = parameter._sharded_param_data.untyped_storage()
        if current is parameter.sharded_param and (
            current._local_tensor.untyped_storage()._cdata == kept._cdata
        ):
            return
        reset(parameter)

    return run


def _keeping_integers(
    function: Callable[..., Any], mode: SimulatedTensorMode
) -> Callable[..., Any]:
    """Return the function so that the integers in its tensors can be read."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode.integers_kept():
            return function(*args, **kwargs)

    return run


def _of_plain_tensors(asked: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a question about an output of a stage, to which a fake tensor is a plain one."""
    plain = torch.empty(0)

    def ask(stage: Any, output: Any) -> Any:
        return asked(stage, plain if type(output) is FakeTensor else output)

    return ask


def _agreeing(vote: Callable[..., None], mode: SimulatedTensorMode) -> Callable[..., None]:
    """Return the vote of pipeline stages; the stages of other ranks vote as those of this one."""

    def run(schedule: Any, stages: Any, has_backward: bool, *args: Any, **kwargs: Any) -> None:
        # Stages refuse to vote where the backend is called "fake".
        with mode.values_known(), mock.patch.object(distributed, "get_backend", lambda _: "gloo"):
            vote(schedule, stages, has_backward, *args, **kwargs)
        _torch.set_inference_modes(stages, has_backward)

    return run
