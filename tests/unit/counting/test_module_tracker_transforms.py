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


def test_grad_counts_a_forward_and_the_gradient_of_the_input(model: nn.Module) -> None:
    """Only the input has a gradient: parameters are constants here."""
    assert work(grad(summed(model)), rows(2, 3), model=model) == {
        "0": {"forward": 2 * FIRST, "backward": 2 * FIRST},
        "1": {"forward": 2 * SECOND, "backward": 2 * SECOND},
    }


def test_grad_of_functional_call_counts_gradients_of_parameters(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).sum()

    profile = profile_of(grad(loss), parameters, rows(2, 3), model=model)
    assert work_of(profile) == {
        "0": {"forward": 2 * FIRST, "backward": 2 * FIRST},
        "1": {"forward": 2 * SECOND, "backward": 2 * 2 * SECOND},
    }
    assert profile.root.active_params == FIRST + SECOND


def test_functional_call_with_other_tensors_uses_no_parameters(model: nn.Module) -> None:
    """The given tensors replace the parameters, which therefore do not take part."""
    stand_ins = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    profile = profile_of(functional_call, model, stand_ins, (rows(2, 3),), model=model)
    assert work_of(profile) == {"0": {"forward": 2 * FIRST}, "1": {"forward": 2 * SECOND}}
    assert profile.root.active_params == 0


class Caller(nn.Module):
    """Calls a function of layers that it holds and of a copy, which it does not hold."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.layers = plain(3, 5, 7)
        self._call, self._unheld = call, [plain(3, 5, 7)]

    def forward(self, x: Tensor) -> Any:
        return self._call(self.layers, self._unheld[0], x)


def call_with_parameters_of(layers: nn.Module, unheld: nn.Module, x: Tensor) -> Any:
    return functional_call(unheld, dict(layers.named_parameters()), (x,))


def test_parameters_for_which_a_functional_call_takes_others_are_not_the_models() -> None:
    model = Caller(call_with_parameters_of)
    profile = profile_of(model, rows(2, 3), model=model)
    assert work_of(profile) == {
        "<Sequential>.0": {"forward": 2 * FIRST},
        "<Sequential>.1": {"forward": 2 * SECOND},
    }
    assert profile.total_params == profile.root.active_params == FIRST + SECOND
    assert profile.node("<Sequential>").total_params == 0


def test_parameters_of_a_module_that_its_caller_does_not_hold_count_if_some_take_part() -> None:
    model = Caller(lambda layers, unheld, x: (layers(x), functional_call(unheld, {}, x)))
    assert profile_of(model, rows(2, 3), model=model).total_params == 2 * (FIRST + SECOND)
    only_weight = {"0.weight": torch.ones(5, 3)}
    model = Caller(lambda layers, unheld, x: (layers(x), functional_call(unheld, only_weight, x)))
    profile = profile_of(model, rows(2, 3), model=model)
    assert profile.total_params == 2 * (FIRST + SECOND)
    assert profile.root.active_params == FIRST + 2 * SECOND


def test_vmap_counts_the_whole_batch(model: nn.Module) -> None:
    batched = vmap(lambda x: model(x))
    assert work(batched, torch.randn(4, 2, 3), model=model) == {
        "0": {"forward": 4 * 2 * FIRST},
        "1": {"forward": 4 * 2 * SECOND},
    }


def test_vmap_of_grad_counts_gradients_of_each_sample(model: nn.Module) -> None:
    """Each of 4 samples has its own weight gradients."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).sum()

    per_sample = vmap(grad(loss), in_dims=(None, 0))
    assert work(per_sample, parameters, torch.randn(4, 2, 3), model=model) == {
        "0": {"forward": 4 * 2 * FIRST, "backward": 4 * 2 * FIRST},
        "1": {"forward": 4 * 2 * SECOND, "backward": 4 * 2 * 2 * SECOND},
    }


def test_jvp_runs_tangents_in_the_forward_of_each_module(model: nn.Module) -> None:
    """Three products: the value, the tangent of the input, and the weight's, which torch fills."""
    x = rows(2, 3)
    assert work(lambda: jvp(model, (x,), (torch.ones_like(x),)), model=model) == {
        "0": {"forward": 3 * 2 * FIRST},
        "1": {"forward": 3 * 2 * SECOND},
    }


def test_dual_numbers_run_tangents_in_the_forward_of_each_module(model: nn.Module) -> None:
    x = rows(2, 3)

    def call() -> None:
        with forward_ad.dual_level():
            model(forward_ad.make_dual(x, torch.ones_like(x)))

    assert work(call, model=model) == {
        "0": {"forward": 3 * 2 * FIRST},
        "1": {"forward": 3 * 2 * SECOND},
    }


def test_vjp_counts_one_backward_pass(model: nn.Module) -> None:
    def call() -> None:
        y, pull = vjp(model, rows(2, 3))
        pull(torch.ones_like(y))

    assert work(call, model=model) == {
        "0": {"forward": 2 * FIRST, "backward": 2 * FIRST},
        "1": {"forward": 2 * SECOND, "backward": 2 * SECOND},
    }


def test_jacrev_counts_one_backward_row_per_output(model: nn.Module) -> None:
    """One backward row for each of the 2·7 output elements, through both layers."""
    found = work(jacrev(model), rows(2, 3), model=model)
    assert found == {
        "0": {"forward": 2 * FIRST, "backward": 2 * 7 * 2 * FIRST},
        "1": {"forward": 2 * SECOND, "backward": 2 * 7 * 2 * SECOND},
    }


def test_jacfwd_counts_one_tangent_per_input(model: nn.Module) -> None:
    """One tangent for each of the 2·3 input elements, the value and the tangent of the weight."""
    assert work(jacfwd(model), rows(2, 3), model=model) == {
        "0": {"forward": (2 + 2 * 3) * 2 * FIRST},
        "1": {"forward": (2 + 2 * 3) * 2 * SECOND},
    }


def test_hessian_is_attributed_to_the_layers(model: nn.Module) -> None:
    model = nn.Sequential(model[0], nn.Tanh(), model[1])
    found = work(hessian(summed(model)), torch.randn(3), model=model)
    assert set(found) == {"0", "2"}


def test_autograd_functional_counts_one_backward_pass_per_output(model: nn.Module) -> None:
    """``torch.autograd.functional.jacobian`` computes one row at a time: 2·7 backward passes."""
    found = work(torch.autograd.functional.jacobian, model, rows(2, 3), model=model)
    assert found == {
        "0": {"forward": 2 * FIRST, "backward": 2 * 7 * 2 * FIRST},
        "1": {"forward": 2 * SECOND, "backward": 2 * 7 * 2 * SECOND},
    }
