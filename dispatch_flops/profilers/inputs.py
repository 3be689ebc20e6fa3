"""Bind a model's inputs, so that it can be called any number of times."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dispatch_flops import _torch
from dispatch_flops.counting.first_call import call_facts
from dispatch_flops.counting.placement import brought_to
from dispatch_flops.counting.wrappers import unwrap
from dispatch_flops.errors import TargetError
from dispatch_flops.operators.tensors import tensors_in

_PLAIN = (torch.Tensor, nn.Parameter, _torch.FakeTensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCalls:
    """Calls of a model with its inputs bound.

    forward: call the method to profile.
    profiled: the same, followed by backward if that is to be profiled, too.
    leaves: tensors whose gradients ``profiled`` may change; empty without backward.
    facts: the fields of ``RunInfo`` that ``call_facts`` returns.
    """

    forward: Callable[[], Any]
    profiled: Callable[[], Any]
    leaves: tuple[torch.Tensor, ...] = ()
    facts: Mapping[str, Any]

    @property
    def has_backward(self) -> bool:
        return self.profiled is not self.forward


def bind_inputs(
    model: nn.Module,
    input_shape: Sequence[int] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    mode: str,
    backward: bool,
    device: str | None,
) -> BoundCalls:
    """Return calls of the model with these inputs; parameters are those of ``profile_model``."""
    inputs = make_inputs(model, input_shape, args, device)
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(kwargs, Mapping):
        raise TargetError(f"kwargs is of type {type(kwargs).__name__}; pass a dict of named inputs")
    inputs, named_inputs = move_to((inputs, dict(kwargs)), device)
    if backward:
        inputs, named_inputs = cut_off((inputs, named_inputs))
    method = _find_method(model, mode)
    forward = _bind(method, inputs, named_inputs)
    inner = unwrap(model)
    named_method = inner.forward if mode == "forward" else method
    facts = call_facts(inner, named_method, (inputs, named_inputs))
    if not backward:
        return BoundCalls(forward=forward, profiled=forward, facts=facts)
    given = (tensor for tensor in tensors_in([inputs, named_inputs]) if tensor.is_leaf)
    leaves = (*model.parameters(), *given)
    profiled = _add_backward(forward, leaves)
    return BoundCalls(forward=forward, profiled=profiled, leaves=leaves, facts=facts)


def make_inputs(
    model: nn.Module, shape: Sequence[int] | None, args: Sequence[Any], device: str | None
) -> list[Any]:
    """Return the positional inputs: ``args`` as given, or a tensor of ones of ``shape``."""
    args = () if args is None else args
    if (
        isinstance(args, (str, bytes, DataLoader))
        or hasattr(args, "__array__")  # as tensors have it
        or not isinstance(args, Iterable)
    ):
        raise TargetError(
            f"args is of type {type(args).__name__}; pass a list of the inputs, such as [x]"
        )
    if isinstance(args, Mapping) and list(args.keys()):  # one of tensors has no truth value
        raise TargetError(
            f"args is of type {type(args).__name__}; pass it as kwargs, or in a list as one input"
        )
    given = list(args)
    if shape is None:
        return given
    if given:
        raise TargetError("input_shape and args are both given; pass only one of them")
    sizes = _sizes(shape)
    numeric = (p for p in model.parameters() if p.is_floating_point() or p.is_complex())
    first = next(numeric, None)
    dtype, home = (first.dtype, first.device) if first is not None else (None, None)
    # An offloaded model's parameters are moved to another device than they are on.
    where = device or next(iter(brought_to(model.modules())), home)
    return [ones(sizes, dtype, where)]


def ones(
    sizes: Sequence[int], dtype: torch.dtype | None, device: torch.device | str | None
) -> torch.Tensor:
    """Return ones of these sizes; raise TargetError if torch cannot make so many."""
    try:
        return torch.ones(sizes, dtype=dtype, device=device)
    except (RuntimeError, TypeError) as error:
        why = str(error).partition("\n")[0]
        raise TargetError(
            f"an input of shape {tuple(sizes)!s:.60} cannot be made, pass smaller sizes: {why:.200}"
        ) from error


def move_to(value: Any, device: str | None) -> Any:
    """Return nested inputs with their tensors on ``device``; unchanged for None."""
    if device is None:
        return value
    return _replace_tensors(value, lambda tensor: tensor.to(device))


def cut_off(value: Any) -> Any:
    """Return nested inputs with leaves in place of tensors that a graph computed.

    Backward would follow that graph, free it, and leave gradients in what it started from.
    """
    return _replace_tensors(
        value, lambda tensor: tensor if tensor.is_leaf else tensor.detach().requires_grad_()
    )


def _replace_tensors(value: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return nested inputs with each tensor replaced, once where it is given several times."""
    replaced: dict[int, torch.Tensor] = {}

    def new(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in replaced:
            replaced[id(tensor)] = replace(tensor)
        return replaced[id(tensor)]

    return _torch.tree_map_only(torch.Tensor, new, value)


def check_model(model: Any) -> None:
    """Raise TargetError if ``model`` is not a module."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise TargetError(f"model is the class {model.__name__}; pass an instance of it")
        fit = "torch.export.unflatten(model)" if kind == "ExportedProgram" else "an nn.Module"
        raise TargetError(f"model is of type {kind}; pass {fit}")


def _sizes(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, torch.Tensor):
        raise TargetError("input_shape is a Tensor; pass the inputs themselves as args=[x]")
    if isinstance(shape, (list, tuple)) and any(isinstance(size, torch.Tensor) for size in shape):
        raise TargetError("input_shape holds a Tensor; pass inputs by their name, as args=[x]")
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes) or any(isinstance(size, bool) for size in shape):
        raise TargetError(
            f"input_shape={shape!r:.60}: pass a tuple of ints of at least 0, or the inputs "
            "themselves as args"
        )
    return sizes


def _find_method(model: nn.Module, mode: str) -> Any:
    found = getattr(model, mode, None) if isinstance(mode, str) else None
    method = model if mode == "forward" else found
    if not callable(method):
        raise TargetError(f"mode={mode!r:.60}: {type(model).__name__} has no method of that name")
    return method


def _bind(
    method: Callable[..., Any], inputs: Sequence[Any], named_inputs: Mapping[str, Any]
) -> Callable[[], Any]:
    def call() -> Any:
        try:
            return method(*inputs, **named_inputs)
        except TypeError as error:
            if not inputs and not named_inputs:
                error.add_note("It was given no input: pass input_shape, args or kwargs.")
            raise

    return call


def _add_backward(forward: Callable[[], Any], leaves: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """Return a call of ``forward`` and of backward from the sum of its outputs."""

    def forward_and_backward() -> None:
        for leaf in leaves:
            leaf.grad = None  # otherwise a second call would also accumulate gradients
        run_backward(requiring_gradient(forward(), "profile it without backward"))

    return forward_and_backward


def loss_in(output: Any) -> torch.Tensor | None:
    """Return the loss that a model's output holds, if it requires a gradient; None without one."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) and loss.requires_grad else None


def requiring_gradient(output: Any, advice: str) -> list[torch.Tensor]:
    """Return the tensors of a model's output that require a gradient.

    Raises TargetError if none does, with the reason and with ``advice``.
    """
    tensors = list(tensors_in(output))
    found = [tensor for tensor in tensors if tensor.requires_grad]
    if found:
        return found
    if not tensors:
        raise TargetError(
            f"the model's output is of type {type(output).__name__}, in which no tensor is found; "
            f"return a tensor, or a tuple, dict or dataclass of tensors, or {advice}"
        )
    if not torch.is_grad_enabled():
        raise TargetError(
            "no output of the model requires a gradient, because gradients are off; leave "
            f"torch.no_grad(), torch.inference_mode() and the like, or {advice}"
        )
    raise TargetError(f"no output of the model requires a gradient; {advice}")


def run_backward(outputs: Sequence[torch.Tensor]) -> None:
    """Run backward from the sum of the outputs, which itself is not computed."""
    torch.autograd.backward(outputs, [_gradient_of_sum(output) for output in outputs])


def _gradient_of_sum(output: torch.Tensor) -> torch.Tensor:
    """Return ones like the output; as in backward of its sum, they are one number in memory."""
    if type(output) not in _PLAIN or output.is_nested:
        return torch.ones_like(output)
    return output.new_ones((), layout=torch.strided).expand(output.shape)
