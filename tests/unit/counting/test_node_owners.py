"""Owners of backward nodes that other threads, or forwards before the block, have made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode
from dispatch_flops.counting.thread_state import AMBIGUOUS
from dispatch_flops.counting.thread_state import UNATTRIBUTED as FROM_BEFORE
from tests.helpers.attributing import Products, plain, rows, train, work, work_of
from tests.helpers.profiling import profile_of
from tests.helpers.threads import as_autograd_would, in_new_thread


def test_backward_in_a_thread_of_autograd_is_attributed_to_modules() -> None:
    model = plain(3, 5, 7)

    def run() -> None:
        loss = model(rows(2, 3)).sum()
        as_autograd_would(loss.backward)

    assert work_of(profile_of(run, model=model)) == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "1": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
    }


@pytest.mark.parametrize("fresh", [True, False], ids=["equal numbers", "numbers apart"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_recomputation_in_a_thread_of_autograd_is_attributed_to_modules(
    reentrant: bool, fresh: bool
) -> None:
    """Sequence numbers start at 0 in every thread; with "fresh", both threads start there."""
    core = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh())
    model = nn.Sequential(nn.Linear(3, 5, bias=False), core, nn.Linear(5, 7, bias=False))

    def step() -> None:
        h = checkpoint(model[1], model[0](rows(2, 3)), use_reentrant=reentrant)
        loss = model[2](h).sum()
        as_autograd_would(loss.backward)

    profile = (in_new_thread if fresh else lambda fn: fn())(lambda: profile_of(step, model=model))
    assert work_of(profile) == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "1.0": {"forward": 2 * 5 * 5, "recompute": 2 * 5 * 5, "backward": 2 * 2 * 5 * 5},
        "2": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
    }


@pytest.mark.parametrize("fresh", [True, False], ids=["equal numbers", "numbers apart"])
def test_double_backward_in_a_thread_of_autograd_is_never_guessed(fresh: bool) -> None:
    """Nodes of two threads may have the same number: they are named as ambiguous."""
    model = plain(3, 5)

    def step() -> None:
        x = rows(2, 3, grad=True)
        loss = model(x).sum()

        def both() -> None:
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            gradient.pow(2).sum().backward()

        as_autograd_would(both)

    def run() -> Any:
        if not fresh:
            for _ in range(50):
                rows(2, 3, grad=True).sum()
        return profile_of(step, model=model)

    profile = in_new_thread(run)
    found = work_of(profile)
    product = 2 * 3 * 5
    assert found["0"]["forward"] == product
    backward = {fqn: phases.get("backward", 0) for fqn, phases in found.items()}
    assert sum(backward.values()) == 2 * product
    assert set(backward) <= {"0", AMBIGUOUS}
    assert (AMBIGUOUS in backward) == fresh


def test_backward_of_a_forward_in_a_worker_is_attributed_to_modules() -> None:
    """The number of a node tells which thread made it if only one thread has that number."""
    model = nn.Sequential(Products(3, 5))
    for _ in range(50):
        rows(2, 3, grad=True).sum()  # makes the numbers of this thread differ from the worker's
    with FlopCounterMode(model, display=False) as counter:

        def forward() -> Any:
            with counter.in_thread():
                return model(rows(2, 3)).sum()

        in_new_thread(forward).backward()
    assert work_of(counter.profile) == {"0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5}}


def test_backward_of_a_forward_outside_the_block_is_attributed_by_parameters() -> None:
    """Nodes of that forward are attributed by their parameters; without any, they are named so."""
    model = nn.Sequential(nn.Linear(3, 5), Products(5, 7), nn.Linear(7, 11, bias=False))
    loss = model(rows(2, 3)).sum()
    profile = profile_of(loss.backward, model=model)
    assert work_of(profile) == {
        "0": {"backward": 2 * 3 * 5},
        FROM_BEFORE: {"backward": 2 * 2 * 5 * 7},
        "2": {"backward": 2 * 2 * 7 * 11},
    }
    assert profile.root.calls == 0


def test_backward_node_of_several_parameters_belongs_to_their_common_module() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Module()
            self.a.w = nn.Parameter(torch.randn(2, 3))
            self.b = nn.Module()
            self.b.w = nn.Parameter(torch.randn(3, 5))

        def forward(self) -> Tensor:
            return self.a.w @ self.b.w

    model = nn.Sequential(Pair(), Pair())
    loss = model[1]().sum()
    assert work(loss.backward, model=model) == {"1": {"backward": 2 * 2 * 3 * 5}}
    # Neither of two models holds both parameters: the node is named as unattributed.
    one, other = nn.Linear(3, 2, bias=False), nn.Linear(5, 3, bias=False)
    loss = (one.weight @ other.weight).sum()
    with FlopCounterMode([one, other], display=False) as counter:
        loss.backward()
    assert work_of(counter.profile) == {FROM_BEFORE: {"backward": 2 * 2 * 3 * 5}}


def test_backward_of_a_forward_partly_outside_the_block_is_attributed_in_part() -> None:
    model = nn.Sequential(Products(3, 5), plain(5, 7))
    h = model[0](rows(2, 3))
    assert work(train, model[1], h, model=model) == {
        "1.0": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
        FROM_BEFORE: {"backward": 2 * 3 * 5},
    }
