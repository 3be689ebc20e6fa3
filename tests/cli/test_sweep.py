"""``sweep``: many sizes, and how cost grows with them."""

from __future__ import annotations

import csv
import io

import pytest

from cli.helpers import Run, macs, params, refused
from dispatch_flops.cli.scaling import exponents
from dispatch_flops.cli.sweep import points, values
from dispatch_flops.errors import TargetError


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
        assert "Latency" in run("sweep", "net.py:make", "--set", "batch=2").out

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


class TestExponents:
    def test_powers_are_exact(self) -> None:
        grid = [{"b": b, "s": s} for b in (1, 2, 4) for s in (16, 64)]
        found = exponents(grid, [11 * p["b"] * p["s"] ** 2 for p in grid])
        assert [(e.name, round(e.overall, 9), round(e.last, 9)) for e in found] == [
            ("b", 1, 1), ("s", 2, 2)
        ]  # fmt: skip
        assert [(e.smallest, e.largest) for e in found] == [(1, 4), (16, 64)]

    def test_the_upper_end_is_nearer_to_what_it_tends_to(self) -> None:
        sizes = [1, 10, 100, 1000]
        (found,) = exponents([{"s": s} for s in sizes], [100 * s + s * s for s in sizes])
        assert 1 < found.overall < found.last < 2

    def test_what_does_not_vary_or_is_no_power(self) -> None:
        assert exponents([], []) == []
        assert exponents([{"s": 1}, {"s": 2}], [0, 3]) == []
        assert exponents([{"s": 0}, {"s": 2}], [1, 3]) == []
        assert exponents([{"s": 2, "b": 1}], [3]) == []
