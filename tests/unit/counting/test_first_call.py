"""What a profile records of the call that it profiles: input tensors, modes, versions, date."""

from __future__ import annotations

import datetime
import functools
import inspect
import json
import platform
import subprocess
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import dispatch_flops
from dispatch_flops import FlopCounterMode, Profile, profile_model
from dispatch_flops.counting import first_call, placement
from dispatch_flops.profile import RunInfo, TensorInput
from dispatch_flops.profilers.training import StepProfiler


class Attend(nn.Module):
    """Takes a tensor, nested ones and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor, cache: Any = None, *, flag: bool = False) -> Any:
        return self.linear(x)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens[None])


def run_of(model: nn.Module, *args: Any, mods: Any = "model", **kwargs: Any) -> RunInfo:
    with FlopCounterMode(model if mods == "model" else mods, display=False) as counter:
        model(*args, **kwargs)
    return counter.profile.run


def tensor_input(name: str, *shape: int, dtype: str = "float32") -> TensorInput:
    return TensorInput(name=name, shape=shape, dtype=dtype, device="cpu")


@pytest.mark.parametrize("container", [list, tuple, deque])
def test_inputs_of_a_call_are_named_and_described(container: Any) -> None:
    tensors = torch.ones(2, 11), torch.ones(13)
    cache = [container(tensors), {"mask": torch.ones(3, dtype=torch.bool)}]
    expected = (
        tensor_input("x", 3, 7),
        tensor_input("cache.0.0", 2, 11),
        tensor_input("cache.0.1", 13),
        tensor_input("cache.1.mask", 3, dtype="bool"),
    )
    assert run_of(Attend(), torch.ones(3, 7), cache, flag=True).inputs == expected
    assert run_of(Attend(), torch.ones(3, 7), cache=cache).inputs == expected
    assert run_of(Attend(), x=torch.ones(3, 7), cache=cache).inputs == expected


@pytest.mark.parametrize("kwargs", [{}, {"device": "meta"}, {"backward": True}])
def test_profile_model_records_its_inputs(kwargs: dict[str, Any]) -> None:
    (found,) = profile_model(Attend(), input_shape=(3, 7), **kwargs).run.inputs or ()
    device = kwargs.get("device", "cpu")
    assert found == TensorInput(name="x", shape=(3, 7), dtype="float32", device=device)


def test_profile_model_of_another_method_records_its_inputs_not_forwards() -> None:
    profile = profile_model(Attend(), args=[torch.ones(3, 7)], mode="encode")
    assert profile.run.inputs == (tensor_input("tokens", 3, 7),)


def test_first_of_several_calls_is_recorded() -> None:
    model = Attend()
    with FlopCounterMode(model, display=False) as counter:
        for rows in (3, 11):
            model(torch.ones(rows, 7))
    assert counter.profile.run.inputs == (tensor_input("x", 3, 7),)


def test_counter_without_a_model_or_with_several_records_the_first_call() -> None:
    model, loss = Attend(), nn.MSELoss()
    assert run_of(model, torch.ones(3, 7), mods=None).inputs == (tensor_input("x", 3, 7),)
    mods = [loss, model]
    assert run_of(model, torch.ones(3, 7), mods=mods).inputs == (tensor_input("x", 3, 7),)


def test_compiled_model_records_the_inputs_of_the_eager_one() -> None:
    compiled = torch.compile(Attend(), backend="eager")
    expected = (tensor_input("x", 3, 7),)
    assert run_of(compiled, torch.ones(3, 7)).inputs == expected
    assert profile_model(compiled, args=[torch.ones(3, 7)]).run.inputs == expected


def test_inputs_changed_by_the_call_are_as_they_were_before() -> None:
    class Appends(Attend):
        def forward(self, x: torch.Tensor, cache: Any = None, *, flag: bool = False) -> Any:
            cache.append(x)
            return self.linear(x)

    run = run_of(Appends(), torch.ones(3, 7), cache=[torch.ones(2)])
    assert run.inputs == (tensor_input("x", 3, 7), tensor_input("cache.0", 2))


def test_step_profiler_records_the_first_micro_batch() -> None:
    model = Attend().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profiler = StepProfiler(model, optimizer, {"enabled": True, "profile_step": 1})
    with profiler.step(samples=3):
        model(torch.ones(3, 7)).sum().backward()
        optimizer.step()
    run = profiler.profile.run
    assert run.inputs == (tensor_input("x", 3, 7),)
    assert (run.training, run.grad_mode) == (True, "grad")


def test_without_a_call_of_the_model_inputs_are_unknown() -> None:
    model = Attend()
    with FlopCounterMode(model, display=False) as counter:
        model.forward(torch.ones(3, 7))
    run = counter.profile.run
    assert (run.inputs, run.training, run.grad_mode) == (None, None, None)


@dataclass
class Batch:
    x: torch.Tensor
    itself: Any = None


class Damaged(dict[str, Any]):
    """Raises when it is read."""

    def items(self) -> Any:
        raise RuntimeError("damaged")


class Takes(nn.Linear):
    def forward(self, *items: Any, **named: Any) -> Any:
        return super().forward(torch.ones(2, 7))


def test_containers_of_any_kind_never_interrupt_the_program() -> None:
    batch = Batch(torch.ones(3, 7))
    batch.itself = [batch]
    assert run_of(Takes(7, 5), 1, batch, y=torch.ones(2)).inputs == (
        tensor_input("1.x", 3, 7),
        tensor_input("y", 2),
    )
    damaged: Mapping[str, Any] = Damaged()
    assert run_of(Takes(7, 5), damaged).inputs is None
    assert run_of(Takes(7, 5)).inputs == ()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensor_has_no_single_shape(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 7), torch.ones(3, 7)], layout=layout)
    found = run_of(Takes(7, 5), nested).inputs
    assert found == (TensorInput(name="0", shape=None, dtype="float32", device="cpu"),)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("context", "grad_mode"),
    [(nullcontext, "grad"), (torch.no_grad, "no_grad"), (torch.inference_mode, "inference")],
)
def test_train_flag_and_grad_mode_are_those_of_the_call(
    context: Any, grad_mode: str, training: bool
) -> None:
    model = Attend().train(training)
    with FlopCounterMode(model, display=False) as counter:
        with context():
            model(torch.ones(3, 7))
        model.train(not training)
    run = counter.profile.run
    assert (run.training, run.grad_mode) == (training, grad_mode)
    with context():
        run = profile_model(model.train(), input_shape=(3, 7)).run
    assert (run.training, run.grad_mode) == (False, grad_mode)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_recorded_with_its_dtype(dtype: torch.dtype) -> None:
    model = Attend()
    assert run_of(model, torch.ones(3, 7)).autocast is None
    with torch.autocast("cpu", dtype):
        assert run_of(model, torch.ones(3, 7)).autocast == str(dtype).removeprefix("torch.")
        run = profile_model(model, input_shape=(3, 7)).run
        assert run.autocast == str(dtype).removeprefix("torch.")
    with torch.autocast("cuda", dtype, enabled=False):
        assert run_of(model, torch.ones(3, 7)).autocast is None


def test_versions_platform_and_date_are_recorded() -> None:
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    run = run_of(Attend(), torch.ones(3, 7))
    assert run.date is not None
    assert before <= datetime.datetime.fromisoformat(run.date)
    assert datetime.datetime.fromisoformat(run.date).utcoffset() == datetime.timedelta()
    assert run.python_version == platform.python_version()
    assert run.dispatch_flops_version == dispatch_flops.__version__
    assert run.platform == platform.platform()


def test_no_process_is_started_to_ask_for_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        pytest.fail(f"{args} was to be started")

    monkeypatch.setattr(subprocess, "check_output", refuse)
    monkeypatch.setattr(platform, "_uname_cache", None)
    monkeypatch.setattr(platform, "_platform_cache", {})
    placement._platform.cache_clear()
    assert platform.system() in str(run_of(Attend(), torch.ones(3, 7)).platform)


def test_model_that_is_gone_before_another_one_is_called_is_the_first() -> None:
    with FlopCounterMode(display=False) as counter:
        nn.Tanh()(torch.ones(2, 3))
        with torch.autocast("cpu", torch.bfloat16):
            nn.Sequential(nn.Linear(5, 7))(torch.ones(11, 5))
    run = counter.profile.run
    assert (run.inputs, run.autocast) == ((tensor_input("input", 2, 3),), None)


def test_json_holds_the_shape_as_a_list_and_reads_back_equal() -> None:
    profile = profile_model(Attend(), input_shape=(3, 7))
    (found,) = json.loads(profile.to_json())["run"]["inputs"]
    assert found == {"name": "x", "shape": [3, 7], "dtype": "float32", "device": "cpu"}
    assert "[3, 7]" in profile.to_json()
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert again.run.date == profile.run.date


def test_call_of_the_model_holds_no_tensor_alive() -> None:
    model, x = Attend(), torch.ones(3, 7)
    alive = weakref.ref(x)
    with FlopCounterMode(model, display=False) as counter:
        with torch.no_grad():
            model(x)
        del x
        assert alive() is None
    assert counter.profile.run.inputs == (tensor_input("x", 3, 7),)


def test_reading_inputs_calls_no_torch_function_of_the_program() -> None:
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(3, 7).as_subclass(Watched)
    assert run_of(Takes(7, 5), x).inputs == (tensor_input("0", 3, 7),)
    assert not seen


def test_autocast_that_forward_enters_is_recorded() -> None:
    model = Attend()  # accelerate's mixed precision replaces forward like this
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # type: ignore[method-assign]
    assert run_of(model, torch.ones(3, 7)).autocast == "bfloat16"


def test_autocast_that_forward_leaves_before_its_submodules_is_not_recorded() -> None:
    class Leaves(Attend):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    with torch.autocast("cpu", torch.bfloat16):
        assert run_of(Leaves(), torch.ones(3, 7)).autocast is None


def test_autocast_of_a_model_without_tensor_inputs_is_that_of_its_parameters() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(3, 7))

        def forward(self, row: int) -> torch.Tensor:
            return self.rows[row]

    with torch.autocast("cpu", torch.bfloat16):
        assert run_of(Table(), 2).autocast == "bfloat16"


def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def with_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return function(*args)

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in "abc"]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


class Methods:
    def plain(self, x: Any, /, y: Any, z: Any = 3, *more: Any, flag: bool = False) -> None: ...

    def variadic(*args: Any, **kwargs: Any) -> None: ...

    @staticmethod
    def static(x: Any, y: Any) -> None: ...

    @classmethod
    def of_class(cls, x: Any) -> None: ...

    wrapped = renamed(plain)
    wrapped_twice = renamed(renamed(plain))
    stated = with_signature(plain)
    stated_within = renamed(with_signature(plain))
    partial = functools.partialmethod(plain, 1)


@pytest.mark.parametrize("name", [name for name in vars(Methods) if not name.startswith("_")])
def test_names_of_arguments_are_those_of_the_signature(name: str) -> None:
    method = getattr(Methods(), name)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    expected = [parameter.name for parameter in parameters if parameter.kind in kinds]
    assert [*first_call._positional_names(method)] == expected


def test_device_is_that_of_the_first_module_with_parameters() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.missing = None
            self.empty = nn.Sequential(nn.ReLU(), nn.Sequential())
            self.first = nn.Sequential(nn.ReLU(), nn.Linear(3, 5, device="meta"))
            self.second = nn.Linear(3, 5)

    model = Holder()
    model.register_module("none", None)
    assert first_call._device_types(model) == {"meta"}
    model.empty.append(model)  # a module that holds itself
    assert first_call._device_types(model) == {"meta"}
    assert first_call._device_types(nn.Sequential(nn.ReLU())) == set()
