"""The timeline of memory: bytes by role over the operators, folded into intervals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from dispatch_flops import FlopCounterMode, Profile, profile_model
from dispatch_flops.errors import ConfigError
from dispatch_flops.memory import timeline
from dispatch_flops.profile import MemoryPoint, MemoryProfile

F32 = 4


def memory_of(run: Callable[[], object], model: nn.Module | None = None) -> MemoryProfile:
    with FlopCounterMode(model, display=False, memory="timeline") as counter:
        run()
    memory = counter.profile.check().memory
    assert memory is not None
    return memory


def training_steps(steps: int) -> tuple[nn.Module, Callable[[], None]]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 7))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def run() -> None:
        for step in range(steps):
            model(torch.ones(11 + step % 3, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    run()  # the optimizer has its state from the first step on
    return model, run


def test_timeline_has_a_point_for_each_operator() -> None:
    def run() -> None:
        a = torch.ones(3, 5)
        b = torch.ones(7)
        del a
        torch.ones(11).view(11)
        del b
        torch.ones(2)

    found = [(point.operators, point.bytes) for point in memory_of(run).timeline]
    assert found == [
        (1, 3 * 5 * F32),
        (2, (3 * 5 + 7) * F32),
        (3, (7 + 11) * F32),
        (4, (7 + 11) * F32),  # the view
        (5, 2 * F32),
    ]


def test_range_of_the_profiler_is_no_point() -> None:
    def run() -> None:
        with torch.profiler.record_function("range"):
            torch.ones(3)

    assert [point.operators for point in memory_of(run).timeline] == [1]


def test_operators_of_a_subclass_are_points_once() -> None:
    """Its parts run in place of the whole: two products of the tensors that it consists of."""
    pair = TwoTensor(torch.ones(3), torch.ones(3))
    points = memory_of(lambda: pair * 2).timeline
    assert [point.at.operator for point in points] == ["aten.mul.Tensor"] * 2


def test_operator_on_a_fake_tensor_after_one_on_a_subclass_is_a_point() -> None:
    pair = TwoTensor(torch.ones(3), torch.ones(3))
    with FakeTensorMode():
        fake = torch.ones(3)
    points = memory_of(lambda: (pair * 2, fake * 2)).timeline
    assert [point.at.operator for point in points] == ["aten.mul.Tensor"] * (2 + 1)


def test_timeline_tells_roles_and_moments() -> None:
    model, x = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Sigmoid()), torch.ones(7, 3)
    points = memory_of(lambda: model(x).sum().backward(), model).timeline
    sigmoid = next(p for p in points if p.at.operator == "aten.sigmoid.default")
    assert (sigmoid.at.fqn, sigmoid.at.phase) == ("1", "forward")
    assert dict(sigmoid.bytes_by_role) == {
        "parameters": 3 * 5 * F32,
        "inputs": 7 * 3 * F32,
        "temporaries": 7 * 5 * F32,  # the product, which Sigmoid does not keep
        "activations": 7 * 5 * F32,
    }
    assert points[-1].bytes_by_role["gradients"] == 3 * 5 * F32


def test_timeline_changes_no_peak() -> None:
    """Neither of a phase nor of a module; of two moments that are as high, the first counts."""

    def run() -> None:
        torch.ones(1009).neg_()
        torch.zeros(1009)
        step()

    found = []
    for memory in (True, "timeline"):
        model, step = training_steps(3)
        with FlopCounterMode(model, display=False, memory=memory) as counter:  # type: ignore[arg-type]
            run()
        profile = counter.profile
        assert profile.memory is not None
        peaks = [device.peaks for device in profile.memory.devices]
        found.append((peaks, [node.memory for node in profile.nodes()]))
    assert found[0] == found[1]


def test_timeline_agrees_with_the_peak_of_each_phase() -> None:
    model, run = training_steps(2)
    memory = memory_of(run, model)
    assert len(memory.timeline) == memory.timeline[-1].operators < timeline.LIMIT
    for peak in memory.devices[0].peaks:
        of_phase = [p for p in memory.timeline if p.at.phase == peak.peak_at.phase]
        highest = max(of_phase, key=lambda point: point.bytes)
        assert highest.bytes == peak.peak_bytes
        assert highest.at == peak.peak_at
        assert highest.bytes_by_role == peak.by_role()


@pytest.mark.parametrize("limit", [2, 6, 50])
def test_folded_point_is_the_highest_of_its_interval(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, run = training_steps(3)
    full = memory_of(run, model)
    monkeypatch.setattr(timeline, "LIMIT", limit)
    folded = memory_of(run, model)
    points, interval = full.timeline, 1
    while -(-len(points) // interval) > limit:
        interval *= 2
    # max() returns the first of equal points, as folding does.
    expected = [
        max(points[start : start + interval], key=lambda point: point.bytes)
        for start in range(0, len(points), interval)
    ]
    assert list(folded.timeline) == expected
    assert max(p.bytes for p in folded.timeline) == folded.peak_bytes == full.peak_bytes


def test_timeline_inside_the_block_does_not_disturb_the_final_one() -> None:
    model, run = training_steps(1)
    with FlopCounterMode(model, display=False, memory="timeline") as counter:
        run()
        assert counter.profile.memory is not None
        first = counter.profile.memory.timeline
        run()
    assert counter.profile.memory is not None
    twice = counter.profile.memory.timeline
    assert len(twice) == 2 * len(first)
    assert [p.bytes for p in twice[: len(first)]] == [p.bytes for p in first]


def test_timeline_survives_json() -> None:
    model, run = training_steps(1)
    with FlopCounterMode(model, display=False, memory="timeline") as counter:
        run()
    again = Profile.from_json(counter.profile.to_json())
    assert again == counter.profile
    assert again.memory is not None and isinstance(again.memory.timeline[0], MemoryPoint)


def test_timeline_that_is_not_asked_for_is_empty() -> None:
    profile = profile_model(nn.Linear(3, 5), input_shape=(2, 3), memory=True)
    assert profile.memory is not None and profile.memory.timeline == ()
    assert "timeline" not in profile.to_json()


@pytest.mark.parametrize("memory", ["time", 1, None])
def test_memory_that_is_not_a_known_option_is_an_error(memory: object) -> None:
    with pytest.raises(ConfigError, match="memory="):
        FlopCounterMode(memory=memory)  # type: ignore[arg-type]
