"""Context managers that restore the program's state: flags, random state, gradients, tensors."""

from __future__ import annotations

import gc
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from dispatch_flops.counting.undo import UndoStack
from dispatch_flops.timing.devices import Devices

_CONTAINERS = (dict, OrderedDict, list, set)  # not subclasses: writing to those may do more


@contextmanager
def isolated(model: nn.Module, *, on_meta: bool) -> Iterator[None]:
    """Run the model in evaluation mode inside; flags and random state are as before afterwards.

    on_meta: the model's tensors have no data inside.
    """
    with (
        preserving_random_state(model),
        # Restores flags as well, and where it is interrupted, later than the rest.
        moved_to_meta(model) if on_meta else nullcontext(),
        evaluating(model),
    ):
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside; restore every module's own flag afterwards.

    What refuses, as a program of torch.export does, stays in its mode; what it is part of does not.
    """
    modules = list(model.modules())
    flags = [getattr(module, "training", None) for module in modules]

    def restore() -> None:
        for module, training in zip(modules, flags, strict=True):
            if training is not None:
                module.training = training
            elif "training" in module.__dict__:  # a frozen TorchScript module has no flag
                del module.__dict__["training"]

    with UndoStack() as undo:
        undo.add(restore)
        _evaluate(model)
        yield


def _evaluate(model: nn.Module) -> None:
    try:
        model.eval()
    except NotImplementedError:  # a program of torch.export stays in the mode of its export
        for child in model.children():
            _evaluate(child)


@contextmanager
def preserving_random_state(model: nn.Module) -> Iterator[None]:
    """Restore the random state of torch, Python and (if loaded) numpy afterwards.

    That of torch is restored on the CPU and on the accelerators that the model may use.
    """
    with UndoStack() as undo:
        undo.add(partial(random.setstate, random.getstate()))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            undo.add(partial(numpy.random.set_state, numpy.random.get_state()))
        undo.add(partial(torch.set_rng_state, torch.get_rng_state()))
        for device in _accelerators_used_by(model):
            module = torch.get_device_module(device)
            undo.add(partial(module.set_rng_state, module.get_rng_state(device), device))
        yield


def _accelerators_used_by(model: nn.Module) -> Sequence[torch.device]:
    """Return the accelerators of the model; all CUDA devices once the program uses CUDA."""
    if torch.cuda.is_initialized():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return Devices.of(model.modules()).accelerators


@contextmanager
def garbage_collection_later() -> Iterator[None]:
    """Switch off the collection of cyclic garbage inside, where it would be timed or be futile."""
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()


@contextmanager
def preserving_gradients(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restore the gradient of every leaf afterwards."""
    gradients = [(leaf, leaf.grad) for leaf in leaves]

    def restore() -> None:
        for leaf, gradient in gradients:
            leaf.grad = gradient

    with UndoStack() as undo:
        undo.add(restore)
        yield


@contextmanager
def moved_to_meta(model: nn.Module) -> Iterator[None]:
    """Replace the tensors that modules hold by ones without data inside; restore them afterwards.

    Tied tensors stay tied. Tensors that the model stores inside are dropped. A tensor is replaced
    if it is an attribute of a module, or an entry of a list, dict or set that is one.
    """
    held = [(holder, _content(holder)) for holder in _holders(model)]
    shapes: dict[int, Any] = {}

    def shape_of(value: Any) -> Any:
        if id(value) not in shapes:
            shapes[id(value)] = _without_data(value) if isinstance(value, torch.Tensor) else value
        return shapes[id(value)]

    def restore() -> None:
        for holder, content in held:
            _fill(holder, content)

    with UndoStack() as undo:
        undo.add(restore)
        for holder, content in held:
            _fill(holder, {name: shape_of(value) for name, value in content.items()})
        yield


def _holders(model: nn.Module) -> list[Any]:
    """Return each module's attributes, and the lists, dicts and sets among them, each once."""
    found = [
        holder
        for module in model.modules()
        for holder in (vars(module), module._parameters, module._buffers, *vars(module).values())
        if type(holder) in _CONTAINERS or holder is module._parameters or holder is module._buffers
    ]
    return list({id(holder): holder for holder in found}.values())


def _content(holder: Any) -> dict[Any, Any]:
    if isinstance(holder, list):
        return dict(enumerate(holder))
    return dict.fromkeys(holder) if isinstance(holder, set) else dict(holder)


def _fill(holder: Any, content: dict[Any, Any]) -> None:
    if isinstance(holder, list):
        holder[:] = content.values()
    elif isinstance(holder, (dict, set)):
        holder.clear()
        holder.update(content)
    else:  # TorchScript's tables: their names cannot be removed
        for name, value in content.items():
            holder[name] = value


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    has_no_meta_form = tensor.is_quantized or (tensor.is_nested and tensor.layout is torch.strided)
    if tensor.is_meta or has_no_meta_form:
        return tensor
    try:
        empty = torch.empty_like(tensor, device="meta")
    except NotImplementedError:  # subclasses such as torchao's can be moved, not made anew
        empty = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)
