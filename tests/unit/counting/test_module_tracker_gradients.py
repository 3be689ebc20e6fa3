"""Attribution of gradients within forward, and of gradients of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops import FlopCounterMode
from dispatch_flops.counting.thread_state import UNATTRIBUTED as FROM_BEFORE
from tests.helpers.attributing import Products, plain, rows, train, work, work_of
from tests.helpers.profiling import profile_of


class Energy(nn.Module):
    """Model whose forward takes the gradient of an energy, and then a product."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain(3, 5, 1)
        self.w = nn.Parameter(torch.randn(3, 7))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = self.net(x).sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return forces @ self.w


def test_gradient_within_forward_is_backward_of_its_modules() -> None:
    model = Energy()
    assert work(model, rows(2, 3), model=model) == {
        "": {"forward": 2 * 3 * 7},
        "net.0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},  # gradient of the input
        "net.1": {"forward": 2 * 5 * 1, "backward": 2 * 5 * 1},
    }


def test_backward_through_a_gradient_within_forward_is_attributed() -> None:
    """f = w2ᵀ·w1ᵀ·… is linear in x: the second backward has products of weights only.

    Forward computes g1 = ones@w1 (2x5) and f = g1@w0 (2x3), then f@w (2x7). Backward: f@w has the
    gradients of f and w, f = g1@w0 those of g1 and w0, and g1 = ones@w1 that of w1.
    """
    model = Energy()
    assert work(train, model, rows(2, 3), model=model) == {
        "": {"forward": 2 * 3 * 7, "backward": 2 * (2 * 3 * 7)},
        "net.0": {"forward": 2 * 3 * 5, "backward": (1 + 2) * (2 * 3 * 5)},
        "net.1": {"forward": 2 * 5 * 1, "backward": (1 + 1) * (2 * 5 * 1)},
    }


def test_double_backward_excludes_the_loss_between_the_passes() -> None:
    """A gradient penalty: operators between the two passes are outside the model."""
    model = plain(3, 5)
    x, w = rows(2, 3, grad=True), rows(3, 7, grad=True)

    def penalty() -> None:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (gradient @ w).pow(2).sum().backward()

    profile = profile_of(penalty, model=model)
    product = 2 * 3 * 7
    assert work_of(profile) == {
        # forward; the gradient of the input, then (g = ones@w0) that of the weight
        "0": {"forward": 2 * 3 * 5, "backward": 2 * (2 * 3 * 5)},
        "<outside>": {"forward": product, "backward": 2 * product},
    }


def test_repeated_backward_passes_are_all_counted() -> None:
    model = plain(3, 5, 7)

    def passes() -> None:
        loss = model(rows(2, 3)).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()

    assert work(passes, model=model) == {
        "0": {"forward": 2 * 3 * 5, "backward": 3 * 2 * 3 * 5},
        "1": {"forward": 2 * 5 * 7, "backward": 3 * 2 * 2 * 5 * 7},
    }


def test_two_losses_of_one_trunk_count_its_backward_twice() -> None:
    model = nn.ModuleDict({"trunk": plain(3, 5), "a": plain(5, 7), "b": plain(5, 11)})

    def losses() -> None:
        h = model["trunk"](rows(2, 3))
        a, b = model["a"](h).sum(), model["b"](h).sum()
        a.backward(retain_graph=True)
        b.backward()

    assert work(losses, model=model) == {
        "trunk.0": {"forward": 2 * 3 * 5, "backward": 2 * 2 * 3 * 5},
        "a.0": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
        "b.0": {"forward": 2 * 5 * 11, "backward": 2 * 2 * 5 * 11},
    }


def test_graph_older_than_the_timeline_is_unattributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After many calls a graph is too old to be attributed, but a recent one is not."""
    monkeypatch.setattr("dispatch_flops.counting.thread_state._TIMELINE", 64)
    model = nn.Sequential(Products(3, 5))
    x = rows(2, 3)

    def call() -> None:
        old = model(x).sum()
        for _ in range(100):
            recent = model(x).sum()
        recent.backward()
        old.backward()

    product = 2 * 3 * 5
    assert work(call, model=model) == {
        "0": {"forward": 101 * product, "backward": product},
        FROM_BEFORE: {"backward": product},
    }


def test_backward_after_the_block_is_not_counted() -> None:
    model = plain(3, 5)
    with FlopCounterMode(model, display=False) as counter:
        loss = model(rows(2, 3)).sum()
    loss.backward()
    assert work_of(counter.profile) == {"0": {"forward": 2 * 3 * 5}}
