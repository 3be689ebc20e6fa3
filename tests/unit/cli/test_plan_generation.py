"""``plan --generate``: the sizes it takes, and what cannot be combined with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dispatch_flops.units import bytes_text
from tests.helpers.command_line import Run

CONFIG = {
    "model_type": "gpt2", "n_embd": 12, "n_layer": 2, "n_head": 3, "vocab_size": 17,
    "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MACHINE = {"name": "mine", "flops_per_s": {"float32": 1e9}, "bytes_per_s": 1e6}
PLAN = ("plan", "hf:config.json:AutoModelForCausalLM", "--machine", "mine.json")


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "mine.json").write_text(json.dumps(MACHINE))


def test_plan_generate_prints_sizes_and_sequences_side_by_side(run: Run) -> None:
    result = run(
        *PLAN, "--generate", "--set", "batch=3", "prompt=7", "new=5", "--sequences", "2x1@7+5@0",
        "--no-search", "--dtype", "bf16",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "batch=3, prompt=7, new=5" in result.out and "sequences=2x1@7+5@0" in result.out
    (cache,) = (line for line in result.out.splitlines() if line.startswith("KV cache at the end"))
    batch, packed = 2 * 2 * 12 * 3 * (7 + 5 - 1) * 2, 2 * 2 * 12 * (2 * 8 + 5) * 2
    assert cache.split()[-4:] == f"{bytes_text(batch)} {bytes_text(packed)}".split()
    assert "us for each operator" not in result.out


def test_plan_generate_as_json_has_the_cache_in_bytes(run: Run) -> None:
    result = run(
        *PLAN, "--generate", "--set", "batch=3", "prompt=7", "new=5", "--no-search",
        "--dtype", "bf16", "--output", "plan.json",
    )  # fmt: skip
    assert result.code == 0, result.err
    data = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    assert data["schema"] == "dispatch_flops.generation_plan"
    assert data["machine"]["flops_per_s"] == {"float32": 1e9}
    (choice,) = data["choices"]
    assert choice["sizes"] == {"batch": 3, "prompt": 7, "new": 5}
    assert choice["cache_bytes"] == 2 * 2 * 12 * 3 * (7 + 5 - 1) * 2
    assert choice["fits"] is None and choice["headroom_bytes"] is None
    assert choice["prefill"]["bounds"]["compute_s"] is None  # no peak for bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sequences", "1@7"), "--sequences needs --generate"),
        (("--generate", "--checkpoint"), "--checkpoint is not available with --generate"),
        (("--generate", "--mesh", "dp=2"), "--mesh is not available with --generate"),
        (("--generate", "--optimizer", "sgd"), "--optimizer is not available with --generate"),
        (("--generate", "--input-shape", "3,7"), "--input-shape is not available with --generate"),
        (("--generate", "--set", "batch=2"), "prompt=None: pass a whole number of at least 1"),
        (("--generate", "--sequences", "7"), "'7' is not COUNTxNEW@CONTEXT"),
        (("--generate", "--set", "prompt=3", "new=2", "seq=3", "depth=4"), "--set depth is not"),
    ],
)
def test_plan_generate_with_unsuitable_options_says_why(run: Run, arguments, message: str) -> None:
    result = run(*PLAN, *arguments)
    assert result.code == 2
    assert message in result.err
