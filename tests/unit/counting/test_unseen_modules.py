"""Modules whose kernels bypass the dispatcher are named; no others are."""

from __future__ import annotations

import ctypes
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dispatch_flops import FlopCounterMode, OpCost
from dispatch_flops.errors import UncountedWarning
from tests.helpers.profiling import profile_of
from tests.models import CASES, Case


def floats(tensor: Tensor) -> Any:
    """Return the tensor's memory as an array, as a pybind function gets it: by its address."""
    memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(tensor.shape)


def raw_kernel(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x * weight unseen by the dispatcher."""
    out = torch.empty_like(x)
    floats(out)[...] = floats(x) * floats(weight)
    return out


class RawFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return raw_kernel(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        return raw_kernel(grad, weight), raw_kernel(grad, x).sum(0)


class RawScale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = RawFunction.apply(x, self.weight)
        return out


X = torch.ones(2, 3)


def notes_of(model: nn.Module, *args: Any, **options: Any) -> tuple[str, ...]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UncountedWarning)
        notes = profile_of(model, *args, model=model, **options).notes
    warned = [str(w.message) for w in caught if issubclass(w.category, UncountedWarning)]
    assert bool(warned) is bool(notes)
    return notes


def test_module_of_a_raw_kernel_is_named_in_the_note_and_the_warning() -> None:
    model = nn.Sequential(nn.Linear(3, 3), RawScale(3))
    with pytest.warns(UncountedWarning, match=r"1 \(RawScale\) ran and holds parameters"):
        profile = profile_of(lambda: model(X).sum().backward(), model=model)
    (note,) = profile.notes
    assert note.startswith("1 (RawScale) ran and holds parameters")
    assert not profile.uncounted_ops()


def test_many_modules_of_raw_kernels_are_named_in_one_short_note_and_warning() -> None:
    model = nn.Sequential(*(RawScale(3) for _ in range(100)))
    listed = ", ".join(f"{number} (RawScale)" for number in range(6)) + " and 94 more"
    with pytest.warns(UncountedWarning) as caught:
        (note,) = profile_of(model, X, model=model).notes
    assert note.startswith(f"{listed} ran and hold parameters")
    assert str(caught[0].message).startswith(f"{note}. Register a formula")


def test_module_of_a_raw_kernel_does_not_raise_under_strict() -> None:
    model = RawScale(3)
    with (
        pytest.warns(UncountedWarning, match=r"the model \(RawScale\)"),
        FlopCounterMode(model, display=False, strict=True),
    ):
        model(X)


def test_module_of_a_raw_kernel_with_a_formula_is_not_named() -> None:
    def formula(module: nn.Module, x: Tensor, *, out: Tensor, **_: Any) -> OpCost:
        return OpCost(flops=x.numel())

    model = nn.Sequential(nn.Linear(3, 3), RawScale(3))
    profile = profile_of(model, X, model=model, custom_mapping={RawScale: formula})
    assert profile.notes == ()
    assert profile.node("1").total().flops == 2 * 3


def test_module_that_a_hook_calls_in_backward_with_other_weights_is_not_named() -> None:
    model = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 7)])
    weights = {"weight": torch.ones(7, 5), "bias": torch.ones(7)}

    def call_other(grad: Tensor) -> None:
        torch.func.functional_call(model[1], weights, grad)

    def step() -> None:
        y = model[0](X)
        y.register_hook(call_other)
        y.sum().backward()

    profile = profile_of(step, model=model)
    assert profile.node("1").total("backward").macs == 2 * 5 * 7
    assert profile.notes == ()


class ReadByItsParent(nn.Module):
    """The parent takes the weights of its layers; attention does so with ``out_proj``."""

    def __init__(self) -> None:
        super().__init__()
        self.held = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.given = Given()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = F.linear(x, self.held[0].weight) * self.given()
        return out.sum() + self.attention(y, y, y)[0].sum()


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return self.weight


class WithUnusedParameters(nn.Module):
    """Holds a token for training alone, beside layers that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def tied() -> nn.Module:
    embedding, head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, head)


SEEN: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "parameters that the parent reads": (ReadByItsParent(), (X, torch.ones(2, 5, 4))),
    "parameters that are not needed": (WithUnusedParameters(), (X,)),
    "embedding alone": (nn.Embedding(7, 3), (torch.tensor([1, 2]),)),
    "tied embedding": (tied(), (torch.tensor([1, 2]),)),
    "expanded parameter": (nn.Sequential(nn.PReLU(), nn.LayerNorm(3)), (X,)),
    "recurrent": (nn.LSTM(3, 5), (torch.ones(2, 4, 3),)),
    "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(3, 5)), (X,)),
    "lazy": (nn.LazyLinear(5), (X,)),
}


@pytest.mark.parametrize("name", SEEN)
def test_module_of_visible_operators_is_not_named(name: str) -> None:
    model, args = SEEN[name]
    assert notes_of(model, *args) == ()


def test_module_called_with_other_tensors_for_its_parameters_is_not_named() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    others = {name: torch.ones_like(value) for name, value in model.named_parameters()}

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(self.model, others, (x,))
            return out

    assert notes_of(Called(), X) == ()


@pytest.mark.parametrize(
    "case",
    # The LSTM runs operators for each of its many steps; "recurrent" above is a short one.
    [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * (c.name == "LSTM")) for c in CASES],
)
def test_no_module_of_the_test_models_is_named(case: Case) -> None:
    model, inputs = case.build("meta")
    assert notes_of(model, *inputs) == ()
