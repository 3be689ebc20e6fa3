"""Attribution under ``torch.func`` and forward-mode differentiation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tests.helpers.attributing import plain, rows, work, work_of
from tests.helpers.profiling import profile_of


@pytest.fixture
def model() -> nn.Sequential:
    return plain(3, 5, 7)


FIRST, SECOND = 3 * 5, 5 * 7  # MACs per row


def summed(model: nn.Module) -> Any:
    return lambda x: model(x).sum()


def test_grad(model: nn.Module) -> None:
    """The gradient of the input alone; parameters are constants here."""
    assert work(grad(summed(model)), rows(2, 3), model=model) == {
        "0": {"forward": 2 * FIRST, "backward": 2 * FIRST},
        "1": {"forward": 2 * SECOND, "backward": 2 * SECOND},
    }


def test_grad_of_parameters_with_functional_call(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).sum()

    profile = profile_of(grad(loss), parameters, rows(2, 3), model=model)
    assert work_of(profile) == {
        "0": {"forward": 2 * FIRST, "backward": 2 * FIRST},
        "1": {"forward": 2 * SECOND, "backward": 2 * 2 * SECOND},
    }
    assert profile.root.active_params == FIRST + SECOND


def test_functional_call_with_other_tensors(model: nn.Module) -> None:
    """Tensors that stand in for the parameters take part; the parameters do not."""
    stand_ins = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    profile = profile_of(functional_call, model, stand_ins, (rows(2, 3),), model=model)
    assert work_of(profile) == {"0": {"forward": 2 * FIRST}, "1": {"forward": 2 * SECOND}}
    assert profile.root.active_params == 0


def test_vmap(model: nn.Module) -> None:
    batched = vmap(lambda x: model(x))
    assert work(batched, torch.randn(4, 2, 3), model=model) == {
        "0": {"forward": 4 * 2 * FIRST},
        "1": {"forward": 4 * 2 * SECOND},
    }


def test_gradients_per_sample(model: nn.Module) -> None:
    """vmap over grad: each of 4 samples has weight gradients of its own."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).sum()

    per_sample = vmap(grad(loss), in_dims=(None, 0))
    assert work(per_sample, parameters, torch.randn(4, 2, 3), model=model) == {
        "0": {"forward": 4 * 2 * FIRST, "backward": 4 * 2 * FIRST},
        "1": {"forward": 4 * 2 * SECOND, "backward": 4 * 2 * 2 * SECOND},
    }


def test_jvp_runs_tangents_in_the_forward_of_each_module(model: nn.Module) -> None:
    """Three products: the value, the input's tangent, and the weight's, which torch makes 0."""
    x = rows(2, 3)
    assert work(lambda: jvp(model, (x,), (torch.ones_like(x),)), model=model) == {
        "0": {"forward": 3 * 2 * FIRST},
        "1": {"forward": 3 * 2 * SECOND},
    }


def test_dual_numbers(model: nn.Module) -> None:
    x = rows(2, 3)

    def call() -> None:
        with forward_ad.dual_level():
            model(forward_ad.make_dual(x, torch.ones_like(x)))

    assert work(call, model=model) == {
        "0": {"forward": 3 * 2 * FIRST},
        "1": {"forward": 3 * 2 * SECOND},
    }


def test_vjp(model: nn.Module) -> None:
    def call() -> None:
        y, pull = vjp(model, rows(2, 3))
        pull(torch.ones_like(y))

    assert work(call, model=model) == {
        "0": {"forward": 2 * FIRST, "backward": 2 * FIRST},
        "1": {"forward": 2 * SECOND, "backward": 2 * SECOND},
    }


def test_jacrev(model: nn.Module) -> None:
    """One backward row per output element (2·7 of them), through both layers."""
    found = work(jacrev(model), rows(2, 3), model=model)
    assert found == {
        "0": {"forward": 2 * FIRST, "backward": 2 * 7 * 2 * FIRST},
        "1": {"forward": 2 * SECOND, "backward": 2 * 7 * 2 * SECOND},
    }


def test_jacfwd(model: nn.Module) -> None:
    """One tangent per input element (2·3 of them), beside the value and the weight's tangent."""
    assert work(jacfwd(model), rows(2, 3), model=model) == {
        "0": {"forward": (2 + 2 * 3) * 2 * FIRST},
        "1": {"forward": (2 + 2 * 3) * 2 * SECOND},
    }


def test_hessian_is_all_in_the_layers(model: nn.Module) -> None:
    model = nn.Sequential(model[0], nn.Tanh(), model[1])
    found = work(hessian(summed(model)), torch.randn(3), model=model)
    assert set(found) == {"0", "2"}


def test_autograd_functional(model: nn.Module) -> None:
    """``torch.autograd.functional.jacobian`` asks for one row at a time: 2·7 backward passes."""
    found = work(torch.autograd.functional.jacobian, model, rows(2, 3), model=model)
    assert found == {
        "0": {"forward": 2 * FIRST, "backward": 2 * 7 * 2 * FIRST},
        "1": {"forward": 2 * SECOND, "backward": 2 * 7 * 2 * SECOND},
    }
