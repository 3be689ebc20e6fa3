"""Attribution of what an engine does to gradients between backward and the optimizer's step."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops import FlopCounterMode, Profile
from dispatch_flops.counting.python_frames import ENGINE
from dispatch_flops.counting.thread_state import AFTER_BACKWARD
from tests.helpers.attributing import plain, rows

INVERSE = 2  # torch computes 1 / x as a reciprocal and a product with 1
PARAMETERS = (3 * 5, 5 * 7)
MACS = 2 * (3 * 5 + 5 * 7)  # of the forward; the first layer's input needs no gradient
GRADIENT_MACS = 2 * (3 * 5 + 2 * 5 * 7)


def norm_of_all(gradients: list[Tensor]) -> Tensor:
    """The norm of the norms, as ZeRO and most training loops compute it."""
    norms = [gradient.detach().float().norm(2) for gradient in gradients]
    return torch.stack(norms).square().sum().sqrt()


class Engine:
    """An engine whose step computes the norm of the gradients and clips them."""

    def __init__(
        self, model: nn.Module, *, context: Callable[[], Any], of_data: bool = False
    ) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._context = context
        self._of_data = of_data

    def step(self) -> None:
        gradients = [p.grad.data if self._of_data else p.grad for p in self.model.parameters()]
        with self._context():
            scale = 1.0 / (norm_of_all(gradients) + 1e-6)
            for gradient in gradients:
                gradient.mul_(scale)
        self.optimizer.step()
        self.optimizer.zero_grad()


def trained(model: nn.Module, engine: Any, *, steps: int = 2, device: str = "cpu") -> Profile:
    """Return the profile of steps whose input is scaled outside the model."""
    with FlopCounterMode(model, display=False) as counter:
        for _ in range(steps):
            x = rows(2, 3).to(device) * 0.5
            loss = model(x).sum()
            loss.backward()
            loss.detach() * 2.0  # a figure for the log
            engine.step()
    return counter.profile


@pytest.fixture
def model() -> nn.Sequential:
    return plain(3, 5, 7)


GRAD_MODES = pytest.mark.parametrize(
    "context", [torch.no_grad, torch.enable_grad], ids=["no_grad", "enable_grad"]
)


@GRAD_MODES
@pytest.mark.parametrize("of_data", [True, False], ids=["data", "grad"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gradient_norm_of_an_engine_is_no_forward_work(
    model: nn.Module, context: Any, of_data: bool, device: str
) -> None:
    model.to(device)
    engine = Engine(model, context=context, of_data=of_data)
    profile = trained(model, engine, device=device)
    # Outside in forward: the scaled input, the loss and its gradient's expansion, the log's figure.
    forward = profile.outside.own("forward").flops
    assert forward == 2 * (2 * 3 + (2 * 7 - 1) + 1)
    assert profile.total("forward").macs == 2 * MACS
    assert profile.model_total().macs == 2 * (MACS + GRADIENT_MACS)
    n = sum(PARAMETERS)
    squares = 2 * n  # of each norm: squares n, sums n - 1, root 1
    of_norms = 2 + 1 + 1  # squares, sum, root
    step = squares + of_norms + 1 + INVERSE + n + 2 * n  # + eps, 1 / norm, scaling, SGD
    assert profile.total("optimizer").flops == 2 * step
    norms = profile.node(AFTER_BACKWARD)
    assert norms.total("optimizer").flops == 2 * (step - 2 * n)


def test_work_before_the_next_forward_is_forward_work(model: nn.Module) -> None:
    """Memory of a gradient that is gone may hold the next input."""
    engine = Engine(model, context=contextlib.nullcontext)
    profile = trained(model, engine, steps=5)
    assert profile.outside.own("forward").flops == 5 * (2 * 3 + (2 * 7 - 1) + 1)


def test_gradients_that_are_read_after_the_step_are_read_outside(model: nn.Module) -> None:
    """The optimizer's step ends what is done to gradients: a figure for the log is none of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlopCounterMode(model, display=False) as counter:
        model(rows(2, 3)).sum().backward()
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad * 2.0
    profile = counter.profile
    assert profile.total("optimizer").flops == 2 * sum(PARAMETERS)
    assert profile.outside.own("forward").flops == (2 * 7 - 1) + sum(PARAMETERS)


def test_work_in_the_memory_of_a_gradient_that_is_gone_is_forward_work(model: nn.Module) -> None:
    with FlopCounterMode(model, display=False) as counter:
        model(rows(2, 3)).sum().backward()
        memory = [p.grad for p in model.parameters() if p.grad is not None]
        rows(2, 3) * 0.5  # the gradients are looked at
        for parameter in model.parameters():
            parameter.grad = None
        for tensor in memory:
            tensor * 2.0
    assert counter.profile.total("optimizer").flops == 0


def test_work_after_backward_without_an_optimizer_is_forward_work(model: nn.Module) -> None:
    """Only what follows a look at a gradient belongs to the optimizer's phase."""
    with FlopCounterMode(model, display=False) as counter:
        model(rows(2, 3)).sum().backward()
        rows(2, 3) * 0.5
    assert counter.profile.total("optimizer").flops == 0


DEEPSPEED = '''
import torch

class ZeroOptimizer:
    """A stand-in: it keeps flat copies of the gradients, made while backward runs."""

    def __init__(self, parameters, optimizer):
        self.flat = []
        self.optimizer = optimizer
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.keep)

    def keep(self, parameter):
        self.flat.append(parameter.grad.clone().view(-1))
        parameter.grad = None

    def backward(self, loss):
        loss.backward()
        self.average()

    def average(self):
        for flat in self.flat:
            flat.mul_(0.5)

    def scaled_global_norm(self):
        return torch.stack([flat.float().norm(2) for flat in self.flat]).norm(2)

    def step(self):
        scale = 1.0 / self.scaled_global_norm()
        for flat in self.flat:
            flat.mul_(scale)
        self.flat = []
        self.optimizer.step()
'''


@pytest.fixture
def deepspeed_runtime() -> Iterator[Any]:
    """A stand-in for the module that holds DeepSpeed's optimizers."""
    module = types.ModuleType("deepspeed.runtime.zero.stage_1_and_2")
    exec(DEEPSPEED, module.__dict__)
    assert module.__name__ not in sys.modules
    yield module


def test_norm_of_flat_gradients_in_deepspeed_is_named_and_no_forward_work(
    model: nn.Module, deepspeed_runtime: Any
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed_runtime.ZeroOptimizer(list(model.parameters()), optimizer)
    profile = trained(model, engine)
    n = sum(PARAMETERS)
    norms, of_norms = 2 * n, 2 * 2
    assert profile.node(ENGINE).total("optimizer").flops == 2 * (norms + of_norms + INVERSE + n)
    assert profile.total("optimizer").flops == profile.node(ENGINE).total("optimizer").flops
    assert profile.outside.own("forward").flops == 2 * (2 * 3 + (2 * 7 - 1) + 1)


def test_gradients_that_deepspeed_averages_after_autograd_are_backward_work(
    model: nn.Module, deepspeed_runtime: Any
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed_runtime.ZeroOptimizer(list(model.parameters()), optimizer)
    with FlopCounterMode(model, display=False) as counter:
        engine.backward(model(rows(2, 3)).sum())
    n = sum(PARAMETERS)
    assert counter.profile.node(ENGINE).own("backward").flops == n
    assert counter.profile.total("optimizer").flops == 0
