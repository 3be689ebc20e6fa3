"""``sweep``: many sizes, and how cost grows with them."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest

from dispatch_flops.cli.output import progress_bar
from dispatch_flops.cli.sweep import points, values
from dispatch_flops.cli.sweep_plot import Figure
from dispatch_flops.errors import TargetError
from tests.helpers.command_line import Run, macs, params, refused


class TestSweep:
    def test_table_and_growth(self, run: Run) -> None:
        result = run(
            "sweep", "net.py:make", "--set", "batch=2,8", "width=10..40", "--device", "meta"
        )
        assert result.code == 0
        assert "[6/6] batch=8 width=40" in result.err
        assert "MACs ~ batch^1 " in result.out
        assert result.out.splitlines()[0].split() == [
            "batch", "width", "Params", "MACs", "FLOPs", "Bytes"
        ]  # fmt: skip

    def test_csv(self, run: Run) -> None:
        arguments = ("--sweep", "batch=2,3", "width=10,20", "--format", "csv", "--device", "meta")
        rows = list(csv.DictReader(io.StringIO(run("sweep", "net.py:make", *arguments).out)))
        found = [(int(row["batch"]), int(row["width"]), int(row["macs"])) for row in rows]
        assert found == [(b, w, macs(w, b)) for b in (2, 3) for w in (10, 20)]
        assert [int(row["params"]) for row in rows[:2]] == [params(10), params(20)]

    def test_latency_is_shown_where_it_is_measured(self, run: Run) -> None:
        assert "fwd latency" in run("sweep", "net.py:make", "--set", "batch=2").out

    def test_values(self) -> None:
        assert values("x", "1,2,8..40,0.5,relu") == [1, 2, 8, 16, 32, 0.5, "relu"]
        assert values("x", "3..3,3") == [3]
        for text in ("8..4", "0..4", "a..b", "1,,2"):
            with pytest.raises(TargetError):
                values("x", text)

    def test_points(self) -> None:
        assert points({"a": "1,2", "b": "x,y"}) == [
            {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}
        ]  # fmt: skip

    def test_mistakes(self, run: Run) -> None:
        refused(run("sweep", "net.py:make"), "--set seq=128..4096")
        refused(run("sweep", "net.py:make", "--set", "depth=1,2"), "--set depth")
        too_many = ("--set", *(f"{name}={','.join(map(str, range(30)))}" for name in "abc"))
        refused(run("sweep", "net.py:make", *too_many), "27000 combinations")


class TestSweepOfProfile:
    """``profile --sweep``, which is ``sweep`` by another name."""

    def test_the_same_rows(self, run: Run) -> None:
        sizes = ("batch=2,3", "width=10,20")
        options = ("--format", "csv", "--device", "meta")
        swept = run("profile", "net.py:make", "--sweep", *sizes, *options)
        assert swept.code == 0
        assert swept.out == run("sweep", "net.py:make", "--set", *sizes, *options).out

    def test_what_is_set_holds_at_every_point(self, run: Run) -> None:
        options = ("--set", "batch=2", "--sweep", "width=10,20", "--device", "meta")
        lines = run("profile", "net.py:make", *options).out.splitlines()
        rows = [line.split()[:2] for line in lines if line.strip().startswith("2")]
        assert rows == [["2", "10"], ["2", "20"]]

    def test_mistakes(self, run: Run) -> None:
        swept = ("profile", "net.py:make", "--sweep", "width=10,20")
        refused(run(*swept, "--format", "json"), "table, markdown, csv: not json")
        refused(run(*swept, "--machine", "measure"), "leave out --sweep")
        refused(run("profile", "net.py:make", "--plot", "p.svg"), "give --sweep")


class TestPlot:
    SWEEP = ("sweep", "net.py:make", "--device", "meta", "--set")

    def test_a_curve_per_combination_of_the_other_sizes(self, run: Run) -> None:
        pytest.importorskip("matplotlib")
        result = run(*self.SWEEP, "width=10,20", "batch=2,4,8", "--plot", "figures/p.svg")
        assert (result.code, result.err.splitlines()[-1]) == (0, "written to figures/p.svg")
        svg = Path("figures/p.svg").read_text()
        for text in ("<!-- batch -->", "width=10: batch^1.00", "width=20: batch^1.00"):
            assert text in svg
        assert "≥" not in svg
        assert "FLOPs ~ batch^1 " in result.out

    def test_png_of_one_size(self, run: Run) -> None:
        pytest.importorskip("matplotlib")
        assert run(*self.SWEEP, "batch=2,4", "--plot", "p.png").code == 0
        assert Path("p.png").read_bytes().startswith(b"\x89PNG\r\n")

    def test_a_lower_bound_is_marked(self, run: Run) -> None:
        pytest.importorskip("matplotlib")
        figure = Figure.of([{"s": 4}, {"s": 2}], "p.svg")
        figure.write([16, 4], lower_bound=True)
        svg = Path("p.svg").read_text()
        assert "FLOPs: s^2.00" in svg
        assert "≥ FLOPs" in svg

    def test_what_cannot_be_drawn_is_said_before_anything_runs(self, run: Run) -> None:
        pytest.importorskip("matplotlib")
        for sizes, name, words in (
            (("batch=2,4",), "p.gif", "ends with .png, .svg, .pdf"),
            (("batch=2",), "p.svg", "two or more positive values"),
            (("batch=0,2",), "p.svg", "two or more positive values"),
            (("kind=a,b",), "p.svg", "two or more positive values"),
            (("batch=2,4,8", "a=1,2,3", "b=1,2,3", "c=1,2"), "p.svg", "18 curves are too many"),
        ):
            result = run(*self.SWEEP, *sizes, "--plot", name)
            refused(result, words)
            assert len(result.err.splitlines()) == 1

    def test_without_matplotlib(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        result = run(*self.SWEEP, "batch=2,4", "--plot", "p.svg")
        refused(result, "pip install 'dispatch-flops[plots]'")
        assert len(result.err.splitlines()) == 1


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestProgress:
    @staticmethod
    def _run(steps: int = 3, fail: bool = False) -> None:
        with progress_bar(3) as advance:
            for step in range(steps):
                advance(f"s={step}")
            if fail:
                raise TargetError("no more")

    def test_a_terminal_has_a_bar(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("tqdm")
        monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
        self._run()
        last = terminal.getvalue().split("\r")[-1]
        assert "100%" in last
        assert "3/3" in last
        assert "s=2" in last
        assert last.endswith("\n")

    def test_a_bar_that_ends_early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("tqdm")
        monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
        with pytest.raises(TargetError):
            self._run(2, fail=True)
        last = terminal.getvalue().split("\r")[-1]
        assert "1/3" in last  # the second was begun, not done
        assert last.endswith("\n")

    def test_a_terminal_without_tqdm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
        self._run()
        assert (
            terminal.getvalue() == "".join(f"\r\x1b[K[{n}/3] s={n - 1}" for n in (1, 2, 3)) + "\n"
        )

    def test_a_pipe_has_lines(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._run()
        assert capsys.readouterr().err == "[1/3] s=0\n[2/3] s=1\n[3/3] s=2\n"
