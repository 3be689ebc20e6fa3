"""Running a model to measure it: its inputs, its method, and everything as it was afterwards."""

from __future__ import annotations

import gc
import operator
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dispatch_flops.errors import TargetError
from dispatch_flops.tensors import tensors_in

_CONTAINERS = (dict, OrderedDict, list, set)  # no subclasses: they may do more when written to


def is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


def caller(
    model: nn.Module, mode: str, inputs: Sequence[Any], named: Mapping[str, Any]
) -> Callable[[], Any]:
    """Calls the model, or a method of it, with these inputs."""
    method = model if mode == "forward" else getattr(model, str(mode), None)
    if not callable(method):
        raise TargetError(f"mode={mode!r}: {type(model).__name__} has no method of that name")

    def call() -> Any:
        try:
            return method(*inputs, **named)
        except TypeError as error:
            if not inputs and not named:
                error.add_note("It was given no input: pass input_shape, args or kwargs.")
            raise

    return call


def make_inputs(
    model: nn.Module, shape: Sequence[int] | None, args: Sequence[Any], device: str | None
) -> list[Any]:
    if isinstance(args, (torch.Tensor, str)) or not isinstance(args or (), Iterable):
        raise TargetError(
            f"args is a {type(args).__name__}; pass a list of the inputs, such as [x]"
        )
    if shape is None:
        return list(moved(list(args or ()), device))
    if args:
        raise TargetError("input_shape and args exclude each other: args are the inputs themselves")
    sizes = _sizes(shape)
    numeric = (p for p in model.parameters() if p.is_floating_point() or p.is_complex())
    first = next(numeric, None)
    where = device or (first.device if first is not None else None)
    dtype = first.dtype if first is not None else None
    return [torch.ones(sizes, dtype=dtype, device=where)]


def _sizes(shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes) or any(isinstance(size, bool) for size in shape):
        raise TargetError(f"input_shape={shape!r}: pass a tuple of ints of at least 0")
    return sizes


def moved(value: Any, device: str | None) -> Any:
    """Nested inputs on ``device``; as they are for None."""
    if device is None:
        return value
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def with_backward(run: Callable[[], Any], leaves: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """Each run starts without gradients: otherwise a second one would accumulate."""

    def forward_and_backward() -> None:
        for leaf in leaves:
            leaf.grad = None
        outputs = [t for t in tensors_in(run()) if t.requires_grad]
        if not outputs:
            raise TargetError("backward: no output of the model requires a gradient")
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])

    return forward_and_backward


def submodule(model: nn.Module, fqn: str) -> nn.Module | None:
    """The module of that name, ``torch.compile``'s wrappers looked through; None if none is."""
    module = _unwrapped(model)
    for name in fqn.split(".") if fqn else ():
        below = _held_as(name, module)
        if below is None:
            return None
        module = _unwrapped(below)
    return module


def _unwrapped(module: nn.Module) -> nn.Module:
    while (inner := _held_as("_orig_mod", module)) is not None:
        module = inner
    return module


def _held_as(name: str, module: nn.Module) -> nn.Module | None:
    if name not in module._modules:  # TorchScript's has no get
        return None
    return module._modules[name]


# -- leaving everything as it was ------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own flag afterwards."""
    modules = list(model.modules())
    flags = [getattr(module, "training", None) for module in modules]
    model.eval()
    try:
        yield
    finally:
        for module, training in zip(modules, flags, strict=True):
            if training is not None:
                module.training = training
            elif "training" in module.__dict__:  # a frozen TorchScript module has none
                del module.__dict__["training"]


@contextmanager
def random_state_kept(accelerators: Sequence[torch.device]) -> Iterator[None]:
    """What is drawn inside is drawn again afterwards: by torch, Python and (if loaded) numpy.

    accelerators: those on which the program may draw, of one type.
    """
    kind = accelerators[0].type if accelerators else "cuda"  # fork_rng's own default
    drawn = random.getstate()
    numpys = sys.modules.get("numpy")
    drawn_by_numpy = numpys.random.get_state() if numpys is not None else None
    try:
        with torch.random.fork_rng([d.index for d in accelerators], device_type=kind):
            yield
    finally:
        random.setstate(drawn)
        if numpys is not None:
            numpys.random.set_state(drawn_by_numpy)


@contextmanager
def garbage_collection_later() -> Iterator[None]:
    """Cyclic garbage is looked for afterwards: not in the midst of what is measured or built."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def gradients_kept(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Afterwards every leaf has the gradient that it had, or none."""
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    try:
        yield
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient


@contextmanager
def on_meta(model: nn.Module) -> Iterator[None]:
    """Tensors that modules hold have shapes alone inside; afterwards all is held as before.

    Tied tensors stay tied. What the model keeps for later inside is forgotten. A tensor held
    deeper than in a list or a dict of a module's own stays where it is.
    """
    held = [(holder, _content(holder)) for holder in _holders(model)]
    shapes: dict[int, Any] = {}

    def shape_of(value: Any) -> Any:
        if id(value) not in shapes:
            shapes[id(value)] = _without_data(value) if isinstance(value, torch.Tensor) else value
        return shapes[id(value)]

    try:
        for holder, content in held:
            _fill(holder, {name: shape_of(value) for name, value in content.items()})
        yield
    finally:
        for holder, content in held:
            _fill(holder, content)


def _holders(model: nn.Module) -> list[Any]:
    """Each module's attributes, and the lists, dicts and sets among them, each once."""
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
    else:  # TorchScript's tables, whose names are fixed
        for name, value in content.items():
            holder[name] = value


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    cannot = tensor.is_quantized or (tensor.is_nested and tensor.layout is torch.strided)
    if tensor.is_meta or cannot:
        return tensor
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)
