"""One training step on the meta device: forward, loss, backward and the optimizer, counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.operators.conventions import Causal, Target
from dispatch_flops.profile import Profile
from dispatch_flops.profilers.counter import FlopCounterMode
from dispatch_flops.profilers.inputs import loss_in, requiring_gradient, run_backward
from dispatch_flops.profilers.training_step import OPTIMIZERS, make_optimizer

# The caching allocator of CUDA rounds every block up to a multiple of this.
# Source: c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize.
ROUNDING = 512


def count_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    optimizer: str | None,
    causal: Causal,
    target: Target,
) -> Profile:
    """Return the profile of a steady step, memory included.

    A first step makes the optimizer's state. Without an optimizer, the forward pass alone is
    counted, without gradients. A value that the model reads, as ``.all()`` in an ``if``, is 1.
    """
    step = step_of(model, args, kwargs, optimizer, target)
    if optimizer is not None:
        with FlopCounterMode(model, display=False, target=target, meta_value=1):
            step()
    counter = FlopCounterMode(
        model, display=False, causal=causal, target=target, meta_value=1,
        memory=True, memory_rounding=ROUNDING,
    )  # fmt: skip
    with counter:
        step()
    return counter.profile


def check_optimizer(name: str) -> None:
    """Raise ConfigError for a name that is not an optimizer's."""
    if name not in tuple(OPTIMIZERS):
        raise ConfigError(f"optimizer={name!r:.60}: choose one of {', '.join(OPTIMIZERS)}")


def step_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    optimizer: str | None,
    target: Target,
) -> Callable[[], None]:
    """Return a function that runs a step; a forward pass without gradients for no optimizer.

    Raises ConfigError for a name that is not an optimizer's, and TargetError for an optimizer of a
    model that has nothing to train.
    """
    if optimizer is None:
        return _inference(model, args, kwargs)
    check_optimizer(optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise TargetError(
            "no parameter of the model requires a gradient; plan it without an optimizer"
        )
    steps = make_optimizer(optimizer, trained, as_on_cuda=target == "cuda")
    return _training(model, args, kwargs, steps)


def _inference(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[], None]:
    def step() -> None:
        with torch.no_grad():
            model(*args, **kwargs)

    return step


def _training(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
) -> Callable[[], None]:
    def step() -> None:
        backward_from(model(*args, **kwargs))
        optimizer.step()
        optimizer.zero_grad()

    return step


def backward_from(output: Any) -> None:
    """Run backward from the output's ``loss``, or from the sum of all outputs without one."""
    loss = loss_in(output)
    run_backward(
        requiring_gradient(output, "plan it without an optimizer") if loss is None else [loss]
    )


def checkpoint_stacks(model: nn.Module) -> None:
    """Make every layer of the outermost stacks recompute its forward.

    A stack is a ModuleList, ModuleDict or Sequential of at least two modules of one class.
    Raises TargetError if there is none.
    """
    layers = stacked_layers(model)
    if not layers:
        raise TargetError(
            "checkpoint: the model has no stack of equal layers; checkpoint it in its own code"
        )
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def stacked_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the outermost stacks; empty if the model has no stack."""
    found: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        children = list(module.children())
        is_stack = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        same = len({type(child) for child in children}) == 1 and len(children) > 1
        if is_stack and same and any(children[0].children()):
            found.extend(children)
        else:
            waiting.extend(children)
    return found


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
