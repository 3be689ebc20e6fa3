"""``nn.Module``: its way of calling a module, and the tables of global hooks that it reads."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from dispatch_flops import _torch
from tests.helpers.frames import frames

CALL = nn.Module._call_impl
# Those that dispatch_flops puts a table of its own in place of (timing/idle_modules.py).
REPLACED = {
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_hooks_with_kwargs",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
}


class Doing(nn.Module):
    """Calls ``what`` in forward."""

    def __init__(self, what: Any = None) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        if self.what is not None:
            self.what()
        return x


# -- calls ----------------------------------------------------------------------------------------


def test_call_impl_while_a_module_runs_is_a_frame_with_the_module_as_self() -> None:
    """dispatch_flops relies on this for calls that ended without their hook: their frame is gone
    (counting/python_frames.py: ``running_modules``).
    """
    found: list[Any] = []

    def look() -> None:
        found.extend(f.f_locals["self"] for f in frames() if f.f_code is CALL.__code__)

    model = nn.Sequential(Doing(look))
    model(torch.ones(1))
    assert found == [model[0], model], "each call that is not over must have one such frame"


def test_call_impl_has_its_frame_already_when_hooks_run() -> None:
    """dispatch_flops relies on this in its pre-hook, which asks for the running calls
    (counting/call_stack.py: ``drop_calls_after_hooks``).
    """
    found: list[bool] = []

    def hook(module: nn.Module, args: Any) -> None:
        found.append(
            any(f.f_code is CALL.__code__ and f.f_locals["self"] is module for f in frames())
        )

    handle = register_module_forward_pre_hook(hook)
    try:
        Doing()(torch.ones(1))
        Doing().register_forward_pre_hook(lambda *_: None)
    finally:
        handle.remove()
    assert found == [True]


def test_call_impl_of_an_instance_is_what_calls_it() -> None:
    """dispatch_flops relies on this for idle modules with hooks of their own
    (timing/idle_modules.py: ``set_call``).
    """
    model = Doing()
    object.__setattr__(model, "_call_impl", MethodType(lambda self, x: (self, x), model))
    assert model(3) == (model, 3), "nn.Module.__call__ must look _call_impl up on the instance"


def test_call_impl_copied_into_another_world_sees_its_hooks_alone() -> None:
    """dispatch_flops relies on this for measuring what its hooks cost (timing/idle_modules.py:
    ``make_call``).
    """
    assert isinstance(CALL, FunctionType)
    seen: list[str] = []
    world = {
        **vars(module_hooks),
        **{name: {} for name in REPLACED},
        "_global_forward_pre_hooks": {0: lambda module, args: seen.append("before")},
        "_global_forward_hooks": {0: lambda module, args, out: seen.append("after")},
        "_global_forward_hooks_always_called": {0: True},
    }
    call = FunctionType(CALL.__code__.replace(), world, CALL.__name__, CALL.__defaults__)
    model = Doing()
    object.__setattr__(model, "_call_impl", MethodType(call, model))
    handle = register_module_forward_pre_hook(lambda *_: seen.append("the program's"))
    try:
        assert torch.equal(model(torch.ones(1)), torch.ones(1))
    finally:
        handle.remove()
    assert seen == ["before", "after"], "only the hooks of the copy's own world may be called"


def test_call_impl_reads_no_table_of_global_hooks_that_is_unknown() -> None:
    """dispatch_flops relies on this for the same (timing/idle_modules.py: ``make_call``)."""

    def names(code: Any) -> Iterator[str]:
        yield from code.co_names
        for constant in code.co_consts:
            if hasattr(constant, "co_names"):
                yield from names(constant)

    read = {name for name in names(CALL.__code__) if name.startswith("_global_")}
    assert read <= REPLACED, f"timing/idle_modules.py has to know of {read - REPLACED}, too"
    assert read <= set(vars(module_hooks)), "the tables must be globals of torch.nn.modules.module"


# -- global hooks ---------------------------------------------------------------------------------


def test_global_hooks_run_in_the_order_in_which_they_were_registered() -> None:
    """dispatch_flops relies on this for modules with a formula (counting/opaque_modules.py): its
    hooks come right after the tracker's.
    """
    seen: list[int] = []
    handles = [
        register_module_forward_pre_hook(lambda *_: seen.append(1)),
        register_module_forward_hook(lambda *_: seen.append(3), always_call=True),
        register_module_forward_pre_hook(lambda *_: seen.append(2)),
        register_module_forward_hook(lambda *_: seen.append(4), always_call=True),
    ]
    try:
        Doing()(torch.ones(1))
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [1, 2, 3, 4]


def test_global_hook_with_kwargs_where_forward_raised_is_called_without_them() -> None:
    """dispatch_flops relies on this for telling that forward failed (counting/opaque_modules.py:
    ``_leave``).
    """
    given: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    handle = register_module_forward_hook(
        lambda *args: given.append(len(args)), with_kwargs=True, always_call=True
    )
    try:
        Doing()(torch.ones(1))
        with pytest.raises(ZeroDivisionError):
            Doing(fail)(torch.ones(1))
    finally:
        module_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)
        handle.remove()
    assert given == [4, 3], "(module, args, kwargs, output), and (module, args, output) on failure"


def test_global_hook_with_kwargs_is_listed_by_its_handles_id() -> None:
    """dispatch_flops relies on this for taking the entry away that removing the hook leaves, and
    that torch.compile takes for a hook (counting/opaque_modules.py: ``start``).
    """
    table = module_hooks._global_forward_hooks_with_kwargs
    before = dict(table)
    handle = register_module_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    listed = handle.id in table
    table.pop(handle.id, None)
    handle.remove()
    assert listed, "_global_forward_hooks_with_kwargs must have the handle's id"
    assert dict(table) == before


# -- tables of a module ---------------------------------------------------------------------------


def test_tables_of_a_module_are_what_it_reads_its_attributes_from() -> None:
    """dispatch_flops relies on this for putting tensors without data in a model's place and back
    (profilers/isolation.py: ``moved_to_meta``), and for names (counting/module_names.py,
    counting/parameters.py).
    """
    model = nn.BatchNorm1d(2)
    outer = nn.Sequential(model)
    assert list(outer._modules.values()) == [model]
    empty = nn.Parameter(torch.empty(2, device="meta"))
    model._parameters["weight"] = empty
    model._buffers["running_mean"] = empty.detach()
    assert model.weight is empty, "writing to _parameters must change the attribute"
    assert model.running_mean.is_meta, "writing to _buffers must change the attribute"


def test_entries_of_the_tables_of_hooks_are_hooks() -> None:
    """dispatch_flops relies on this for hooks that are installed in every step of a meter
    (profilers/meter_hooks.py: ``install``), without registering them anew.
    """
    model, weight = nn.Linear(2, 3), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    seen: list[Any] = []
    before, takes_kwargs, after = _torch.call_hooks(model)
    before_step, after_step = _torch.step_hooks(optimizer)
    key = RemovableHandle(OrderedDict()).id
    before[key] = lambda *given: seen.append(given)
    takes_kwargs[key] = True
    after[key] = lambda *_: seen.append("returned")
    model(input=torch.ones(1, 2))
    assert seen[0][:2] == (model, ())
    assert list(seen[0][2]) == ["input"], "the table of kwargs must hold the keys of pre-hooks"
    assert seen[1:] == ["returned"]
    tables = {
        "all": _torch.all_step_pre_hooks, "before": before_step, "after": after_step
    }  # fmt: skip
    for name, table in tables.items():
        table[key] = lambda *_, name=name: seen.append(name)
    optimizer.step()
    for table in (before, takes_kwargs, after, *tables.values()):
        del table[key]
    model(torch.ones(1, 2))
    optimizer.step()
    assert seen[2:] == ["all", "before", "after"], "deleting an entry must remove the hook"


def test_optimizers_hooks_may_be_added_by_a_hook_of_all_optimizers() -> None:
    """dispatch_flops relies on this for optimizers that it meets in their first step
    (profilers/meter_hooks.py: ``_follow``).
    """
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    before, after = _torch.step_hooks(optimizer)
    seen: list[str] = []

    def add(*_: Any) -> None:
        before[key] = lambda *_: seen.append("before")
        after[key] = lambda *_: seen.append("after")

    key = RemovableHandle(OrderedDict()).id
    _torch.all_step_pre_hooks[key] = add
    optimizer.step()
    del _torch.all_step_pre_hooks[key]
    assert seen == ["before", "after"]


def test_id_of_an_unpickled_handle_is_given_to_no_other_hook() -> None:
    """dispatch_flops relies on this for models that are pickled with a meter's hook
    (profilers/meter_hooks.py: ``__reduce__``).
    """
    handle = RemovableHandle(OrderedDict())
    saved = pickle.dumps(handle)
    following = RemovableHandle.next_id
    try:
        RemovableHandle.next_id = 0
        assert pickle.loads(saved).id == handle.id
        assert RemovableHandle(OrderedDict()).id > handle.id
    finally:
        RemovableHandle.next_id = max(following, RemovableHandle.next_id)


def test_class_that_torch_gives_a_module_is_below_that_of_the_program() -> None:
    """dispatch_flops relies on this for the class whose formula applies (``_torch.class_of``)."""
    layer = nn.Linear(3, 5)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    assert type(layer) is not nn.Linear
    assert _torch.class_of(layer) is nn.Linear


def test_class_that_torch_has_by_name_is_the_modules_own() -> None:
    layer = nn.Linear(3, 5)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    found = _torch.class_of(layer.parametrizations.weight)  # type: ignore[union-attr, arg-type]
    assert found is parametrize.ParametrizationList
