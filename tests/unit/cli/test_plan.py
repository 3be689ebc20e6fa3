"""The command ``plan``: its table, and what is wrong with its arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.command_line import Run

LINEAR = """
import torch

def make(width=7):
    return torch.nn.Linear(width, 11, bias=False)
"""
MACHINE = {
    "name": "mine", "flops_per_s": {"float32": 1e9}, "bytes_per_s": 1e6, "memory_bytes": 50_000,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    (tmp_path / "linear.py").write_text(LINEAR)
    (tmp_path / "mine.json").write_text(json.dumps(MACHINE))


def test_plan_prints_a_column_for_each_batch(run: Run) -> None:
    result = run(
        "plan", "linear.py:make", "--input-shape", "batch,7", "--set", "batch=3,5",
        "--machine", "mine.json", "--optimizer", "none",
    )  # fmt: skip
    assert result.code == 0, result.err
    lines = {line.split("  ")[0]: line for line in result.out.splitlines()}
    assert "batch=3" in result.out and "batch=5" in result.out
    assert lines["model FLOPs"].split()[2:] == [str(2 * 3 * 7 * 11), str(2 * 5 * 7 * 11)]
    assert lines["fits"].split() == ["fits", "yes", "yes"]
    assert "planning linear.py:make on mine" in result.err


def test_plan_of_a_training_step_checkpoints_and_measures_the_host(run: Run) -> None:
    result = run(
        "plan", "linear.py:make", "--input-shape", "batch,7", "--set", "batch=3",
        "--machine", "mine.json", "--optimizer", "sgd", "--host-cost", "--no-search",
        "--format", "markdown",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "largest batch" not in result.out
    assert "us for each operator" in result.out


@pytest.mark.parametrize("arguments", [("--output", "p.html"), ("--format", "html")])
def test_plan_as_html_is_a_page(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run(
        "plan", "linear.py:make", "--input-shape", "batch,7", "--set", "batch=3",
        "--machine", "mine.json", "--no-search", *arguments,
    )  # fmt: skip
    assert result.code == 0, result.err
    page = result.out or Path("p.html").read_text(encoding="utf-8")
    assert "dispatch_flops plan" in page and page.startswith("<!DOCTYPE html>")


def test_plan_without_a_machine_asks_for_one(run: Run) -> None:
    result = run("plan", "linear.py:make", "--set", "batch=1")
    assert result.code == 2
    assert "--machine is missing" in result.err


def test_plan_of_a_size_that_is_not_used_says_so(run: Run) -> None:
    result = run(
        "plan", "linear.py:make", "--input-shape", "3,7", "--set", "batch=1",
        "--machine", "mine.json",
    )  # fmt: skip
    assert result.code == 2
    assert "--set batch is not used" in result.err
