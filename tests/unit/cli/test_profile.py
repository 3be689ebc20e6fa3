"""``profile`` and ``demo``: what is built, run and printed."""

from __future__ import annotations

import csv
import io
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dispatch_flops import OpCost, Profile, register_flops, unregister_flops
from dispatch_flops.analysis.machines import MACHINES, Machine
from dispatch_flops.units import fraction_text, seconds_text
from tests.helpers.command_line import B, Run, Save, W, macs, params, refused


class TestProfile:
    def test_counts(self, saved: Save) -> None:
        profile = saved("p.json", "net.py:make")
        assert profile.total().macs == macs()
        assert profile.total_params == params()
        assert profile.node("layers.1").total().macs == B * W * W
        assert profile.root.latency_s is not None

    def test_the_default_printout(self, run: Run) -> None:
        result = run("profile", "net.py:make")
        assert result.code == 0
        assert f"{macs()} MACs = 100% MACs" in result.out
        assert "(1): Linear(" in result.out
        assert "aten.addmm.default" in result.out

    def test_stdout_holds_nothing_but_the_profile(self, run: Run) -> None:
        result = run("profile", "net.py:make", "--format", "json")
        assert Profile.from_json(result.out).total().macs == macs()
        assert "what the factory prints" in result.err
        assert "what the model prints" in result.err
        assert "profiling net.py:make on cpu" in result.err

    def test_how_near_it_was_to_a_machines_peaks(self, run: Run) -> None:
        options = ("--machine", "NVIDIA H200", "--device", "meta", "--format", "json")
        result = run("profile", "net.py:make", *options)
        ops = Profile.from_json(result.out).op_totals()
        machine = MACHINES["NVIDIA H200"]
        assert machine.bytes_per_s is not None
        best = sum(  # so small a model waits for memory throughout
            op.cost.bytes_total / machine.bytes_per_s for op in ops if op.cost is not None
        )
        last = result.err.splitlines()[-1]
        assert last == (
            f"NVIDIA H200: MFU n/a, HFU n/a; at best {seconds_text(best)}, bound by memory; "
            "measured n/a (not measured)"
        )

    def test_a_machine_that_is_measured(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert result.err.splitlines()[-1] == (
            f"bench: MFU {mfu}, HFU {mfu}; at best {seconds_text(least_s)}, bound by compute; "
            f"measured {seconds_text(profile.root.latency_s)} (forward)"
        )
        result = run("profile", "net.py:make", "--machine", "NVIDIA H2000")
        refused(result, "'NVIDIA H2000' is none of measure, ", "NVIDIA H200")
        assert len(result.err.splitlines()) == 1

    def test_view_options(self, run: Run) -> None:
        def lines(*options: str) -> str:
            return run("profile", "net.py:make", *options).out

        assert "(0-1): 2 x Linear(" in lines("--fold")
        assert "(0): Linear(" in lines("--no-fold")
        assert "(0): Linear(" not in lines("--depth", "1")
        assert "(head): Linear(" in lines("--depth", "1")
        assert "(head): Linear(" not in lines("--no-detailed")
        assert "Top 3 modules" in lines("--top", "3")
        table = lines("--format", "table", "--depth", "1")
        assert "Net.head" in table
        assert "Net.layers.0" not in table

    def test_running_options(self, saved: Save) -> None:
        once = saved("p.json", "net.py:make", "--warm-up", "0")
        assert (once.timing.repeats, once.total("backward").macs) == (1, 0)
        many = saved("p.json", "net.py:make", "--repeats", "3", "--mode", "twice")
        assert (many.timing.repeats, many.total().macs) == (3, 2 * macs())
        timed = saved("p.json", "net.py:make", "--operator-latency")
        assert all(op.latency_s is not None for op in timed.op_totals())
        assert all(op.latency_s is None for op in once.op_totals())
        both = saved("p.json", "net.py:make", "--backward", "--causal", "half")
        first_layer_needs_no_gradient_of_its_input = B * W * W
        assert (
            both.total("backward").macs == 2 * macs() - first_layer_needs_no_gradient_of_its_input
        )
        assert both.run.causal == "half"

    def test_shapes_dtypes_and_sizes(self, saved: Save) -> None:
        arguments = ["net.py:Net", "--input-shape", "batch,width", "--input-shape", "mask=1:int64"]
        sizes = ["--set", "batch=11", "width=13", "--dtype", "bfloat16"]
        profile = saved("p.json", *arguments, *sizes)
        assert profile.total().macs == macs(13, 11)
        assert {op.dtype for op in profile.op_totals() if op.op == "aten.addmm.default"} == {
            "bfloat16"
        }

    def test_meta(self, saved: Save) -> None:
        width = 10**6
        profile = saved("p.json", "net.py:make", "--device", "meta", "--set", f"width={width}")
        assert profile.total().macs == macs(width)
        assert profile.root.latency_s is None
        assert profile.run.device == "meta"

    def test_compile(self, saved: Save, monkeypatch: pytest.MonkeyPatch) -> None:
        compiled: list[Any] = []
        monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
        saved("p.json", "net.py:make")
        assert compiled == []
        saved("p.json", "net.py:make", "--compile")
        assert [type(model).__name__ for model in compiled] == ["Net"]

    @pytest.mark.parametrize(
        "arguments,words",
        [
            (
                (),
                "the following arguments are required: TARGET (see dispatch-flops profile --help)",
            ),
            (("net.py",), "names no factory"),
            (("missing.py:x",), "there is no file 'missing.py'"),
            (("net.py:broken",), "raised: ValueError: a wrong (--debug shows where)"),
            (("net.py:Net",), "run without inputs: give --input-shape or --inputs"),
            (("net.py:Net", "--input-shape", "2,6"), "raised RuntimeError: mat1 and mat2 shapes"),
            (("net.py:Net", "--input-shape", "2,a"), "--set a=4"),
            (("net.py:Net", "--input-shape", "2;3"), "input shape '2;3'"),
            (("net.py:make", "--set", "batch"), "write NAME=VALUE"),
            (("net.py:make", "--set", "depth=3"), "--set depth"),
            (("net.py:make", "--mode", "thrice"), "thrice"),
            (("net.py:make", "--dtype", "float33"), "dtype 'float33' is unknown"),
            (("net.py:make", "--device", "gpu"), "device 'gpu' cannot be used"),
            (("net.py:make", "--causal", "no"), "argument --causal: invalid choice"),
            (("net.py:make", "--repeats", "0"), "no whole number of at least 1"),
            (("net.py:make", "--dep", "1"), "unrecognized arguments"),
            (("net.py:make", "--output", "net.py/x"), "cannot write 'net.py/x'"),
            (("net.py:make", "--output", " "), "--output is empty"),
            (("net.py:make", "--set", "a=1", "a=2"), "--set a: given twice, as 1 and as 2"),
        ],
    )
    def test_mistakes(self, run: Run, arguments: tuple[str, ...], words: str) -> None:
        refused(run("profile", *arguments), words)

    @pytest.mark.parametrize(
        "code",
        [
            "import sys\ndef make(): ...\nsys.exit(0)\n",
            "import sys\ndef make(): sys.exit(0)\n",
            "import sys\nfrom torch import nn\nclass make(nn.Module):\n"
            "    def forward(self): sys.exit(0)\n",
        ],
        ids=["on import", "in the factory", "in forward"],
    )
    def test_a_program_that_ends_the_process_is_no_success(self, run: Run, code: str) -> None:
        Path("ends.py").write_text(code)
        refused(run("profile", "ends.py:make"), "SystemExit: 0")

    def test_the_page_knows_the_machine(self, run: Run) -> None:
        arguments = ("--machine", "NVIDIA H200", "--device", "meta", "--output", "page.html")
        assert run("profile", "net.py:make", *arguments).code == 0
        assert MACHINES["NVIDIA H200"].source in Path("page.html").read_text(encoding="utf-8")

    def test_token_ids_given_as_numbers(self, run: Run) -> None:
        Path("ids.py").write_text("from torch import nn\ndef make(): return nn.Embedding(11, 3)\n")
        refused(run("profile", "ids.py:make", "--input-shape", "2,5"), "1,128:int64")
        assert run("profile", "ids.py:make", "--input-shape", "2,5:int64").code == 0

    def test_debug_shows_where(self, run: Run) -> None:
        result = run("profile", "net.py:broken", "--debug")
        assert result.code == 2
        assert 'raise ValueError("a wrong' in result.err
        assert "--debug" not in result.err.splitlines()[-1]

    def test_nothing_is_left_behind(self, run: Run) -> None:
        before = (list(sys.path), warnings.filters.copy(), sys.stdout)
        run("profile", "net.py:make")
        run("profile", "net.py:broken")
        assert (sys.path, warnings.filters, sys.stdout) == before


class TestUncounted:
    @pytest.fixture(autouse=True)
    def _operator(self) -> Iterator[None]:
        with torch.library._scoped_library("cli_test", "DEF") as library:
            library.define("odd(Tensor x) -> Tensor")
            library.impl("odd", lambda x: x.clone(), "CompositeExplicitAutograd")
            yield

    def test_it_is_in_the_printout_and_no_warning(self, run: Run) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            result = run("profile", "net.py:odd")
        assert result.code == 0
        assert "cli_test.odd.default" in result.out
        assert f">= {B * W}" in result.out
        assert "Warning" not in result.err

    def test_a_lower_bound_keeps_no_limit(self, run: Run, saved: Save) -> None:
        saved("p.json", "net.py:odd")
        limit = ("check", "p.json", "--max-flops", "1G")
        result = run(*limit)
        assert result.code == 1
        assert "no cost is known for cli_test.odd.default" in result.out
        assert run(*limit, "--allow-uncounted").code == 0
        assert run(*limit, "--phase", "backward").code == 0
        assert run("check", "p.json", "--max-params", "1").code == 0

    def test_the_registry_lists_the_users_formula(self, run: Run) -> None:
        @register_flops(torch.ops.cli_test.odd)
        def odd(x: torch.Tensor, *, out: Any, **_: Any) -> OpCost:
            """Something odd.

            MACs: none.
            FLOPs: 3 per
                element. Source: thin air.
            """
            return OpCost()

        try:
            result = run("ops", "--filter", "cli_test.*", "--format", "csv")
        finally:
            unregister_flops(torch.ops.cli_test.odd)
        rows = list(csv.reader(io.StringIO(result.out)))
        assert rows[1:] == [
            ["cli_test.odd", "formula", "MACs: none. FLOPs: 3 per element.", "thin air"]
        ]


class TestDemo:
    def test_shapes_alone(self, run: Run) -> None:
        result = run("demo", "--device", "meta")
        assert result.code == 0
        assert "44.7 GMACs = 100% MACs" in result.out
        assert "109.48 M = 100% Params" in result.out
        assert "(0-11): 12 x BertLayer(" in result.out
        assert "no known cost" not in result.out

    def test_unfolded(self, run: Run) -> None:
        out = run("demo", "--device", "meta", "--no-fold").out
        assert "(11): BertLayer(" in out
