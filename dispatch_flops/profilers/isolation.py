"""Context managers that leave the program's state as they found it."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dispatch_flops.profilers.inputs import _CONTAINERS

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
