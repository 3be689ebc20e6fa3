"""Shared options: what their values mean, and which values are refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from dispatch_flops.analysis.machines import MACHINES
from dispatch_flops.cli.arguments import (
    OPTIMIZERS,
    machine_named,
    natural,
    parse_assignments,
    parse_value,
)
from dispatch_flops.errors import TargetError
from dispatch_flops.profilers import training_step
from tests.helpers.command_line import Run, error_line


def test_optimizers_are_those_of_training_steps() -> None:
    assert tuple(training_step.OPTIMIZERS) == OPTIMIZERS


def test_assignments_are_names_and_texts() -> None:
    assert parse_assignments(["batch=4", "kind=a=b"]) == {"batch": "4", "kind": "a=b"}


@pytest.mark.parametrize("text", ["batch", "=4", "batch=", "1x=4"])
def test_assignment_without_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(TargetError) as caught:
        parse_assignments([text])
    assert str(caught.value) == (
        f"--set '{text}' is not an assignment; write NAME=VALUE, such as batch=4"
    )


def test_name_assigned_twice_is_refused() -> None:
    with pytest.raises(TargetError) as caught:
        parse_assignments(["a=1", "a=2"])
    assert str(caught.value) == "--set a is given twice, as 1 and as 2; give it once"


@pytest.mark.parametrize(
    "text,value", [("4", 4), ("0.5", 0.5), ("True", True), ("relu", "relu"), ("'4'", "4")]
)
def test_value_is_a_literal_or_the_text(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize("text", ["-1", "1.5", "", "many"])
def test_natural_refuses_other_numbers(text: str) -> None:
    assert natural("0") == 0
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        natural(text)
    assert str(caught.value) == f"'{text}' is not a whole number of at least 0"


@pytest.mark.parametrize(
    "option,value,message",
    [
        ("--repeats", "0", "argument --repeats: '0' is not a whole number of at least 1"),
        ("--causal", "no", "argument --causal: invalid choice: 'no'"),
        ("--target-device", "no", "argument --target-device: invalid choice: 'no'"),
        ("--format", "xml", "argument --format: invalid choice: 'xml'"),
    ],
)
def test_wrong_value_of_an_option_is_refused(
    run: Run, option: str, value: str, message: str
) -> None:
    assert error_line(run("profile", "net.py:make", option, value)).startswith(message)


class TestMachineNamed:
    def test_name_finds_a_known_machine(self) -> None:
        assert machine_named("NVIDIA H200", "cpu") is MACHINES["NVIDIA H200"]
        assert machine_named(None, "cpu") is None

    def test_measure_measures_the_runs_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []
        monkeypatch.setattr("dispatch_flops.timing.peaks.measure_machine", asked.append)
        for device in ("cuda:1", "cpu", "meta"):
            machine_named("measure", device)
        assert asked == ["cuda:1", "cpu", "cpu"]

    def test_unknown_name_is_refused(self) -> None:
        with pytest.raises(TargetError) as caught:
            machine_named("abacus", "cpu")
        assert str(caught.value) == (
            "--machine 'abacus' is unknown; use measure, the path of a JSON file that describes a "
            f"machine, or one of {', '.join(sorted(MACHINES))}"
        )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h200", "NVIDIA H200"),
        ("B200", "NVIDIA B200"),
        ("nvidia h200", "NVIDIA H200"),
        ("h100 pcie", "NVIDIA H100 PCIe"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("mi300x", "AMD Instinct MI300X"),
        ("l40", "NVIDIA L40"),
    ],
)
def test_machine_is_found_by_an_unambiguous_part_in_any_case(name: str, expected: str) -> None:
    machine = machine_named(name, "cpu")
    assert machine is not None and machine.name == expected


@pytest.mark.parametrize("name", ["nvidia h1", "NVIDIA H1"])
def test_machine_of_an_ambiguous_part_lists_the_candidates(name: str) -> None:
    with pytest.raises(TargetError, match="ambiguous.*NVIDIA H100 80GB HBM3.*NVIDIA H100 PCIe"):
        machine_named(name, "cpu")


def test_machine_of_a_json_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "flops_per_s": {"float32": 3e12}}')
    machine = machine_named(str(path), "cpu")
    assert machine is not None and machine.peak("float32") == 3e12


def test_machine_of_an_empty_name_is_unknown() -> None:
    with pytest.raises(TargetError, match="unknown"):
        machine_named(" ", "cpu")
