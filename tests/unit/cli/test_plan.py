"""The command ``plan``: its table, and what is wrong with its arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.command_line import Run

LINEAR = """
import torch

def make(width=7):
    return torch.nn.Linear(width, 11, bias=False)
"""
JOB = """
import torch

def job(mesh, rows):
    model = torch.nn.Linear(7, 11 * mesh.size(), bias=False)
    return model, lambda: model(torch.ones(rows, 7)).sum().backward()
"""
LLAMA = {  # of sizes that 2 x 3 ranks divide: one rank stands for all
    "model_type": "llama", "hidden_size": 24, "intermediate_size": 42, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 54,
    "max_position_embeddings": 64,
}  # fmt: skip
MACHINE = {
    "name": "mine", "flops_per_s": {"float32": 1e9}, "bytes_per_s": 1e6, "memory_bytes": 50_000,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    (tmp_path / "linear.py").write_text(LINEAR)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
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


def test_what_models_of_all_sizes_have_to_say_is_said_once(run: Run) -> None:
    result = run(
        "plan", "hf:config.json", "--set", "batch=1,2", "seq=65", "--machine", "mine.json",
        "--no-search",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert result.err.count("input_ids has 65 tokens, and the model 64 positions") == 1


def test_plan_without_sizes_shows_no_empty_progress(run: Run) -> None:
    result = run("plan", "linear.py:make", "--input-shape", "3,7", "--machine", "mine.json")
    assert result.code == 0, result.err
    assert all(line.strip() for line in result.err.splitlines())


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


@pytest.mark.parametrize("arguments", [("--output", "p.json"), ("--format", "json")])
def test_plan_as_json_has_the_products_of_its_sizes(
    run: Run, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    result = run(
        "plan", "linear.py:make", "--input-shape", "batch,7", "--set", "batch=3,5",
        "--machine", "mine.json", "--optimizer", "none", "--no-search", *arguments,
    )  # fmt: skip
    assert result.code == 0, result.err
    data = json.loads(result.out or Path("p.json").read_text(encoding="utf-8"))
    assert data["machine"]["name"] == "mine"
    assert data["machine"]["memory_bytes"] == 50_000
    assert [step["sizes"] for step in data["steps"]] == [{"batch": 3}, {"batch": 5}]
    totals = [step["profile"]["total"] for step in data["steps"]]
    assert [total["macs"] for total in totals] == [3 * 7 * 11, 5 * 7 * 11]
    assert [total["bytes_written"] for total in totals] == [3 * 11 * 4, 5 * 11 * 4]
    assert [step["largest_batch"] for step in data["steps"]] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (("--output", "p.md"), "mine\n\n|"),
        (("--output", "p.txt"), "mine\n\n\n"),
        (("--output", "p.JSON"), '{\n  "schema": "dispatch_flops.plan"'),
        (("--output", "p.json", "--format", "table"), "mine\n\n\n"),
    ],
)
def test_plan_in_a_file_has_the_format_of_its_suffix_unless_one_is_named(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], start: str
) -> None:
    result = run(
        "plan", "linear.py:make", "--input-shape", "3,7", "--machine", "mine.json", "--no-search",
        *arguments,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert Path(arguments[1]).read_text(encoding="utf-8").startswith(start)


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


def test_plan_of_a_model_without_inputs_asks_for_them(run: Run) -> None:
    result = run("plan", "linear.py:make", "--machine", "mine.json", "--set", "width=3")
    assert result.code == 2
    assert "planning linear.py:make raised TypeError: " in result.err
    assert "; the model was called without inputs: add --input-shape or --inputs" in result.err


def rows_of(text: str) -> dict[str, list[str]]:
    """Return ``{name of a row: its cells}`` of a plain table."""
    cells = (re.split(r"(?<=\S)  +", line) for line in text.splitlines())
    return {name: values for name, *values in cells}


@pytest.mark.slow
def test_plan_of_a_model_on_a_mesh_shards_it_by_itself(run: Run) -> None:
    pytest.importorskip("transformers")
    result = run(
        "plan", "hf:config.json:AutoModelForCausalLM", "--machine", "H100", "--mesh", "dp=3,tp=2",
        "--set", "batch=1,5", "seq=9", "--dtype", "bf16", "--mixed-precision", "--no-search",
    )  # fmt: skip
    assert result.code == 0, result.err
    rows = rows_of(result.out)
    attention, mlp, norms = 24 * (24 + 12 + 12 + 24), 3 * 24 * 42, 2 * 24
    params = 2 * (attention + mlp + norms) + 24 + 2 * 54 * 24
    assert rows["devices"] == ["6", "6"]
    assert rows["parameters"] == [f"{params / 1e3:.2f} K"] * 2
    # Layers are gathered in forward and backward and reduced, the root is gathered once.
    assert rows["  dp, 3 ranks: calls"] == ["8", "8"]
    # Sums after the embedding, o and down; gradients of the inputs of q, k, v, gate, up and the
    # head; and the gathered logits.
    assert rows["  tp, 2 ranks: calls"] == [str(1 + 2 * (2 + 5) + 1 + 1)] * 2
    assert "computed in bfloat16, reduced in float32" in result.out


def test_plan_of_a_job_on_a_mesh_calls_it_with_the_sizes(run: Run) -> None:
    result = run(
        "plan", "job.py:job", "--machine", "mine.json", "--mesh", "pp=2", "--set", "rows=3,5"
    )
    assert result.code == 0, result.err
    rows = rows_of(result.out)
    # The product and that of the weight's gradient; the sum of the output, which backward does
    # not compute; the second step adds its gradient to the first one's.
    flops = [2 * (2 * 2 * n * 7 * 22 + n * 22 - 1 + 7 * 22) for n in (3, 5)]
    assert rows["model FLOPs, all devices"] == [f"{count / 1e3:.2f} K" for count in flops]
    assert "the job builds, shards and runs its model" in result.out


def test_plan_of_a_job_as_json_has_the_figures_of_all_devices(run: Run) -> None:
    result = run(
        "plan", "job.py:job", "--machine", "mine.json", "--mesh", "pp=2", "--set", "rows=3",
        "--format", "json",
    )  # fmt: skip
    assert result.code == 0, result.err
    (step,) = json.loads(result.out)["steps"]
    assert step["cluster"]["mesh"] == {"pp": 2} and step["devices"] == 2
    # The product and that of the weight's gradient, on each rank.
    assert step["cluster"]["model_cost"]["macs"] == 2 * 2 * 3 * 7 * 22
    assert step["memory_by_role"]["parameters"] == 512 * -(-7 * 22 * 4 // 512)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("job.py:job", "--set", "rows=3"), "it has a parameter mesh; add --mesh"),
        (("job.py:job", "--mesh", "pp=2", "--set", "cols=3"), "--set cols is not used"),
        (("job.py:job", "--mesh", "pp=2", "--optimizer", "sgd"), "--optimizer is for a model"),
        (("job.py:job", "--mesh", "pp"), "'pp' is not a dimension"),
        (("job.py:job", "--mesh", "pp=2", "--dtype", "bf16"), "a job sets its precision"),
        (("job.py:job", "--mesh", "pp=2", "--input-shape", "3"), "a job makes its inputs itself"),
        (("job.py:job", "--mesh", "pp=2", "--inputs", "job.py:x"), "a job makes its inputs itself"),
        (("linear.py:make", "--mesh", "pp=2", "--input-shape", "3,7"), "mesh has pp"),
        (("linear.py:make", "--mesh", "tp=2", "--input-shape", "3,7"), "no tensor-parallel plan"),
    ],
)
def test_plan_on_a_mesh_that_cannot_be_planned_says_what_to_do(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    result = run("plan", *arguments, "--machine", "mine.json")
    assert result.code == 2
    assert message in result.err
