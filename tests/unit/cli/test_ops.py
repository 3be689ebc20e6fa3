"""``ops``: the registry and what it covers."""

from __future__ import annotations

import csv
import io

import pytest

from dispatch_flops.cli.ops import coverage
from tests.helpers.command_line import Run, refused


class TestOps:
    def test_a_formula_with_its_cost_and_source(self, run: Run) -> None:
        rows = list(csv.DictReader(io.StringIO(run("ops", "--format", "csv").out)))
        by_name = {row["Operator"]: row for row in rows}
        assert by_name["aten.mm"]["Kind"] == "formula"
        assert "M·N·K" in by_name["aten.mm"]["Cost"]
        assert by_name["aten.view"]["Kind"] == "free"
        assert by_name["aten.gelu"]["Kind"] == "pointwise"
        assert all(row["Cost"] for row in rows)

    @pytest.mark.parametrize("pattern", ["aten.addmm", "aten.addm*"])
    def test_filter(self, run: Run, pattern: str) -> None:
        lines = run("ops", "--filter", pattern).out.splitlines()
        assert any(line.startswith("aten.addmm ") for line in lines)
        assert not any(line.startswith("aten.bmm ") for line in lines)

    def test_markdown(self, run: Run) -> None:
        assert "| `aten.addmm` " in run("ops", "--filter", "aten.addmm", "--markdown").out

    def test_nothing_fits(self, run: Run) -> None:
        refused(run("ops", "--filter", "nothing_like_it"), "no operator fits")

    def test_coverage_is_no_csv(self, run: Run) -> None:
        refused(run("ops", "--coverage", "--format", "csv"), "table or markdown")

    def test_coverage(self, run: Run) -> None:
        found, everything = coverage()
        assert "aten.mm.default" in found["formula"]
        assert "aten.view.default" in found["free"]
        listed = {op for ops in found.values() for op in ops}
        assert "aten.matmul.default" not in listed  # composite
        assert len(listed) == sum(map(len, found.values())) < everything
        out = run("ops", "--coverage").out
        assert f"Without a cost ({len(found.get('none', []))})" in out or not found.get("none")
