"""Calls that end unseen, in exceptions or after a module's own hooks, are dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.thread_state import OpenCall, ThreadState
from dispatch_flops.counting.undo import UndoStack
from tests.helpers.attributing import plain, rows, train, work, work_of
from tests.helpers.profiling import profile_of


class Fragile(nn.Module):
    def __init__(self, error: type[BaseException] = ValueError) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5, bias=False)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise self.error("no")


def test_operators_after_a_caught_exception_belong_to_the_caller() -> None:
    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = Fragile()
            self.good = nn.Linear(5, 7, bias=False)
            self.w = nn.Parameter(torch.randn(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.bad(x)
            except ValueError:
                x = x @ self.w
            return self.good(x)

    model = Catching()
    square = 2 * 5 * 5
    assert work(train, model, rows(2, 5), model=model) == {
        "": {"forward": square, "backward": square},
        "bad.inner": {"forward": square},
        "good": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
    }


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_call_after_an_exception_is_attributed_to_its_modules(error: type[BaseException]) -> None:
    model = nn.ModuleDict({"bad": nn.Sequential(Fragile(error)), "good": plain(3, 5)})

    def call() -> None:
        with pytest.raises(error):
            model["bad"](rows(2, 5))
        train(model["good"], rows(2, 3))

    assert work(call, model=model) == {
        "bad.0.inner": {"forward": 2 * 5 * 5},
        "good.0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
    }


def test_call_that_ended_unseen_is_dropped_when_a_known_model_is_called_again() -> None:
    """An interrupt skips the hooks. What follows the next call of the model is outside of it."""

    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5, bias=False)
            self.is_to_raise = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            if self.is_to_raise:
                raise KeyboardInterrupt
            return x

    model = Interrupted()
    x, factor = rows(2, 5), rows(5, 7)

    def call() -> None:
        model(x)
        model(x)
        model.is_to_raise = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.is_to_raise = False
        model(x) @ factor

    assert work(call, model=model) == {
        "inner": {"forward": 4 * (2 * 5 * 5)}, "<outside>": {"forward": 2 * 5 * 7}
    }  # fmt: skip


def test_operators_after_an_exception_are_outside_the_module_that_raised() -> None:
    model, w = Fragile(), rows(5, 7)

    def call() -> None:
        with pytest.raises(ValueError, match="no"):
            model(rows(2, 5))
        _ = rows(2, 5) @ w

    assert work(call, model=model) == {
        "inner": {"forward": 2 * 5 * 5},
        "<outside>": {"forward": 2 * 5 * 7},
    }


def test_operators_of_a_modules_own_forward_hooks_belong_to_the_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 5, bias=False)
            self.b = nn.Linear(5, 7, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(self.a(x))
            return y @ torch.ones(7, 11)

    model, factor = Net(), rows(5, 5)
    model.a.register_forward_pre_hook(lambda module, args: (args[0] @ torch.ones(3, 3),))
    model.a.register_forward_hook(lambda module, args, out: out @ factor)
    model.a.register_forward_hook(lambda module, args, out: out @ factor)
    inner = 2 * 3 * 3 + 2 * 3 * 5 + 2 * (2 * 5 * 5)  # hook before, the layer, two hooks after
    again = 13 * 3 * 3 + 13 * 3 * 5 + 2 * (13 * 5 * 5)  # called in the hook of b

    def call_a(module: nn.Module, args: object, out: Tensor) -> None:
        model.a(torch.ones(13, 3))

    model.b.register_forward_hook(call_a)
    profile = profile_of(model, rows(2, 3), model=model)
    assert {fqn: w["forward"] for fqn, w in work_of(profile).items()} == {
        "a": inner + again,
        "b": 2 * 5 * 7,
        "": 2 * 7 * 11,
    }
    model.b._forward_hooks.clear()
    trained = work(train, model, rows(2, 3), model=model)
    assert trained["a"]["backward"] == 2 * 3 * 5 + 2 * (2 * 5 * 5)


def test_module_with_hooks_that_raise_does_not_stay_open() -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False))

    def fail(module: nn.Module, args: object, out: Tensor) -> None:
        raise ValueError

    handle = model[0].register_forward_hook(fail)

    def run() -> None:
        with pytest.raises(ValueError):
            model(rows(2, 3))
        handle.remove()
        rows(2, 3) @ rows(3, 11)  # outside the model
        model(rows(2, 3))

    assert work(run, model=model) == {
        "0": {"forward": 2 * (2 * 3 * 5)},
        "1": {"forward": 2 * 5 * 7},
        "<outside>": {"forward": 2 * 3 * 11},
    }


class Depths:
    """Observer that notes how many calls are open when one begins."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def entering(self) -> None: ...

    def enter(self, thread: ThreadState, stamp: Any) -> None:
        self.found.append(sum(call.named is not None for call in thread.stack))

    def leaving(self) -> None: ...

    def leave(self, thread: ThreadState, call: OpenCall, stamp: Any) -> None: ...


def test_call_has_ended_with_its_hooks_when_its_module_is_called_again() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x))

    model, depths = Twice(), Depths()
    model.inner.register_forward_hook(lambda module, args, out: None)
    tracker = Tracker(ModuleNames([model]), [depths])
    with UndoStack() as undo:
        tracker.start(undo)
        model(rows(2, 3))
    assert depths.found == [1, 2, 2]
