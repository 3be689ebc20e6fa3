"""Memory of a profile as plain data."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dispatch_flops.errors import ConfigError, InconsistentProfileError, ProfileFormatError
from dispatch_flops.profile import (
    DeviceMemory,
    HeldBytes,
    MemoryPeak,
    MemoryProfile,
    MemoryUse,
    ModuleMemory,
    ModuleNode,
    PeakMoment,
    PhaseBytes,
    Profile,
    sum_nodes,
)

FORWARD = MemoryPeak(
    peak_bytes=3 + 5,
    peak_at=PeakMoment(fqn="a", phase="forward", operator="aten.mm.default"),
    uses=(
        MemoryUse(role="activations", fqn="a", phase="forward", bytes=5),
        MemoryUse(role="parameters", bytes=3),
    ),
)
BACKWARD = MemoryPeak(
    peak_bytes=3 + 7 + 2,
    peak_at=PeakMoment(fqn="b", phase="backward", operator="aten.mul.Tensor"),
    uses=(
        MemoryUse(role="gradients", fqn="b", phase="backward", bytes=7),
        MemoryUse(role="parameters", bytes=3),
        MemoryUse(role="gradients", fqn="a", phase="backward", bytes=2),
    ),
)
MEMORY = MemoryProfile(
    devices=(
        DeviceMemory(device="cuda:0", peaks=(FORWARD, BACKWARD)),
        DeviceMemory(device="cpu", peaks=()),
    ),
    unseen=("aten.x.default",),
    rounding=512,
)
APPROXIMATE = dataclasses.replace(MEMORY, decomposed=("aten.lstm.input",))
HELD = ModuleMemory(
    own=HeldBytes(parameters=3),
    total=HeldBytes(parameters=3, activations=5),
    peak_bytes=PhaseBytes({"forward": 8}),
)


def profile_with(memory: MemoryProfile | None, held: ModuleMemory | None = HELD) -> Profile:
    root = ModuleNode(fqn="", class_name="Net", memory=held)
    return Profile(root=root, memory=memory)


def test_peak_is_the_highest_of_all_phases() -> None:
    assert MEMORY.peak_bytes == 12
    assert MEMORY.peak_at == BACKWARD.peak_at
    assert MEMORY.at_peak == BACKWARD.uses
    assert MEMORY.is_lower_bound


def test_roles_of_a_phase_are_those_at_its_own_peak() -> None:
    assert list(MEMORY.by_role().items()) == [("gradients", 9), ("parameters", 3)]
    assert MEMORY.by_role("forward") == {"activations": 5, "parameters": 3}
    assert MEMORY.by_role("optimizer") == {}
    assert [MEMORY.peak_in(phase) for phase in ("forward", "optimizer", None)] == [8, 0, 12]


def test_unknown_phase_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'forwrd' is not a phase"):
        MEMORY.by_role("forwrd")  # type: ignore[arg-type]


def test_memory_of_a_run_without_operators_is_0() -> None:
    empty = MemoryProfile(devices=())
    assert (empty.peak_bytes, empty.peak_at, empty.at_peak, empty.by_role()) == (0, None, (), {})
    assert empty.peak_in() == DeviceMemory(device="cpu", peaks=()).peak_bytes == 0


@pytest.mark.parametrize("memory", [MEMORY, APPROXIMATE])
def test_profile_with_memory_survives_json(memory: MemoryProfile) -> None:
    profile = profile_with(memory).check()
    again = Profile.from_json(profile.to_json())
    assert again == profile and hash(again) == hash(profile)
    assert again.memory == memory and again.root.memory == HELD
    assert hash(again.root.memory) == hash(HELD)
    assert json.loads(profile.to_json()) == profile.to_dict()  # of lists, without tuples


def test_kv_cache_of_a_module_survives_json_and_may_be_missing() -> None:
    held = ModuleMemory(own=HeldBytes(kv_cache=7), total=HeldBytes(kv_cache=7))
    data = profile_with(MEMORY, held).check().to_dict()
    assert Profile.from_dict(data).root.memory == held
    for part in ("own", "total"):
        del data["root"][0]["memory"][part]["kv_cache"]  # not in profiles saved before
    assert Profile.from_dict(data).root.memory == ModuleMemory()


def test_profile_without_memory_says_nothing_of_it() -> None:
    data = profile_with(None, None).to_dict()
    assert "memory" not in data and "memory" not in data["root"][0]


def test_peak_that_is_not_the_sum_of_its_uses_is_an_error() -> None:
    wrong = dataclasses.replace(FORWARD, peak_bytes=9)
    device = DeviceMemory(device="cpu", peaks=(wrong,))
    with pytest.raises(InconsistentProfileError, match="adds up to 8 bytes, not to the peak of 9"):
        profile_with(MemoryProfile(devices=(device,))).check()


@pytest.mark.parametrize(
    "held",
    [
        ModuleMemory(own=HeldBytes(parameters=4), total=HeldBytes(parameters=3)),
        ModuleMemory(total=HeldBytes(gradients=-1), own=HeldBytes(gradients=-1)),
    ],
)
def test_module_that_holds_impossible_bytes_is_an_error(held: ModuleMemory) -> None:
    with pytest.raises(InconsistentProfileError):
        profile_with(MEMORY, held).check()


def damaged(change: Any) -> dict[str, Any]:
    data = Profile.from_json(profile_with(MEMORY).to_json()).to_dict()
    change(data)
    return data


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(memory=3),
        lambda data: data["memory"].update(devices=None),
        lambda data: data["memory"].update(unseen="ab"),
        lambda data: data["memory"].update(decomposed={"ab": 1}),
        lambda data: data["memory"]["devices"][0]["peaks"][0].update(peak_bytes=1),
        lambda data: data["memory"]["devices"][0]["peaks"][0].pop("peak_at"),
        lambda data: data["memory"]["devices"][0]["peaks"][0]["peak_at"].update(phase=[]),
        lambda data: data["memory"]["devices"][0]["peaks"][0]["uses"][0].update(bytes="5"),
        lambda data: data["memory"]["devices"][0]["peaks"][0]["uses"][0].update(phase=1.5),
        lambda data: data["memory"]["devices"][0]["peaks"][0]["uses"][0].update(phase=""),
        lambda data: data["root"][0]["memory"].update(own=[]),
        lambda data: data["root"][0]["memory"].update(peak_bytes={"forward": 1.5}),
        lambda data: data["root"][0]["memory"].update(more=1),
    ],
)
def test_damaged_memory_raises_a_format_error(change: Any) -> None:
    with pytest.raises(ProfileFormatError):
        Profile.from_dict(damaged(change))


def test_sum_of_modules_holds_the_bytes_of_all() -> None:
    node = ModuleNode(fqn="a", class_name="A", memory=HELD)
    other = dataclasses.replace(
        HELD, own=HeldBytes(parameters=11), peak_bytes=PhaseBytes({"forward": 5, "backward": 7})
    )
    summed = sum_nodes([node, dataclasses.replace(node, memory=other)]).memory
    assert summed is not None
    assert summed.own == HeldBytes(parameters=3 + 11)
    assert summed.total == HeldBytes(parameters=3 + 3, activations=5 + 5)
    assert summed.peak_bytes == {"forward": 8, "backward": 7}


def test_sum_of_modules_without_memory_has_none() -> None:
    node = ModuleNode(fqn="a", class_name="A")
    assert sum_nodes([node, node]).memory is None
