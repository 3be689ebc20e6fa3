"""Storages: how long their Python objects live, and what changes their size."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dispatch_flops import _torch
from tests.helpers.interpreters import run_python

TWO_TRACKERS = """
import warnings
warnings.filterwarnings("ignore")
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from dispatch_flops import FlopCounterMode

kept = []  # until the interpreter ends, with the weak references of both
for _ in range(8):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.randn(2, 5, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    counter = FlopCounterMode(model, display=False, memory=True)
    with counter:
        step()
        kept.append(model(torch.randn(2, 5, 16)))  # a graph that is never run backward
    both = MemTracker()
    both.track_external(model, optimizer)
    with FlopCounterMode(model, display=False, memory=True) as inner, both:
        step()
    kept.append((model, optimizer, tracker, counter, both, inner))
unfinished = FlopCounterMode(model, display=False, memory=True)
unfinished.__enter__()  # and never left
kept.append(model(torch.randn(2, 5, 16)))
print("finished", counter.profile.memory.peak_bytes > 0)
"""


@pytest.mark.slow
def test_process_with_another_memory_tracker_ends_normally() -> None:
    done = run_python("-c", TWO_TRACKERS)
    assert (done.returncode, done.stdout.strip()) == (0, "finished True"), done.stderr


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_python_object_lives_as_long_as_the_storage(device: str) -> None:
    tensor = torch.empty(7, device=device)
    identity, reference = id(tensor.untyped_storage()), weakref.ref(tensor.untyped_storage())
    gc.collect()
    view = tensor[2:].view(5, 1)
    del tensor
    assert reference() is not None
    assert id(view.untyped_storage()) == identity
    del view
    assert reference() is None


def test_callback_comes_when_autograd_releases_a_saved_tensor() -> None:
    released: list[str] = []
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    reference = weakref.ref(y.untyped_storage(), lambda _: released.append("y"))
    total = y.sum()
    del y
    assert released == []
    total.backward()
    assert released == ["y"] and reference() is None


@pytest.fixture
def sizes() -> list[int]:
    return []


def test_follower_sees_each_resize_of_a_storage(sizes: list[int]) -> None:
    def follow(storage: torch.UntypedStorage) -> None:
        sizes.append(storage.nbytes())

    own = torch.UntypedStorage.resize_
    _torch.storage_sizes.follow(follow)
    try:
        tensor = torch.empty(5)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(4 * 7)
    finally:
        _torch.storage_sizes.unfollow(follow)
    tensor.untyped_storage().resize_(4)
    assert sizes == [0, 4 * 7]
    assert torch.UntypedStorage.resize_ is own


class Base:
    def grow(self, by: int) -> int:
        return by * 3


class Child(Base):
    pass


def test_followed_method_returns_its_result_and_tells_every_follower() -> None:
    """One of them ends while it is told."""
    followed, seen = _torch.FollowedMethod(Base, "grow"), list[str]()

    def once(found: Any) -> None:
        seen.append("once")
        followed.unfollow(once)

    def always(found: Any) -> None:
        seen.append("always")

    followed.follow(once)
    followed.follow(always)
    assert (Base().grow(5), Base().grow(by=7)) == (15, 21)
    followed.unfollow(always)
    followed.unfollow(always)  # which does nothing
    assert Base().grow(2) == 6
    assert seen == ["once", "always", "always"]


@pytest.mark.parametrize("owner", [Base, Child])
def test_followed_method_is_the_former_one_afterwards(owner: type[Base]) -> None:
    before = dict(vars(owner))
    followed = _torch.FollowedMethod(owner, "grow")
    followed.follow(print)
    assert owner.grow is not before.get("grow", Base.grow)
    assert owner.grow.__name__ == "grow"
    followed.unfollow(print)
    assert dict(vars(owner)) == before


def test_followed_method_that_the_program_replaced_stays_replaced() -> None:
    class Replaced(Base):
        pass

    followed, own = _torch.FollowedMethod(Replaced, "grow"), lambda self, by: by
    followed.follow(print)
    Replaced.grow = own  # type: ignore[method-assign]
    followed.unfollow(print)
    assert vars(Replaced)["grow"] is own


@pytest.mark.parametrize(
    ("make", "has_storage"),
    [
        (lambda: torch.eye(3), True),
        (lambda: torch.eye(3, device="meta"), True),
        pytest.param(
            lambda: torch.eye(3).to_mkldnn(),
            False,
            marks=pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN"),
        ),
    ],
)
def test_opaque_tensor_has_no_storage(make: Callable[[], torch.Tensor], has_storage: bool) -> None:
    assert _torch.has_storage(make()) is has_storage
