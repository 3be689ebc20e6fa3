"""State that a counter's block must not change, and models to check it with."""

from __future__ import annotations

import builtins
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

PATCHABLE = (
    torch, F, torch.Tensor, nn.Module, torch.optim.Optimizer, torch.autograd, torch.ops.aten,
    torch.autograd.Function, torch.utils.checkpoint, torch.nn.init, builtins,
)  # fmt: skip


class EmptyMode(TorchDispatchMode):
    """A mode that only runs each operator: torch itself takes other paths under any mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def process_state() -> dict[str, Any]:
    """Return everything in the process that a profiler could change."""
    state = {f"hooks.{name}": list(value) for holder in (module_hooks, optimizer_hooks)
             for name, value in vars(holder).items()
             if name.startswith("_global_") and isinstance(value, dict)}  # fmt: skip
    for holder in PATCHABLE:
        for name, value in list(vars(holder).items()):
            if callable(value):
                state[f"{holder.__name__}.{name}"] = id(value)
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return state | {
        "stance": getattr(dynamo, "_stance", None),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "warnings": list(warnings.filters),
        "stdout": (sys.stdout, sys.stderr),
        "meta path": list(sys.meta_path),
        "recursion limit": sys.getrecursionlimit(),
        "threads": threading.active_count(),
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "mode flags": {
            name: value
            for name, value in vars(_python_dispatch).items()
            if name.startswith("_is_in_")
        },
        "function modes": _get_current_function_mode_stack(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return all attributes of the modules except the values of parameters and buffers."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            held = list(value) if isinstance(value, dict) else value
            state[f"{name}.{key}"] = held if isinstance(held, (bool, list)) else id(held)
        state[f"{name} class"] = (type(module), type(module).forward, type(module).__call__)
        state[f"{name} extra_repr"] = vars(module).get("extra_repr")
    for name, parameter in model.named_parameters():
        state[f"{name} hooks"] = list(parameter._backward_hooks or ())
        state[f"{name} after hooks"] = list(
            getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
        )
        state[f"{name} trained"] = (parameter.requires_grad, vars(parameter))
    return state


def values(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters, buffers and gradients."""
    grads = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: t.detach().clone() for name, t in {**model.state_dict(), **grads}.items()}


def same_values(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k].nan_to_num(), b[k].nan_to_num()) for k in a
    )


# -- models: each takes 4 rows of 6 and returns one tensor ----------------------------------------


class Apply(nn.Module):
    """A function of the input and of one inner module."""

    def __init__(self, inner: nn.Module, fn: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.inner, x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 5))


def forces(net: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]


def shared() -> nn.Module:
    core = nn.Linear(6, 6)
    return nn.Sequential(core, nn.ReLU(inplace=True), nn.Sequential(core), core)


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def hooked() -> nn.Module:
    """Build a model that has hooks of its user."""
    model = mlp()
    model[0].register_forward_hook(lambda m, args, out: out * 2)
    model[3].register_full_backward_hook(lambda m, grad_in, grad_out: None)
    model[3].weight.register_hook(lambda grad: grad * 2)
    model[3].bias.register_post_accumulate_grad_hook(lambda p: None)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "convolution": lambda: Apply(
        nn.Sequential(nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.MaxPool1d(2), nn.Flatten()),
        lambda net, x: net(x[:, None]),
    ),
    "attention": lambda: Apply(
        nn.MultiheadAttention(6, 2, batch_first=True), lambda mha, x: mha(*[x[None]] * 3)[0]
    ),
    "encoder": lambda: Apply(
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), lambda net, x: net(x[None])
    ),
    "encoder in eval": lambda: Apply(
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval(), lambda net, x: net(x[None])
    ),
    "lstm": lambda: Apply(nn.LSTM(6, 5, bidirectional=True), lambda net, x: net(x[None])[0]),
    "gru": lambda: Apply(nn.GRU(6, 5), lambda net, x: net(x[None])[0]),
    "embedding": lambda: Apply(
        nn.Embedding(7, 5, max_norm=1.0), lambda net, x: net((x * 3).long().abs() % 7)
    ),
    "checkpoint, reentrant": lambda: nn.Sequential(
        nn.Linear(6, 6), Apply(mlp(), lambda net, x: checkpoint(net, x, use_reentrant=True))
    ),
    "checkpoint": lambda: nn.Sequential(
        nn.Linear(6, 6), Apply(mlp(), lambda net, x: checkpoint(net, x, use_reentrant=False))
    ),
    "forces": lambda: Apply(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)), forces),
    "shared": shared,
    "frozen": frozen,
    "hooked": hooked,
    "norms": lambda: nn.Sequential(nn.LayerNorm(6), nn.RMSNorm(6), nn.Linear(6, 3)),
    "custom function": lambda: Apply(mlp(), lambda net, x: Doubled.apply(net(x))),
    "autocast": lambda: Apply(mlp(), lambda net, x: in_bfloat16(net, x)),
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.Tanh()
    ),
}


def in_bfloat16(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net(x).float()


class ProgramError(Exception):
    """Error raised by the user's program."""


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ProgramError("backward")


class Tail(nn.Module):
    """The last layer: raises in forward or in backward, or doubles its input."""

    def __init__(self, error: type[BaseException] | None = None, *, backward: bool = False) -> None:
        super().__init__()
        self.error = error
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error("forward")
        return Failing.apply(x) if self.backward else x * 2
