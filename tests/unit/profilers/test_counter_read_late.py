"""A profile that is read late is the one that was read at once."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode, Profile, UncountedOpsError, UncountedWarning
from dispatch_flops.counting import placement
from dispatch_flops.profile.memory import FollowMemory
from dispatch_flops.profilers import session
from dispatch_flops.profilers.isolation import garbage_collection_later

MACS = 2 * 3 * 5 + 2 * 5 * 7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.heads = nn.ModuleDict({"b": nn.Linear(5, 7), "a": nn.Linear(5, 11)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads["b"](torch.relu(self.first(x)))


FOLLOWING = pytest.mark.parametrize("memory", [False, True, "timeline"])


def count(model: nn.Module, memory: FollowMemory = False) -> FlopCounterMode:
    model.zero_grad()
    with FlopCounterMode(model, display=False, memory=memory) as counter:
        model(torch.ones(2, 3)).sum().backward()
    return counter


def rename_class(model: Any) -> None:
    model.first.__class__ = type("Renamed", (nn.Linear,), {})


def change_extra_repr(model: Any) -> None:
    model.first.in_features = 1234


def freeze(model: Any) -> None:
    model.requires_grad_(False)


def shrink(model: Any) -> None:
    model.first.weight.data = torch.ones(1)


def replace_parameter(model: Any) -> None:
    model.first.weight = nn.Parameter(torch.ones(1))


def replace_module(model: Any) -> None:
    model.first = nn.Identity()


def remove_module(model: Any) -> None:
    del model.heads["a"]


def reorder(model: Any) -> None:
    model.heads.update({"b": model.heads.pop("b")})


def add_module(model: Any) -> None:
    model.late = nn.Linear(13, 17)
    model.late(torch.ones(1, 13))


def move(model: Any) -> None:
    model.to("meta")


def empty(model: Any) -> None:
    vars(model)["_modules"].clear()
    gc.collect()


def call_again(model: Any) -> None:
    model(torch.ones(2, 3)).sum().backward()


def drop_gradients(model: Any) -> None:
    model.zero_grad()


def resize_storage(model: Any) -> None:
    model.first.weight.untyped_storage().resize_(4096)


CHANGES = [
    rename_class, change_extra_repr, freeze, shrink, replace_parameter, replace_module,
    remove_module, reorder, add_module, move, empty, call_again, drop_gradients, resize_storage,
]  # fmt: skip


@FOLLOWING
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_profile_read_after_a_change_of_the_model_is_unchanged(
    change: Callable[[nn.Module], None], memory: FollowMemory
) -> None:
    model = Net()
    at_once = count(model, memory).profile
    assert at_once.root.children[1].children[0].name == "b"
    assert (at_once.memory is not None) == bool(memory)
    late = count(model, memory)
    change(model)
    assert late.profile == at_once
    assert late.profile.to_dict()["root"] == at_once.to_dict()["root"]


def test_profile_read_late_has_the_date_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = count(Net())

    class Later:
        @staticmethod
        def now(_: Any) -> Any:
            raise AssertionError("the date is of the run, not of the reading")

    monkeypatch.setattr(placement, "datetime", Later)
    assert counter.profile.run.date


@FOLLOWING
def test_profile_keeps_neither_model_nor_parameters_alive(memory: FollowMemory) -> None:
    model = Net()
    kept = [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
    counter = count(model, memory)
    profile, counted = counter.profile, [ref() is not None for ref in kept]
    del counter, model
    gc.collect()
    assert all(counted)
    assert [ref() for ref in kept] == [None] * len(kept)
    assert profile.root.class_name == "Net"
    assert profile.total_params == 3 * 5 + 5 + 5 * 7 + 7 + 5 * 11 + 11


def test_given_optimizer_is_released_with_the_counter_and_its_owner() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    counter = FlopCounterMode(model, display=False, memory=True, optimizers=[optimizer])
    with garbage_collection_later():
        with counter:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        kept = weakref.ref(optimizer)
        del optimizer, counter
        assert kept() is None


@FOLLOWING
def test_leaving_and_totals_build_no_tree(
    monkeypatch: pytest.MonkeyPatch, memory: FollowMemory
) -> None:
    def refuse(*_: Any) -> Profile:
        raise AssertionError("a tree is built")

    model = Net()
    monkeypatch.setattr(session, "build_profile", refuse)
    with FlopCounterMode(model, display=False, memory=memory) as counter:
        model(torch.ones(2, 3))
        assert counter.get_total_macs() == MACS
        model(torch.ones(2, 3))
    assert counter.get_total_macs() == counter.profile.total().macs == 2 * MACS
    assert counter.profile.total("backward").macs == 0
    with pytest.raises(AssertionError, match="a tree is built"):
        _ = counter.profile.root


def test_totals_of_each_phase_are_those_of_the_tree() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with FlopCounterMode(model, display=False) as counter:
        for _ in range(2):
            out = torch.utils.checkpoint.checkpoint(model, torch.ones(3, 5, 8), use_reentrant=False)
            out.sum().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(torch.ones(3, 5, 8))
    profile = counter.profile
    before = {phase: profile.total(phase) for phase in ("forward", "backward", "recompute")}
    before["optimizer"] = profile.total("optimizer")
    assert all(cost.flops for cost in before.values())
    for phase, cost in before.items():
        assert cost == profile.root.total(phase) + profile.outside.total(phase)


def test_uncounted_operators_are_named_at_exit_without_a_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "build_profile", None)
    with torch.library._scoped_library("late_reading", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", torch.clone, "CompositeExplicitAutograd")

        def run(*, strict: bool) -> None:
            with FlopCounterMode(display=False, strict=strict):
                for _ in range(3):
                    torch.ops.late_reading.mystery(torch.ones(3))

        with pytest.warns(UncountedWarning, match=r"late_reading.mystery.default \(3 calls\)"):
            run(strict=False)
        with (
            pytest.warns(UncountedWarning),
            pytest.raises(UncountedOpsError, match=r"mystery.default \(3 calls\)"),
        ):
            run(strict=True)


def test_calls_in_a_thread_after_the_block_are_neither_counted_nor_followed() -> None:
    x = torch.ones(3, 5)
    entered, left = threading.Event(), threading.Event()

    def work() -> None:
        with counter.in_thread():
            x @ x.T
            entered.set()
            left.wait(10)
            x.repeat(7, 11) @ x.repeat(1, 11).T

    with FlopCounterMode(display=False, memory=True) as counter:
        thread = threading.Thread(target=work)
        thread.start()
        entered.wait(10)
    left.set()
    thread.join()
    profile, peak = counter.profile, 4 * (3 * 5 + 3 * 3)
    assert profile.total().macs == profile.outside.total().macs == 3 * 3 * 5
    assert profile.memory is not None and profile.outside.memory is not None
    assert profile.memory.peak_bytes == peak
    assert profile.outside.memory.peak_bytes == {"forward": peak}
