"""``merge``, ``simulate`` and ``profile --mesh``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dispatch_flops.distributed import ClusterProfile
from tests.helpers.clusters import four_ranks, of_rank, represented
from tests.helpers.command_line import Run, error_line
from tests.helpers.interpreters import run_python
from tests.helpers.paths import REPOSITORY

ROWS, IN, OUT = 3, 5, 7
FLOAT = 4  # bytes
JOB = f"""
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

def job(mesh):
    print("what the job prints")
    model = nn.Linear({IN}, {OUT}, bias=False)
    fully_shard(model, mesh=mesh["dp"])
    x = torch.ones({ROWS}, {IN})
    return lambda: model(x).sum().backward()

def broken(mesh):
    raise ValueError("a wrong\\nworld")

def model(mesh):
    return nn.Linear({IN}, {OUT})
"""


@pytest.fixture(autouse=True)
def _job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)


class TestMerge:
    def test_files_of_ranks_are_one_table(self, run: Run) -> None:
        for rank in range(4):
            Path(f"rank{rank}.json").write_text(of_rank(rank).to_json())
        result = run("merge", *(f"rank{rank}.json" for rank in range(4)))
        assert result.code == 0
        assert result.out.startswith("4 of 4 ranks, mesh pp 2 x dp 2\n")

    def test_missing_ranks_are_named(self, run: Run) -> None:
        Path("a.json").write_text(of_rank(0).to_json())
        Path("b.json").write_text(of_rank(3).to_json())
        assert "Missing: ranks 1-2;" in run("merge", "a.json", "b.json").out

    def test_json_is_read_back(self, run: Run) -> None:
        Path("part.json").write_text(ClusterProfile.merge([of_rank(0), of_rank(1)]).to_json())
        Path("two.json").write_text(of_rank(2).to_json())
        Path("three.json").write_text(of_rank(3).to_json())
        run("merge", "part.json", "two.json", "three.json", "--output", "all.json")
        assert ClusterProfile.from_json(Path("all.json").read_text()) == four_ranks()
        assert run("merge", "all.json", "--format", "html").out.startswith("<!DOCTYPE html>")
        assert "## Ranks" in run("merge", "all.json", "--format", "markdown").out

    def test_files_of_different_runs_are_an_error(self, run: Run) -> None:
        Path("a.json").write_text(of_rank(0).to_json())
        assert "two profiles are of rank 0" in error_line(run("merge", "a.json", "a.json"))

    def test_simulated_cluster_is_merged_with_nothing(self, run: Run) -> None:
        Path("a.json").write_text(represented().to_json())
        Path("b.json").write_text(of_rank(1).to_json())
        assert "merge it with no other file" in error_line(run("merge", "a.json", "b.json"))

    @pytest.mark.parametrize(
        ("text", "message"),
        [("{", "this is not JSON"), ("[]", "this is not a dispatch_flops profile")],
    )
    def test_other_files_are_an_error(self, run: Run, text: str, message: str) -> None:
        Path("a.json").write_text(text)
        assert f"a.json: {message}" in error_line(run("merge", "a.json"))


class TestSimulate:
    def test_rank_is_simulated(self, run: Run) -> None:
        result = run("simulate", "job.py:job", "--mesh", "dp=2,tp=3", "--rank=4", "--format=json")
        assert result.code == 0
        assert "simulating rank 4 of 6" in result.err
        cluster = ClusterProfile.from_json(result.out)
        assert list(cluster.ranks) == [4]
        # forward, and the weight's gradient
        assert cluster.total().macs == 2 * ROWS * IN * OUT
        assert cluster.coordinates(4) == {"dp": 1, "tp": 1}

    def test_representatives_fill_the_cluster(self, run: Run) -> None:
        # 7 rows on 4 ranks: 2, 2, 2, 1
        result = run("simulate", "job.py:job", "--mesh", "dp=4", "--depth", "0")
        assert result.out.startswith("4 of 4 ranks, 2 simulated, mesh dp 4\n")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("job.py:job", "--mesh", "dp"), "'dp' is not a dimension; write NAME=SIZE"),
            (("job.py:job", "--mesh", "dp=0"), "'dp=0' is not a dimension"),
            (("job.py:job", "--mesh", "dp=2,dp=3"), "dp is given twice"),
            (("job.py:job", "--mesh", "dp=2", "--rank", "2"), "rank 2 is out of range"),
            (("job.py:broken", "--mesh", "dp=2"), "simulating job.py:broken raised ValueError"),
            (("job.py:model", "--mesh", "dp=2"), "the job returned an object of type Linear"),
            (("job.py:nothing", "--mesh", "dp=2"), "job.py has no 'nothing'"),
            (("job.py:job", "--mesh", "dp=2", "--timeout", "0"), "whole number of at least 1"),
        ],
    )
    def test_wrong_use_is_an_error(
        self, run: Run, arguments: tuple[str, ...], message: str
    ) -> None:
        assert message in error_line(run("simulate", *arguments))

    def test_memory_shows_the_peak_of_each_rank(self, run: Run) -> None:
        command = ("simulate", "job.py:job", "--mesh", "dp=7", "--rank", "0", "1", "--memory")
        cluster = ClusterProfile.from_json(run(*command, "--format", "json").out)
        memory = cluster.profiles[1].memory
        assert memory is not None
        assert cluster.value(1, "memory") == memory.peak_bytes > 0
        # a row of the weight on each of 7 ranks, and the input
        assert memory.by_role("forward")["inputs"] >= FLOAT * ROWS * IN
        assert "Peak memory" in run(*command).out
        assert "Peak memory" not in run(*command[:-1]).out

    def test_flops_of_contractions_are_two_for_each_mac(self, run: Run) -> None:
        command = "simulate job.py:job --mesh dp=7 --rank 0 --flops contractions --format json"
        total = ClusterProfile.from_json(run(*command.split()).out).total()
        assert total.flops == 2 * total.macs == 2 * 2 * ROWS * IN * OUT

    def test_verify_simulates_one_more_rank_of_each_kind(self, run: Run) -> None:
        result = run("simulate", "job.py:job", "--mesh", "dp=7", "--verify", "--depth", "0")
        assert result.out.startswith("7 of 7 ranks, 2 simulated, mesh dp 7\n")
        assert "chosen at random, equal those of a representative" in result.out
        error = error_line(run("simulate", "job.py:job", "--mesh=dp=7", "--rank=0", "--verify"))
        assert error == "--verify is for one rank of each kind; omit --rank or --verify"


class TestShow:
    @pytest.mark.parametrize("command", ["report c.json c.html", "diff c.json c.json"])
    def test_other_commands_name_those_that_read_a_saved_cluster(
        self, run: Run, command: str
    ) -> None:
        Path("c.json").write_text(four_ranks().to_json())
        assert error_line(run(*command.split())) == (
            "c.json: these are the merged profiles of several ranks; only show and merge read them"
        )

    def test_saved_cluster_is_shown_as_its_tables(self, run: Run) -> None:
        Path("c.json").write_text(four_ranks().to_json())
        assert run("show", "c.json").out.startswith("4 of 4 ranks, mesh pp 2 x dp 2\n")
        assert "## Ranks" in run("show", "c.json", "--format", "markdown").out
        run("show", "c.json", "--output", "again.json")
        assert ClusterProfile.from_json(Path("again.json").read_text()) == four_ranks()

    def test_communication_of_a_saved_cluster_is_shown_by_stage(self, run: Run) -> None:
        Path("c.json").write_text(represented().to_json())
        for command in (("show", "c.json"), ("merge", "c.json")):
            out = run(*command, "--format", "comm").out
            (of_first,) = [line for line in out.splitlines() if line.startswith("0  ")]
            assert "layers.0" in of_first and "reduce_scatter" in of_first

    def test_format_of_one_rank_is_an_error(self, run: Run) -> None:
        Path("c.json").write_text(four_ranks().to_json())
        error = error_line(run("show", "c.json", "--format", "csv"))
        assert "--format csv is not available for several ranks; use one of table," in error
        assert error_line(run("show", "c.json", "--output", "c.csv")) == (
            "--output c.csv: the suffix .csv is unknown; use one of .txt, .md, .json, .html, or "
            "add --format"
        )
        assert not Path("c.csv").exists()

    def test_option_of_one_rank_is_an_error(self, run: Run) -> None:
        Path("c.json").write_text(four_ranks().to_json())
        assert error_line(run("show", "c.json", "--sort", "flops")) == (
            "--sort has no effect on the profiles of several ranks; omit it"
        )
        assert error_line(run("show", "c.json", "--machine", "H100")) == (
            "--machine has no effect on the profiles of several ranks; omit it"
        )
        assert run("show", "c.json", "--depth", "0").code == 0

    def test_damaged_cluster_is_an_error(self, run: Run) -> None:
        Path("c.json").write_text('{"schema": "dispatch_flops.cluster", "version": 1}')
        assert "c.json: the merged profile is damaged" in error_line(run("show", "c.json"))


class TestProfileOnRanks:
    def test_without_torchrun_it_says_how(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("RANK", raising=False)
        error = error_line(run("profile", "job.py:job", "--mesh", "dp=2,tp=2"))
        assert "torchrun --nproc-per-node 4 -m dispatch_flops profile" in error

    def test_job_without_a_mesh_is_named_as_one(self, run: Run) -> None:
        assert error_line(run("profile", "job.py:job")) == (
            "job.py:job is a job: it has a parameter mesh; use dispatch-flops simulate, or "
            "torchrun and --mesh"
        )

    def test_mesh_of_another_size_is_an_error(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "4")
        error = error_line(run("profile", "job.py:job", "--mesh", "dp=8"))
        assert "--mesh dp=8 has 8 ranks and torchrun started 4" in error

    @pytest.mark.parametrize(
        "option",
        ["--input-shape 1,3", "--train", "--warm-up 2", "--target-device cuda", "--sort flops"],
    )
    def test_options_of_a_model_are_an_error(self, run: Run, option: str) -> None:
        result = run("profile", "job.py:job", "--mesh", "dp=8", *option.split())
        assert f"{option.split()[0]} is for a model" in error_line(result)

    @pytest.mark.slow
    def test_torchrun_prints_one_merged_report(self, tmp_path: Path) -> None:
        command = (
            "-m torch.distributed.run --standalone --nproc-per-node 2 -m dispatch_flops profile "
            "job.py:job --mesh dp=2 --memory --format json"
        )
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        done = run_python(*command.split(), cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        cluster = ClusterProfile.from_json(done.stdout)
        assert list(cluster.ranks) == [0, 1]
        assert cluster.mesh == {"dp": 2}
        assert cluster.minimum("memory")
        assert cluster.total().macs == 2 * 2 * ROWS * IN * OUT
