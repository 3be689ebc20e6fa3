"""Recomputed work belongs to the module that called the checkpoint, shared modules included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.attributing import rows, train, work

MACS = 2 * 3 * 3

REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True])


class Holder(nn.Module):
    """Calls a module that others hold, too, in a checkpoint or without one."""

    def __init__(self, shared: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.shared = shared
        self._call = call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self.shared, x)


def plainly(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


@REENTRANT
def test_recomputed_shared_module_is_named_below_the_caller_of_the_checkpoint(
    use_reentrant: bool,
) -> None:
    def recomputed(module: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda x: module(x), x, use_reentrant=use_reentrant, early_stop=False)

    shared = nn.Linear(3, 3, bias=False)
    model = nn.Sequential(Holder(shared, plainly), Holder(shared, recomputed))
    assert work(train, model, rows(2, 3, grad=True), model=model) == {
        "0.shared": {"forward": MACS, "backward": 2 * MACS},
        "1.shared": {"forward": MACS, "backward": 2 * MACS, "recompute": MACS},
    }


class Twice(nn.Module):
    """Calls a module with a hook of its own, then it or another in a checkpoint."""

    def __init__(self, hooked: nn.Module, then: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        hooked.register_forward_hook(lambda module, args, out: None)
        self.hooked, self.then = hooked, then
        self._use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(
            lambda x: self.then(x), self.hooked(x), use_reentrant=self._use_reentrant,
            early_stop=False,
        )  # fmt: skip


@REENTRANT
@pytest.mark.parametrize("calls_same", [True, False])
def test_checkpoint_after_a_module_with_hooks_belongs_to_their_caller(
    use_reentrant: bool, calls_same: bool
) -> None:
    """The hooked module has returned when the checkpoint begins, though its call is still open."""
    hooked = nn.Linear(3, 3, bias=False)
    then = hooked if calls_same else nn.Linear(3, 3, bias=False)
    twice = Twice(hooked, then, use_reentrant)
    model = nn.Sequential(Holder(then, plainly), twice)
    expected = {
        "0.shared": {"forward": MACS, "backward": 2 * MACS},
        "1.hooked": {"forward": MACS, "backward": 2 * MACS},
        "1.then": {"forward": MACS, "backward": 2 * MACS, "recompute": MACS},
    }
    if calls_same:  # held under two names, it has the first
        expected["1.hooked"] = {"forward": 2 * MACS, "backward": 4 * MACS, "recompute": MACS}
        del expected["1.then"]
    assert work(train, model, rows(2, 3, grad=True), model=model) == expected
