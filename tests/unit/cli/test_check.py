"""``check``: limits kept, exceeded and not known to be kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dispatch_flops.cli.check import parse_seconds
from dispatch_flops.profile import Profile, StepTiming
from dispatch_flops.profile.cost import OpCost
from tests.helpers.command_line import Run, Save, error_line, tree
from tests.helpers.trees import empty, module, timed


class TestLimits:
    @pytest.fixture(autouse=True)
    def _profile(self) -> None:
        Path("p.json").write_text(tree({"a": 3000, "b": 1200}, latency=0.005).to_json())

    @pytest.mark.parametrize(
        "limits,out",
        [
            (("--max-macs", "4.2K"), "within the limit: macs\n"),
            (
                ("--max-macs", "4200", "--max-flops", "8400", "--max-params", "0"),
                "within all limits: macs, flops, params\n",
            ),
            (("--max-latency", "5ms", "--max-bytes", "0"), "within all limits: bytes, latency\n"),
        ],
    )
    def test_kept_limits_exit_with_0(self, run: Run, limits: tuple[str, ...], out: str) -> None:
        result = run("check", "p.json", *limits)
        assert (result.code, result.out) == (0, out)

    def test_each_exceeded_limit_is_a_line(self, run: Run) -> None:
        limits = ("--max-macs", "4.199K", "--max-flops", "1", "--max-params", "1")
        result = run("check", "p.json", *limits, "--max-latency", "4ms")
        assert result.code == 1
        assert result.out.splitlines() == [
            "MACs: 4.2 KMACs (4,200) exceeds the limit of 4.2 KMACs (4,199)",
            "FLOPs: 8.4 KFLOPs (8,400) exceeds the limit of 1 FLOPs",
            "latency: 5 ms exceeds the limit of 4 ms",
        ]

    @pytest.mark.parametrize(("limit", "code"), [("7 B", 1), ("1KiB", 1), ("1.2 kB", 0)])
    def test_bytes_have_units_of_bytes(self, run: Run, limit: str, code: int) -> None:
        profile = tree({"a": 3})
        op = dataclasses.replace(
            next(profile.op_totals()), cost=OpCost(macs=3, flops=6, bytes_read=1100)
        )
        outside = dataclasses.replace(profile.outside, ops=(op,))
        Path("p.json").write_text(dataclasses.replace(profile, outside=outside).to_json())
        assert run("check", "p.json", "--max-bytes", limit).code == code

    def test_phase_restricts_the_counts(self, run: Run) -> None:
        profile = dataclasses.replace(
            tree({"a": 3000}), timing=StepTiming(seconds=timed(backward=0.003))
        )
        Path("p.json").write_text(profile.to_json())
        assert run("check", "p.json", "--max-macs", "0", "--phase", "backward").code == 0
        assert run("check", "p.json", "--max-macs", "0", "--phase", "recompute").code == 0
        assert run("check", "p.json", "--max-macs", "0", "--phase", "forward").code == 1

    @pytest.mark.parametrize("phase", ["backward", "recompute", "optimizer"])
    @pytest.mark.parametrize(
        "limit,label",
        [
            ("--max-macs", "MACs"),
            ("--max-flops", "FLOPs"),
            ("--max-bytes", "bytes"),
            ("--max-params", "params"),
            ("--max-latency", "latency"),
        ],
    )
    def test_phase_that_was_not_profiled_fails_the_check(
        self, run: Run, limit: str, label: str, phase: str
    ) -> None:
        result = run("check", "p.json", limit, "900", "--phase", phase)
        assert result.code == 1
        assert result.out.startswith(f"{label}: {phase} was not profiled; cannot check the limit")

    def test_profile_of_a_model_that_never_ran_fails_the_check(self, run: Run) -> None:
        Path("p.json").write_text(empty().to_json())
        result = run("check", "p.json", "--max-macs", "1")
        assert (result.code, result.out) == (
            1,
            "MACs: nothing ran: the model was not profiled; cannot check the limit of 1 MACs\n",
        )

    def test_model_without_operators_is_profiled(self, run: Run) -> None:
        Path("p.json").write_text(Profile(root=module("Identity", calls=1)).to_json())
        assert run("check", "p.json", "--max-macs", "0", "--phase", "forward").code == 0
        assert run("check", "p.json", "--max-macs", "0").code == 0

    def test_latency_of_a_phase_is_the_measured_one(self, run: Run) -> None:
        profile = tree({"a": 1}, latency=0.005)
        timing = StepTiming(seconds=timed(backward=0.003))
        Path("p.json").write_text(dataclasses.replace(profile, timing=timing).to_json())
        assert run("check", "p.json", "--max-latency", "3ms", "--phase", "backward").code == 0
        result = run("check", "p.json", "--max-latency", "2ms", "--phase", "backward")
        assert result.out.splitlines() == ["latency: 3 ms exceeds the limit of 2 ms"]

    def test_unmeasured_latency_fails_the_check(self, run: Run) -> None:
        Path("p.json").write_text(tree({"a": 1}).to_json())
        result = run("check", "p.json", "--max-latency", "1")
        assert (result.code, result.out) == (
            1,
            "latency: not measured in this profile; cannot check the limit of 1 s\n",
        )


@pytest.mark.usefixtures("odd_operator")
def test_lower_bound_fails_the_check_unless_allowed(run: Run, saved: Save) -> None:
    saved("p.json", "net.py:odd")
    limit = ("check", "p.json", "--max-flops", "1G")
    result = run(*limit)
    assert (result.code, result.out) == (
        1,
        "FLOPs: >= 15 FLOPs may exceed the limit of 1 GFLOPs (1,000,000,000): no cost is known for "
        "cli_test.odd.default\n",
    )
    assert run(*limit, "--allow-uncounted").code == 0
    assert run(*limit, "--phase", "backward").code == 1
    assert run("check", "p.json", "--max-params", "1").code == 0


class TestMistakes:
    @pytest.mark.parametrize(
        "arguments,message",
        [
            (
                ("p.json",),
                "no limit is given; add one of --max-macs, --max-flops, --max-bytes, --max-memory, "
                "--max-params, --max-latency, the same with --min-, or --baseline FILE",
            ),
            (
                ("p.json", "--max-latency", "4h"),
                "--max-latency: '4h' is not a time; write a time such as 5ms, 300us or 1.5s",
            ),
            (
                ("missing.json", "--max-macs", "1"),
                "cannot read 'missing.json': No such file or directory",
            ),
        ],
    )
    def test_check_without_limits_or_profile_is_refused(
        self, run: Run, arguments: tuple[str, ...], message: str
    ) -> None:
        assert error_line(run("check", *arguments)) == message

    def test_limit_that_is_not_a_count_is_refused(self, run: Run) -> None:
        message = error_line(run("check", "p.json", "--max-macs", "many"))
        assert message.startswith("--max-macs: 'many' is no")


def test_parse_seconds_reads_units_of_time() -> None:
    texts = ("5ms", "1.5", " 2 s", "300us", "4ns")
    assert [parse_seconds(text) for text in texts] == pytest.approx([0.005, 1.5, 2.0, 0.0003, 4e-9])


class TestLeast:
    def test_reached_limits_exit_with_0(self, run: Run) -> None:
        Path("p.json").write_text(tree({"a": 3000}).to_json())
        result = run("check", "p.json", "--min-macs", "3K", "--max-macs", "3K")
        assert (result.code, result.out) == (0, "within the limit: macs\n")

    def test_figure_below_its_limit_fails(self, run: Run) -> None:
        Path("p.json").write_text(tree({"a": 2999}).to_json())
        result = run("check", "p.json", "--min-macs", "3K")
        assert result.code == 1
        assert result.out == (
            "MACs: 3 KMACs (2,999) is below the limit of at least 3 KMACs (3,000)\n"
        )

    def test_limit_on_what_was_not_measured_fails(self, run: Run) -> None:
        Path("p.json").write_text(tree({"a": 2}).to_json())
        result = run("check", "p.json", "--min-latency", "1ms")
        assert result.code == 1
        assert "not measured in this profile" in result.out


class TestBaseline:
    @pytest.fixture(autouse=True)
    def _baseline(self) -> None:
        Path("main.json").write_text(tree({"a": 1000, "b": 1000}).to_json())

    @pytest.mark.parametrize(
        ("now", "tolerance", "code"),
        [
            (1000, (), 0),
            (900, (), 0),
            (1001, (), 1),
            (1020, ("--tolerance", "1%"), 0),
            (1021, ("--tolerance", "1%"), 1),
            (1020, ("--tolerance", "0.01"), 0),
            (1021, ("--tolerance", "0.01"), 1),
        ],
    )
    def test_counts_may_exceed_the_baseline_by_the_tolerance(
        self, run: Run, now: int, tolerance: tuple[str, ...], code: int
    ) -> None:
        Path("p.json").write_text(tree({"a": now, "b": 1000}).to_json())
        assert run("check", "p.json", "--baseline", "main.json", *tolerance).code == code

    def test_exceeded_tolerance_names_the_limit_and_not_a_share_of_it(self, run: Run) -> None:
        Path("p.json").write_text(tree({"a": 2000, "b": 1000}).to_json())
        out = run("check", "p.json", "--baseline", "main.json", "--tolerance", "1%").out
        limit = "the limit (the baseline plus 1%) of 2.02 KMACs (2,020)"
        assert out.startswith(f"MACs: 3 KMACs (3,000) exceeds {limit}\n")

    def test_exceeded_baseline_shows_the_modules_that_changed(self, run: Run) -> None:
        Path("p.json").write_text(tree({"a": 2000, "b": 1000}, latency=0.5).to_json())
        out = run("check", "p.json", "--baseline", "main.json").out
        assert "Forward" not in out
        assert out.startswith("MACs: 3 KMACs (3,000) exceeds the baseline of 2 KMACs (2,000)\n")
        rows = [line.split()[0] for line in out.splitlines() if "->" in line]
        assert rows == ["everything", "(model)", "a", "aten.mm.default"]

    def test_largest_of_many_changes_are_listed_and_the_others_counted(self, run: Run) -> None:
        """Of m1 to m30, m<k> grows by k MACs; the model grows by all."""
        for name, more in (("main.json", 0), ("p.json", 1)):
            profile = tree({f"m{k}": 100 + more * k for k in range(1, 31)})
            Path(name).write_text(profile.to_json())
        out = run("check", "p.json", "--baseline", "main.json", "--phase", "forward").out
        rows = [line.split()[0] for line in out.splitlines() if "->" in line]
        grown = [f"m{k}" for k in range(30, 21, -1)]
        assert rows == ["everything", "(model)", *grown, "aten.mm.default"]
        assert out.endswith(
            "\nThe largest changes are listed; those of 21 modules are left out.\n\n"
            "For all changes, run dispatch-flops diff main.json p.json --phase forward\n"
        )

    def test_baseline_of_another_convention_is_not_kept(self, run: Run) -> None:
        profile = tree({"a": 10})
        run_info = dataclasses.replace(profile.run, flops="contractions")
        Path("p.json").write_text(dataclasses.replace(profile, run=run_info).to_json())
        result = run("check", "p.json", "--baseline", "main.json")
        assert result.code == 1
        assert result.out.startswith("The runs differ in FLOPs: all, then contractions.\n")
        assert result.out.count("The runs differ") == 1

    def test_baseline_with_a_phase_that_was_not_profiled_is_not_kept(self, run: Run) -> None:
        op = dataclasses.replace(next(tree({"a": 10}).op_totals()), phase="backward")
        outside = dataclasses.replace(tree({"a": 10}).outside, ops=(op,))
        Path("p.json").write_text(tree({"a": 10}).to_json())
        Path("train.json").write_text(
            dataclasses.replace(tree({"a": 10}), outside=outside).to_json()
        )
        result = run("check", "p.json", "--baseline", "train.json")
        assert result.code == 1
        expected = "backward was not profiled; cannot check the baseline, which has it\n"
        assert result.out.startswith(expected)
        forward = run("check", "p.json", "--baseline", "train.json", "--phase", "forward")
        assert forward.code == 0

    @pytest.mark.parametrize(("text", "hint"), [("5", "5%"), ("1.5", "1.5%")])
    def test_tolerance_of_whole_numbers_needs_its_percent_sign(
        self, run: Run, text: str, hint: str
    ) -> None:
        arguments = ("check", "main.json", "--baseline", "main.json", "--tolerance", text)
        assert f"write {hint} or a fraction below 1" in error_line(run(*arguments))

    @pytest.mark.parametrize("text", ["many", "-1%", "1%%"])
    def test_tolerance_that_is_not_a_percentage_is_refused(self, run: Run, text: str) -> None:
        Path("p.json").write_text(tree({"a": 1}).to_json())
        arguments = ("check", "p.json", "--baseline", "main.json", f"--tolerance={text}")
        assert "is not a percentage; write one such as 1%" in error_line(run(*arguments))

    def test_tolerance_without_a_baseline_is_refused(self, run: Run) -> None:
        message = error_line(run("check", "main.json", "--max-macs", "1", "--tolerance", "1%"))
        assert message == "--tolerance needs a baseline; add --baseline FILE"
