"""``--memory``, ``check --max-memory`` and ``diff`` of profiles with memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dispatch_flops import Profile
from dispatch_flops.cli.check import parse_bytes
from dispatch_flops.profile import (
    DeviceMemory,
    MemoryPeak,
    MemoryProfile,
    MemoryUse,
    PeakMoment,
)
from tests.helpers.command_line import Run, tree


def profile_with(peak: int, *unseen: str) -> Profile:
    used = MemoryPeak(
        peak_bytes=peak,
        peak_at=PeakMoment(fqn="a", phase="forward", operator="aten.mm.default"),
        uses=(MemoryUse(role="parameters", bytes=peak),),
    )
    devices = (DeviceMemory(device="cpu", peaks=(used,)),)
    memory = MemoryProfile(devices=devices, unseen=unseen)
    return dataclasses.replace(tree({"a": 3}), memory=memory).check()


def save(profile: Profile, name: str = "p.json") -> None:
    Path(name).write_text(profile.to_json())


def test_option_memory_follows_it(run: Run) -> None:
    saved = Profile.from_json(run("profile", "net.py:make", "--memory", "--format", "json").out)
    assert saved.memory is not None and saved.memory.peak_bytes > 0
    assert run("profile", "net.py:make", "--memory").out.count("\nMemory   ") == 1
    assert "Activations" in run("profile", "net.py:make", "--memory", "--format", "memory").out
    assert "Activations" in run("profile", "net.py:make", "--memory", "--format", "table").out


def test_without_the_option_memory_is_not_followed(run: Run) -> None:
    assert Profile.from_json(run("profile", "net.py:make", "--format", "json").out).memory is None
    assert "Memory was not followed" in run("profile", "net.py:make", "--format", "memory").out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 2**30),
        ("1.5 KiB", 1536),
        ("80GB", 80 * 10**9),
        ("80G", 80 * 10**9),
        ("512", 512),
        ("512 B", 512),
        ("512b", 512),
    ],
)
def test_bytes_are_parsed_with_binary_and_decimal_units(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "80XiB", "-1GiB"])
def test_text_that_is_not_a_size_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)


@pytest.mark.parametrize(("peak", "code"), [(2**20, 0), (2**20 + 1, 1)])
def test_check_compares_the_peak_with_the_limit(run: Run, peak: int, code: int) -> None:
    save(profile_with(peak))
    result = run("check", "p.json", "--max-memory", "1MiB")
    assert result.code == code
    assert ("exceeds the limit" in result.out) is bool(code)


def test_check_of_a_phase_compares_its_own_peak(run: Run) -> None:
    save(profile_with(100))
    assert run("check", "p.json", "--max-memory", "100", "--phase", "forward").code == 0
    assert run("check", "p.json", "--max-memory", "99", "--phase", "forward").code == 1


def test_check_of_a_lower_bound_fails_unless_it_is_allowed(run: Run) -> None:
    save(profile_with(100, "aten.convolution.default"))
    result = run("check", "p.json", "--max-memory", "200")
    assert result.code == 1
    assert "no workspace is known for aten.convolution.default" in result.out
    assert run("check", "p.json", "--max-memory", "200", "--allow-uncounted").code == 0
    assert run("check", "p.json", "--max-macs", "200").code == 0


def test_check_of_an_approximate_peak_fails_unless_it_is_allowed(run: Run) -> None:
    profile = profile_with(100)
    assert profile.memory is not None
    memory = dataclasses.replace(profile.memory, decomposed=("aten.lstm.input",))
    save(dataclasses.replace(profile, memory=memory))
    result = run("check", "p.json", "--max-memory", "200")
    assert result.code == 1
    assert "memory: ~ 100 B may exceed" in result.out
    assert "no workspace is known for aten.lstm.input" in result.out
    assert run("check", "p.json", "--max-memory", "200", "--allow-uncounted").code == 0


def test_check_of_a_profile_without_memory_fails(run: Run) -> None:
    save(tree({"a": 3}))
    result = run("check", "p.json", "--max-memory", "80GiB")
    assert result.code == 1
    assert "memory: not measured in this profile" in result.out


def test_diff_says_how_the_peak_changed(run: Run) -> None:
    save(profile_with(1000), "a.json")
    save(profile_with(1500, "aten.sort.default"), "b.json")
    out = run("diff", "a.json", "b.json").out
    assert "Peak memory: 1 KB, then >= 1.5 KB (+50%)." in out
    assert "Peak memory: 1 KB." in run("diff", "a.json", "a.json").out
    save(tree({"a": 3}), "b.json")
    assert "Peak memory" not in run("diff", "a.json", "b.json").out
