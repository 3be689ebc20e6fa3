"""``diff`` and ``check``: changes and limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from dispatch_flops import OpCost, Profile
from dispatch_flops.cli.compare import seconds
from dispatch_flops.profile import OpTotal, RunInfo, StepTiming
from tests.helpers.command_line import Result, Run, refused, tree
from tests.helpers.trees import timed

Compare = Callable[..., Result]


class TestDiff:
    @pytest.fixture
    def compare(self, run: Run) -> Compare:
        def call(before: Profile, after: Profile, *options: str) -> Result:
            Path("a.json").write_text(before.to_json())
            Path("b.json").write_text(after.to_json())
            return run("diff", "a.json", "b.json", *options)

        return call

    @staticmethod
    def _cells(text: str) -> dict[str, list[str]]:
        rows = [line.strip(" |").split(" | ") for line in text.splitlines() if " | " in line]
        return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in rows}

    def test_what_changed(self, compare: Compare) -> None:
        before = tree({"same": 3, "grown": 100, "gone": 5})
        after = tree({"same": 3, "grown": 150, "new": 7})
        result = compare(before, after, "--format", "markdown")
        assert result.code == 0
        cells = self._cells(result.out)
        assert cells["everything"][1] == "108 -> 160 (+48.15%)"
        assert cells["(model)"][1] == "108 -> 160 (+48.15%)"
        assert cells["grown"][1:3] == ["100 -> 150 (+50%)", "200 -> 300 (+50%)"]
        assert cells["gone"][1] == "gone: 5"
        assert cells["new"][1] == "new: 7"
        assert "same" not in cells
        assert cells["aten.mm.default"][:2] == ["3", "108 -> 160 (+48.15%)"]

    def test_all_and_depth(self, compare: Compare) -> None:
        before, after = tree({"same": 3, "grown": 100}), tree({"same": 3, "grown": 150})
        cells = self._cells(compare(before, after, "--all", "--format", "markdown").out)
        assert cells["same"][1] == "3"
        options = ("--all", "--depth", "0", "--format", "markdown")
        assert "same" not in self._cells(compare(before, after, *options).out)

    def test_what_only_rounding_hides_is_exact(self, compare: Compare) -> None:
        out = compare(tree({"a": 10**9}), tree({"a": 10**9 + 1})).out
        assert "1,000,000,000 -> 1,000,000,001 (+<0.01%)" in out

    def test_exit_code(self, compare: Compare) -> None:
        one, other = tree({"a": 1}, latency=1.0), tree({"a": 1}, latency=2.0)
        same = compare(one, other, "--exit-code")
        assert same.code == 0
        assert "1 s -> 2 s (+100%)" in same.out
        assert "No count changed." in same.out
        assert compare(one, tree({"a": 2}), "--exit-code").code == 1
        assert compare(one, tree({"a": 2})).code == 0

    def test_runs_of_other_things_are_said_to_be(self, compare: Compare) -> None:
        before, after = tree({"a": 1}), tree({"a": 1})
        assert "not alike" not in compare(before, after).out
        after = dataclasses.replace(after, run=RunInfo(device="meta"))
        out = compare(before, after).out
        assert out.startswith("These are not alike: device cpu, then meta.\n")
        backward = OpTotal(op="lib.a", phase="backward", calls=1, cost=OpCost())
        root = dataclasses.replace(before.root, ops=(*before.root.ops, backward))
        out = compare(before, dataclasses.replace(before, root=root)).out
        assert out.startswith("These are not alike: phases forward, then forward + backward.\n")

    def test_a_phase(self, compare: Compare) -> None:
        out = compare(tree({"a": 1}), tree({"a": 2}), "--phase", "backward").out
        assert "1 -> 2" not in out


class TestCheck:
    @pytest.fixture(autouse=True)
    def _profile(self) -> None:
        Path("p.json").write_text(tree({"a": 3000, "b": 1200}, latency=0.005).to_json())

    @pytest.mark.parametrize(
        "limits",
        [
            ("--max-macs", "4.2K"),
            ("--max-macs", "4200", "--max-flops", "8400", "--max-params", "0"),
            ("--max-latency", "5ms", "--max-bytes", "0"),
        ],
    )
    def test_kept(self, run: Run, limits: tuple[str, ...]) -> None:
        result = run("check", "p.json", *limits)
        assert result.code == 0
        assert result.out.startswith("within ")

    def test_one_line_per_limit_that_is_exceeded(self, run: Run) -> None:
        limits = ("--max-macs", "4.199K", "--max-flops", "1", "--max-params", "1")
        result = run("check", "p.json", *limits, "--max-latency", "4ms")
        assert result.code == 1
        assert result.out.splitlines() == [
            "MACs: 4.2 KMACs (4,200) exceed the limit of 4.2 KMACs (4,199)",
            "FLOPs: 8.4 KFLOPs (8,400) exceed the limit of 1 FLOPs",
            "latency: 5 ms exceed the limit of 4 ms",
        ]

    def test_a_phase(self, run: Run) -> None:
        assert run("check", "p.json", "--max-macs", "0", "--phase", "backward").code == 0
        assert run("check", "p.json", "--max-macs", "0", "--phase", "forward").code == 1

    def test_the_latency_of_a_phase_is_the_measured_one(self, run: Run) -> None:
        profile = tree({"a": 1}, latency=0.005)
        timing = StepTiming(seconds=timed(backward=0.003))
        Path("p.json").write_text(dataclasses.replace(profile, timing=timing).to_json())
        assert run("check", "p.json", "--max-latency", "3ms", "--phase", "backward").code == 0
        result = run("check", "p.json", "--max-latency", "2ms", "--phase", "backward")
        assert result.out.splitlines() == ["latency: 3 ms exceed the limit of 2 ms"]

    def test_what_was_not_measured_keeps_no_limit(self, run: Run) -> None:
        Path("p.json").write_text(tree({"a": 1}).to_json())
        result = run("check", "p.json", "--max-latency", "1")
        assert result.code == 1
        assert "not measured" in result.out

    def test_mistakes(self, run: Run) -> None:
        refused(run("check", "p.json"), "needs a limit")
        refused(run("check", "p.json", "--max-macs", "many"), "--max-macs: 'many' is no size")
        refused(run("check", "p.json", "--max-latency", "4h"), "--max-latency: '4h' is no time")
        refused(run("check", "missing.json", "--max-macs", "1"), "cannot read")

    def test_times(self) -> None:
        assert [seconds(text) for text in ("5ms", "1.5", " 2 s", "300us", "4ns")] == pytest.approx(
            [0.005, 1.5, 2.0, 0.0003, 4e-9]
        )
