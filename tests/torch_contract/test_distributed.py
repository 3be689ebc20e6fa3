"""What communication is attributed by: names and attributes of torch.distributed."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.counting import communication_causes
from dispatch_flops.operators.communication import FORMS

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def test_fsdp2_parameter_group_has_its_modules_and_training_state() -> None:
    """counting/communication_causes.py relies on this for the module that FSDP2 gathers for."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param_group

    assert _fsdp_param_group.__name__ == _torch.FSDP2
    source = inspect.getsource(_fsdp_param_group.FSDPParamGroup.__init__)
    assert "self.modules = modules" in source
    assert "self._training_state = " in source
    names = {state.name for state in _fsdp_common.TrainingState}
    assert {"PRE_BACKWARD", "POST_BACKWARD"} <= names & communication_causes._BACKWARD_STATES


def test_fsdp1_handle_has_its_module_and_training_state() -> None:
    """counting/communication_causes.py relies on this for the module that FSDP1 gathers for."""
    from torch.distributed.fsdp import _common_utils, _flat_param, _runtime_utils

    assert (_flat_param.__name__, _runtime_utils.__name__) == _torch.FSDP1
    source = inspect.getsource(_flat_param.FlatParamHandle.__init__)
    assert "self._fully_sharded_module = " in source
    assert "self._training_state = " in source
    names = {state.name for state in _common_utils.HandleTrainingState}
    assert {"BACKWARD_PRE", "BACKWARD_POST"} <= names & communication_causes._BACKWARD_STATES
    assert "handle" in inspect.signature(_runtime_utils._reduce_grad).parameters


def test_replicate_makes_a_data_parallel_model_at_the_first_call() -> None:
    """counting/module_names.py relies on this for the module whose gradients are averaged."""
    replicate = importlib.import_module(_torch.REPLICATE)
    model = replicate.replicate(nn.Linear(3, 5))
    assert isinstance(model, replicate.DDP)
    assert _torch.data_parallel_model(model) is None
    assert "self._ddp = DistributedDataParallel(" in inspect.getsource(replicate._ReplicateState)


def test_flat_parameter_knows_the_parameters_that_it_consists_of() -> None:
    """counting/sharded_parameters.py relies on this for FSDP1's parameters."""
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        _flat_param,
        _unshard_param_utils,
    )

    assert {"_param_infos", "_shard_param_infos", "_numels", "_params", "_shared_param_infos"} <= (
        _flat_param.FlatParameter.__annotations__.keys()
    )
    assert {"module", "param_name"} <= set(_flat_param.ParamInfo._fields)
    assert {"module", "prim_module", "prim_param_name"} <= set(_flat_param.SharedParamInfo._fields)
    assert "numel_in_shard" in _flat_param._ShardParamInfo._fields
    assert "_handle" in inspect.getsource(FullyShardedDataParallel)
    assert "flat_param" in inspect.getsource(_flat_param.FlatParamHandle)
    assert _unshard_param_utils.FLAT_PARAM == _torch.FLAT_PARAMETER


def test_pipelines_name_their_setup_and_the_direction_of_what_they_send() -> None:
    """counting/communication_causes.py relies on this for the phase of sends and receives."""
    from torch.distributed.pipelining import schedules

    assert schedules.__name__ == _torch.PIPELINES
    single, multi = schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti
    assert {"_initialize_stage"} <= vars(single).keys() & communication_causes._SETUP
    assert {"_initialize_stages"} <= vars(multi).keys() & communication_causes._SETUP
    assert "desc" in inspect.signature(schedules._batch_p2p).parameters
    actions = {action.name for action in schedules._ComputationType}
    assert actions >= communication_causes._BACKWARD_ACTIONS
    source = inspect.getsource(schedules)
    assert 'desc="bwd_send_fwd_recv"' in source
    assert "def _perform_action(action: _Action)" in source


@pytest.mark.parametrize("name", [_torch.FSDP2, *_torch.FSDP1, _torch.PIPELINES])
def test_functions_whose_variables_are_read_do_not_call_locals(name: str) -> None:
    """counting/python_frames.py relies on this: it empties the mapping that ``locals`` returns."""
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    assert "locals" not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_arguments_of_communication_operators_have_the_names_of_the_table() -> None:
    """operators/communication.py relies on this for what is sent and received."""
    import torch.distributed._functional_collectives
    import torch.distributed.tensor

    schemas = {schema.name: schema for schema in torch._C._jit_get_all_schemas()}
    for name, form in FORMS.items():
        if name in schemas:
            arguments = {argument.name for argument in schemas[name].arguments}
            assert {form.source, form.target or form.source} <= arguments, name
            assert arguments & {"process_group", "group_name"}, name


def test_group_of_an_operator_is_found_by_object_and_by_name(tmp_path: Path) -> None:
    """operators/communication.py relies on this for the ranks that take part."""
    dist.init_process_group(
        "gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1)
    )
    try:
        world = dist.group.WORLD
        assert world is not None
        assert _torch.process_group(world) is world
        assert _torch.process_group(world.group_name) is world
        assert _torch.process_group(world.boxed()).group_name == world.group_name
        assert _torch.ranks_of_group(world) == (0,)
        assert world.group_desc == "default_pg"
    finally:
        dist.destroy_process_group()
