"""``profile`` and ``demo``: what is shown of the run."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from dispatch_flops import Profile, analysis
from dispatch_flops.analysis.machines import MACHINES, Machine
from dispatch_flops.cli.profile import _utilisation_text
from dispatch_flops.profile import StepTiming
from dispatch_flops.units import fraction_text, seconds_text
from tests.helpers.command_line import B, Run, W, error_line, macs, params
from tests.helpers.html_pages import page_data
from tests.helpers.trees import module, op


class TestProfile:
    def test_optimizer_without_a_training_step_is_refused(self, run: Run) -> None:
        result = run("profile", "net.py:Net", "--input-shape", "2,4", "--optimizer", "adamw")
        assert error_line(result) == "--optimizer is that of a training step; add --train"

    def test_train_runs_a_step_of_the_optimizer(self, run: Run) -> None:
        options = ("--train", "--optimizer", "adamw", "--format", "json")
        result = run("profile", "net.py:make", *options)
        profile = Profile.from_json(result.out)
        assert profile.total("forward").macs == macs()
        # every layer's weight gradient, and the input gradients of all but the first
        assert profile.total("backward").macs == 2 * macs() - B * W * W
        assert any(node.class_name == "AdamW" for node in profile.outside.children)
        assert profile.run.training is True

    def test_progress_names_warm_up_timing_and_counting(self, run: Run) -> None:
        told = run("profile", "net.py:make", "--warm-up", "2").err.splitlines()
        stages = [line for line in told if not line.startswith("what the")]
        assert stages[-4:] == ["warm-up 1 of 2", "warm-up 2 of 2", "timing a call", "counting"]

    def test_default_format_is_the_overview(self, run: Run) -> None:
        result = run("profile", "net.py:make")
        assert result.code == 0
        assert result.out.startswith(f"Net: {params()} parameters, {macs()} MACs, ")
        assert "layers.0-1 (2 x Linear)" in result.out
        assert "aten.addmm.default" in result.out
        assert "profiling net.py:make on cpu" in result.err

    def test_named_machine_adds_its_utilisation(self, run: Run) -> None:
        options = ("--machine", "NVIDIA H200", "--device", "meta", "--format", "json")
        result = run("profile", "net.py:make", *options)
        ops = Profile.from_json(result.out).op_totals()
        machine = MACHINES["NVIDIA H200"]
        assert machine.bytes_per_s is not None
        best = sum(  # so small a model is bound by memory in every operator
            op.cost.bytes_total / machine.bytes_per_s for op in ops if op.cost is not None
        )
        last = result.err.splitlines()[-1]
        assert last == (
            f"NVIDIA H200: MFU n/a (the time was not measured), "
            f"HFU n/a; at best {seconds_text(best)}, bound by memory; "
            "measured n/a (not measured)"
        )

    def test_measured_machine_adds_its_utilisation(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peaks = Machine(
            name="bench", flops_per_s={"float32": 1e9}, bytes_per_s=1e30, source="a test"
        )
        asked: list[str] = []
        monkeypatch.setattr(
            "dispatch_flops.timing.peaks.measure_machine",
            lambda device: asked.append(device) or peaks,
        )
        result = run("profile", "net.py:make", "--machine", "measure", "--format", "json")
        assert asked == ["cpu"]
        profile = Profile.from_json(result.out)
        assert profile.root.latency_s is not None
        least_s = profile.total().flops / 1e9
        mfu = fraction_text(least_s / profile.root.latency_s)
        mark = "~" if analysis.inexact_phases(profile) else ""
        assert result.err.splitlines()[-1] == (
            f"bench: MFU {mfu}, HFU {mfu}; at best {seconds_text(least_s)}, bound by compute; "
            f"measured {mark}{seconds_text(profile.root.latency_s)} (forward)"
        )

    def test_hardware_utilisation_that_alone_is_not_known_says_why(self) -> None:
        ops = (
            op("aten.relu.default", extra_flops=6),
            op("aten.mul.Tensor", "optimizer", dtype="float64", extra_flops=5),
        )
        profile = Profile(root=module("Net", ops=ops), timing=StepTiming(iteration_s=1.0))
        text = _utilisation_text(profile, Machine(name="Tiny", flops_per_s={"float32": 24.0}))
        assert text.startswith("Tiny: MFU 25%, HFU n/a (no peak of Tiny is known for float64); ")

    def test_unknown_machine_is_refused_before_the_run(self, run: Run) -> None:
        result = run("profile", "net.py:make", "--machine", "NVIDIA H2000")
        assert error_line(result).startswith("--machine 'NVIDIA H2000' is unknown; use measure, ")
        assert len(result.err.splitlines()) == 1

    def test_page_names_the_machine(self, run: Run) -> None:
        arguments = ("--machine", "NVIDIA H200", "--device", "meta", "--output", "page.html")
        assert run("profile", "net.py:make", *arguments).code == 0
        page = Path("page.html").read_text(encoding="utf-8")
        assert MACHINES["NVIDIA H200"].source in str(page_data(page))

    def test_plot_without_a_sweep_is_refused(self, run: Run) -> None:
        assert error_line(run("profile", "net.py:make", "--plot", "p.svg")) == (
            "--plot needs a sweep; add --sweep, such as --sweep seq=128..4096"
        )

    def test_unwritable_output_is_refused(self, run: Run) -> None:
        result = run("profile", "net.py:make", "--output", "net.py/x")
        assert error_line(result).startswith("cannot write 'net.py/x': ")

    @pytest.mark.usefixtures("odd_operator")
    def test_uncounted_operator_is_printed_without_a_warning(self, run: Run) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            result = run("profile", "net.py:odd")
        assert result.code == 0
        assert "cli_test.odd.default" in result.out
        assert f">= {B * W}" in result.out
        assert "Warning" not in result.err


class TestProfileSweep:
    """``profile --sweep``, which runs ``sweep``."""

    def test_rows_are_those_of_the_command_sweep(self, run: Run) -> None:
        sizes = ("batch=2,3", "width=10,20")
        options = ("--format", "csv", "--device", "meta", "--machine", "H200")
        swept = run("profile", "net.py:make", "--sweep", *sizes, *options)
        assert swept.code == 0
        assert swept.out == run("sweep", "net.py:make", "--set", *sizes, *options).out

    def test_set_values_apply_at_every_point(self, run: Run) -> None:
        options = ("--set", "batch=2", "--sweep", "width=10,20", "--device", "meta")
        lines = run("profile", "net.py:make", *options).out.splitlines()
        rows = [line.split()[:2] for line in lines if line.strip().startswith("2")]
        assert rows == [["2", "10"], ["2", "20"]]

    @pytest.mark.parametrize(
        "options,message",
        [
            (
                ("--format", "json"),
                "--format json is not available for a sweep; use one of table, markdown, csv",
            ),
            (
                ("--output", "s.json"),
                "--output s.json: the suffix .json is unknown; use one of .txt, .md, .csv, or add "
                "--format",
            ),
            (("--depth", "1"), "--depth has no effect on a sweep; omit it"),
            (("--no-fold",), "--no-fold has no effect on a sweep; omit it"),
            (("--no-detailed",), "--no-detailed has no effect on a sweep; omit it"),
        ],
    )
    def test_option_of_a_single_run_is_refused(
        self, run: Run, options: tuple[str, ...], message: str
    ) -> None:
        result = run("profile", "net.py:make", "--sweep", "width=10,20", *options)
        assert error_line(result) == message


class TestDemo:
    def test_demo_folds_the_layers_of_bert_base(self, run: Run) -> None:
        result = run("demo", "--device", "meta")
        assert result.code == 0
        assert "109.48 M parameters, 44.7 GMACs" in result.out
        assert "layer.0-11 (12 x BertLayer)" in result.out
        assert ">=" not in result.out

    def test_no_fold_shows_every_layer(self, run: Run) -> None:
        out = run("demo", "--device", "meta", "--no-fold").out
        assert "  11 (BertLayer)" in out
