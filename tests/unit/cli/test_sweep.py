"""``sweep``: many sizes, and how cost grows with them."""

from __future__ import annotations

import csv
import io
from argparse import Namespace
from pathlib import Path

import pytest

from dispatch_flops import Profile
from dispatch_flops.cli.run import measure
from dispatch_flops.cli.sweep import parse_values, points
from dispatch_flops.errors import TargetError
from tests.helpers.command_line import Run, error_line, macs, params
from tests.helpers.trees import encoder, varying


class TestSweep:
    def test_points_before_one_that_fails_are_shown(self, run: Run) -> None:
        arguments = ("--set", "width=4,5,0x", "--format", "csv", "--device", "meta")
        result = run("sweep", "net.py:make", *arguments)
        assert result.code == 2
        rows = list(csv.DictReader(io.StringIO(result.out)))
        assert [int(row["macs"]) for row in rows] == [macs(4), macs(5)]
        assert "the sweep ended early: 2 of 3 points are shown" in result.err

    def test_points_before_an_interrupt_are_shown(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def measure_two(options: Namespace, sizes: dict[str, int]) -> Profile:
            if sizes["width"] == 6:
                raise KeyboardInterrupt
            return measure(options, sizes)

        monkeypatch.setattr("dispatch_flops.cli.sweep.measure", measure_two)
        arguments = ("--set", "width=4,5,6,7", "--format", "csv", "--device", "meta")
        result = run("sweep", "net.py:make", *arguments)
        assert result.code == 130
        assert len(result.out.splitlines()) == 1 + 2

    def test_exponents_of_a_sweep_that_ended_early_are_of_a_whole_grid(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def measure_five(options: Namespace, sizes: dict[str, int]) -> Profile:
            if sizes == {"batch": 18, "width": 10}:
                raise KeyboardInterrupt
            return measure(options, sizes)

        monkeypatch.setattr("dispatch_flops.cli.sweep.measure", measure_five)
        arguments = ("--set", "batch=2,6,18", "width=5,10", "--device", "meta")
        out = run("sweep", "net.py:make", *arguments).out
        [row] = [line for line in out.splitlines() if line.startswith("MACs ~ batch")]
        assert row.split() == ["MACs", "~", "batch^1", "2", "6", "batch^1"]

    def test_table_lists_points_and_exponents(self, run: Run) -> None:
        result = run(
            "sweep", "net.py:make", "--set", "batch=2,8", "width=10..40", "--device", "meta"
        )
        assert result.code == 0
        assert "[6/6] batch=8 width=40" in result.err
        assert "MACs ~ batch^1 " in result.out
        assert result.out.splitlines()[0].split() == [
            "batch", "width", "Params", "MACs", "FLOPs", "Bytes"
        ]  # fmt: skip

    def test_csv_has_a_row_per_point(self, run: Run) -> None:
        arguments = ("--sweep", "batch=2,3", "width=10,20", "--format", "csv", "--device", "meta")
        rows = list(csv.DictReader(io.StringIO(run("sweep", "net.py:make", *arguments).out)))
        found = [(int(row["batch"]), int(row["width"]), int(row["macs"])) for row in rows]
        assert found == [(b, w, macs(w, b)) for b in (2, 3) for w in (10, 20)]
        assert [int(row["params"]) for row in rows[:2]] == [params(10), params(20)]

    def test_latency_that_is_inexact_is_marked(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        profiles = {10: encoder(3), 20: varying("")}  # of 90 ms each
        monkeypatch.setattr(
            "dispatch_flops.cli.sweep.measure", lambda options, sizes: profiles[sizes["width"]]
        )
        lines = run("sweep", "net.py:make", "--set", "width=10,20").out.splitlines()
        assert [line.split("  ")[-1].strip() for line in lines[2:4]] == ["90 ms", "~90 ms"]

    def test_suffix_of_the_output_chooses_the_format(self, run: Run) -> None:
        arguments = ("sweep", "net.py:make", "--set", "width=10,20", "--device", "meta")
        assert run(*arguments, "--output", "s.csv").code == 0
        assert Path("s.csv").read_text() == run(*arguments, "--format", "csv").out

    def test_flops_of_contractions_are_two_per_mac(self, run: Run) -> None:
        arguments = ("--set", "batch=2,3", "--flops", "contractions", "--format", "csv")
        rows = csv.DictReader(io.StringIO(run("sweep", "net.py:make", *arguments).out))
        assert all(int(row["flops"]) == 2 * int(row["macs"]) > 0 for row in rows)

    def test_peaks_of_memory_are_shown_and_fitted(self, run: Run) -> None:
        sizes = ("--set", "batch=100,200,400", "--memory", "--device", "meta")
        out = run("sweep", "net.py:make", *sizes).out
        assert "Peak memory" in out.splitlines()[0]
        assert "peak memory ~ batch^" in out
        text = run("sweep", "net.py:make", *sizes, "--format", "csv").out
        peaks = [int(row["peak_bytes"]) for row in csv.DictReader(io.StringIO(text))]
        # What a row of the batch adds is the same: the peak is linear in the batch.
        assert peaks[2] - peaks[1] == 2 * (peaks[1] - peaks[0]) > 0

    @pytest.mark.usefixtures("odd_operator")
    def test_exponents_of_lower_bounds_are_marked(self, run: Run) -> None:
        out = run("sweep", "net.py:odd", "--set", "batch=3,6,12").out
        fitted = [line.partition("  ")[0] for line in out.splitlines() if "^" in line]
        assert fitted == [">= FLOPs ~ batch^1", ">= bytes ~ batch^1"]

    @pytest.mark.usefixtures("odd_operator")
    def test_note_on_a_machine_says_what_lower_bounds_leave_out(self, run: Run) -> None:
        for target, is_bound in (("net.py:odd", True), ("net.py:make", False)):
            out = run("sweep", target, "--set", "batch=3,6", "--machine", "H100").out
            assert out.rstrip().endswith(", and of what was counted") == is_bound

    def test_measured_latency_is_shown(self, run: Run) -> None:
        assert "Forward" in run("sweep", "net.py:make", "--set", "batch=2").out

    def test_unknown_name_is_refused(self, run: Run) -> None:
        assert error_line(run("sweep", "net.py:make", "--set", "depth=1,2")) == (
            "--set depth is not used: neither the target nor its inputs take it; they take batch, "
            "width"
        )

    @pytest.mark.parametrize("command", [("sweep", "--set"), ("profile", "--sweep")])
    def test_timeline_of_memory_is_refused(self, run: Run, command: tuple[str, str]) -> None:
        name, sizes = command
        assert error_line(run(name, "net.py:make", sizes, "width=1,2", "--memory-timeline")) == (
            "--memory-timeline has no effect on a sweep; use --memory"
        )

    def test_sweep_without_sizes_is_refused(self, run: Run) -> None:
        assert error_line(run("sweep", "net.py:make")) == (
            "no sizes are given; add --set, such as --set seq=128..4096"
        )


class TestParseValues:
    @pytest.mark.parametrize(
        "text,values",
        [("1,2,8..40,0.5,relu", [1, 2, 8, 16, 32, 0.5, "relu"]), ("3..3,3", [3])],
    )
    def test_lists_and_doubling_ranges_are_read(self, text: str, values: list[object]) -> None:
        assert parse_values("x", text) == values

    def test_values_that_differ_in_type_or_cannot_be_hashed_are_kept(self) -> None:
        assert list(map(repr, parse_values("x", "True,1,1,1.0"))) == ["True", "1", "1.0"]
        assert parse_values("x", "[3],[5],[3]") == [[3], [5]]

    def test_lists_are_swept(self, run: Run) -> None:
        """They are in the table, and no exponent is fitted to them."""
        Path("lists.py").write_text(
            "import torch\ndef make(width):\n"
            "    return torch.nn.Linear(width[0], 7), torch.ones(3, width[0])\n"
        )
        result = run("sweep", "lists.py:make", "--set", "width=[2],[4]", "--device", "meta")
        assert result.code == 0
        assert "Fitted" not in result.out

    @pytest.mark.parametrize("text", ["8..4", "0..4", "a..b"])
    def test_range_that_is_not_of_sizes_is_refused(self, text: str) -> None:
        with pytest.raises(TargetError) as caught:
            parse_values("x", text)
        assert str(caught.value) == (
            f"--set x={text} is not a range of sizes; write two sizes of at least 1, the smaller "
            "first, such as 128..4096"
        )

    def test_empty_value_is_refused(self) -> None:
        with pytest.raises(TargetError) as caught:
            parse_values("x", "1,,2")
        assert str(caught.value) == "--set x=1,,2 has an empty value; write values such as 1,2,4"


class TestPoints:
    def test_last_name_changes_fastest(self) -> None:
        assert points({"a": "1,2", "b": "x,y"}) == [
            {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}
        ]  # fmt: skip

    def test_too_many_combinations_are_refused(self) -> None:
        with pytest.raises(TargetError) as caught:
            points({name: ",".join(map(str, range(30))) for name in "abc"})
        assert str(caught.value) == "--set gives 27000 combinations; give at most 10000"
