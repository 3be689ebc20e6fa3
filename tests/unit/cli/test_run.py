"""Measuring a target: its options, its output, and errors of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dispatch_flops import Profile
from tests.helpers.command_line import B, Run, Save, W, error_line, macs, params
from tests.helpers.profiling import TORCH

DEBUG = "(--debug shows the traceback)"
ATTENTION = """
import torch


class Net(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)
"""


class TestMeasure:
    def test_counts_are_those_of_the_target(self, saved: Save) -> None:
        profile = saved("p.json", "net.py:make")
        assert profile.total().macs == macs()
        assert profile.total_params == params()
        assert profile.node("layers.1").total().macs == B * W * W
        assert profile.root.latency_s is not None

    def test_user_code_prints_to_stderr(self, run: Run) -> None:
        result = run("profile", "net.py:make", "--format", "json")
        assert Profile.from_json(result.out).total().macs == macs()
        assert "what the factory prints" in result.err
        assert "what the model prints" in result.err

    def test_options_of_the_run_apply(self, saved: Save) -> None:
        once = saved("p.json", "net.py:make", "--warm-up", "0")
        assert (once.timing.repeats, once.total("backward").macs) == (1, 0)
        many = saved("p.json", "net.py:make", "--repeats", "3", "--mode", "twice")
        assert (many.timing.repeats, many.total().macs) == (3, 2 * macs())
        timed = saved("p.json", "net.py:make", "--operator-latency")
        assert all(op.latency_s is not None for op in timed.op_totals())
        assert all(op.latency_s is None for op in once.op_totals())
        both = saved("p.json", "net.py:make", "--backward", "--causal", "half")
        input_gradient_of_the_first_layer = B * W * W  # not needed, so not computed
        assert both.total("backward").macs == 2 * macs() - input_gradient_of_the_first_layer
        assert both.run.causal == "half"

    def test_target_device_chooses_the_kernel_of_attention(self, saved: Save) -> None:
        Path("attention.py").write_text(ATTENTION)
        shape = ["--input-shape", "2,3,5,8", "--device", "meta"]
        for target, kernel in (("cpu", "flash_attention_for_cpu"), ("cuda", "efficient_attention")):
            profile = saved("p.json", "attention.py:Net", *shape, "--target-device", target)
            assert f"aten._scaled_dot_product_{kernel}.default" in profile.by_operator()
            assert profile.total().macs == 2 * 3 * 5 * 5 * 2 * 8
            assert profile.run.target == target

    @pytest.mark.parametrize("target", ["cpu", "cuda"])
    def test_target_of_a_run_with_data_is_refused(self, run: Run, target: str) -> None:
        result = run("profile", "net.py:make", "--target-device", target)
        assert error_line(result).startswith("--target-device is for --device meta; on cpu, ")

    def test_flops_of_contractions_are_two_per_mac(self, saved: Save) -> None:
        contractions = saved("p.json", "net.py:make", "--backward", "--flops", "contractions")
        assert contractions.total().flops == 2 * contractions.total().macs > 0
        assert contractions.run.flops == "contractions"
        everything = saved("p.json", "net.py:make", "--backward")
        assert everything.total().macs == contractions.total().macs
        assert everything.total().flops > contractions.total().flops

    def test_shapes_dtype_and_sizes_apply(self, saved: Save) -> None:
        arguments = ["net.py:Net", "--input-shape", "batch,width", "--input-shape", "mask=1:int64"]
        sizes = ["--set", "batch=11", "width=13", "--dtype", "bfloat16"]
        profile = saved("p.json", *arguments, *sizes)
        assert profile.total().macs == macs(13, 11)
        assert {op.dtype for op in profile.op_totals() if op.op == "aten.addmm.default"} == {
            "bfloat16"
        }

    def test_meta_device_counts_without_memory_or_latency(self, saved: Save) -> None:
        width = 10**6
        profile = saved("p.json", "net.py:make", "--device", "meta", "--set", f"width={width}")
        assert profile.total().macs == macs(width)
        assert profile.root.latency_s is None
        assert profile.run.device == "meta"

    def test_compile_compiles_the_model(self, saved: Save, monkeypatch: pytest.MonkeyPatch) -> None:
        compiled: list[Any] = []
        monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
        saved("p.json", "net.py:make")
        assert compiled == []
        saved("p.json", "net.py:make", "--compile")
        assert [type(model).__name__ for model in compiled] == ["Net"]


class TestErrors:
    def test_model_without_inputs_asks_for_them(self, run: Run) -> None:
        message = error_line(run("profile", "net.py:Net"))
        assert message.startswith("running net.py:Net raised TypeError: ")
        assert message.endswith(
            f"; the model was called without inputs: add --input-shape or --inputs {DEBUG}"
        )

    def test_wrong_shape_reports_the_models_error(self, run: Run) -> None:
        with pytest.raises(RuntimeError) as raised:
            torch.ones(2, 6) @ torch.ones(5, 5)  # torch 2.15 puts the operator's name before it
        message = str(raised.value).removeprefix("mm: ")
        line = error_line(run("profile", "net.py:Net", "--input-shape", "2,6"))
        assert line.replace("addmm: ", "") == (
            f"running net.py:Net raised RuntimeError: {message} {DEBUG}"
        )

    # Torch 2.11 takes floats for ids on the meta device.
    @pytest.mark.parametrize("device", ["cpu", "meta"] if TORCH >= (2, 12) else ["cpu"])
    def test_token_ids_as_floats_ask_for_an_integer_dtype(self, run: Run, device: str) -> None:
        Path("ids.py").write_text("from torch import nn\ndef make(): return nn.Embedding(11, 3)\n")
        shape = ("ids.py:make", "--input-shape", "2,5")
        message = error_line(run("profile", *shape, "--device", device))
        assert message.endswith(
            f"; token ids need an integer dtype: --input-shape 1,128:int64 {DEBUG}"
        )
        assert run("profile", "ids.py:make", "--input-shape", "2,5:int64").code == 0

    def test_default_inputs_of_a_config_are_named(self, run: Run) -> None:
        pytest.importorskip("transformers")
        Path("wrong.json").write_text(
            '{"model_type": "bert", "hidden_size": 12, "num_attention_heads": 3, '
            '"intermediate_size": 20, "num_hidden_layers": 1, "vocab_size": 1, '
            '"max_position_embeddings": 4}'
        )
        message = error_line(run("profile", "hf:wrong.json", "--set", "seq=8"))
        assert message.endswith(
            "; the model was called with default inputs (input_ids): add --input-shape or --inputs "
            f"{DEBUG}"
        )

    def test_unknown_mode_is_named(self, run: Run) -> None:
        assert "'thrice'" in error_line(run("profile", "net.py:make", "--mode", "thrice"))

    @pytest.mark.parametrize(
        "code,action",
        [
            ("import sys\ndef make(): ...\nsys.exit(0)\n", "importing ends.py"),
            ("import sys\ndef make(): sys.exit(0)\n", "ends.py:make"),
            (
                "import sys\nfrom torch import nn\nclass make(nn.Module):\n"
                "    def forward(self): sys.exit(0)\n",
                "running ends.py:make",
            ),
        ],
        ids=["on import", "in the factory", "in forward"],
    )
    def test_program_that_ends_the_process_is_an_error(
        self, run: Run, code: str, action: str
    ) -> None:
        Path("ends.py").write_text(code)
        assert error_line(run("profile", "ends.py:make")) == (
            f"{action} raised SystemExit: 0; code that ends the process belongs under "
            f"if __name__ == '__main__' {DEBUG}"
        )


def test_saved_profile_has_the_command_the_inputs_and_the_mode(saved: Save) -> None:
    run = saved("one.json", "net.py:Net", "--input-shape", f"{B},{W}").run
    command = f"dispatch-flops profile net.py:Net --input-shape {B},{W} --output one.json"
    assert run.command == command
    assert [(tensor.name, tensor.shape) for tensor in run.inputs or ()] == [("x", (B, W))]
    assert (run.training, run.autocast) == (False, None)
