"""What the README shows works: its recipes, its worked formulas, and its commands' files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dispatch_flops import FlopCounterMode, unregister_flops
from tests.helpers.paths import REPOSITORY

README = REPOSITORY / "README.md"


def blocks(section: str) -> list[str]:
    """The Python of a section, block by block."""
    text = README.read_text(encoding="utf-8")
    found = re.search(rf"^#+ {section}\n(.*?)(?=^##+ |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert found, section
    return re.findall(r"^```python\n(.*?)^```", found.group(1), flags=re.MULTILINE | re.DOTALL)


def test_every_block_is_python() -> None:
    text = README.read_text(encoding="utf-8")
    for code in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        ast.parse(code)


def test_there_are_ten_recipes() -> None:
    assert len(blocks("Cookbook")) == 10


@pytest.mark.parametrize("number", range(10))
def test_recipe(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks("Cookbook")[number], f"recipe {number + 1}", "exec"), {})
    assert capsys.readouterr().out


@pytest.fixture
def library() -> Iterator[None]:
    """The operators that the README's formulas are for."""
    lib = torch.library.Library("mylib", "FRAGMENT")
    lib.define("fused_mlp(Tensor x, Tensor w1, Tensor w2) -> Tensor")
    lib.define("fused_mlp_backward(Tensor grad, Tensor x, Tensor w1, Tensor w2) -> Tensor")
    lib.impl("fused_mlp", lambda x, w1, w2: x @ w1 @ w2, "CPU")
    lib.impl("fused_mlp_backward", lambda grad, x, w1, w2: torch.empty_like(x), "CPU")
    yield
    lib._destroy()


def test_worked_formulas(library: None) -> None:
    (code,) = blocks("Give an operator a formula")
    gelu = torch.nn.GELU()
    names: dict[str, Any] = {
        "model": gelu,
        "x": torch.ones(2, 3),
        "FlopCounterMode": FlopCounterMode,
    }
    exec(compile(code, "formulas", "exec"), names)
    try:
        x, w1, w2 = torch.ones(2, 3), torch.ones(3, 5), torch.ones(5, 7)
        with FlopCounterMode(display=False) as counter:
            torch.ops.mylib.fused_mlp(x, w1, w2)
            torch.ops.mylib.fused_mlp_backward(torch.ones(2, 7), x, w1, w2)
    finally:
        unregister_flops([torch.ops.mylib.fused_mlp, torch.ops.mylib.fused_mlp_backward])
    found = counter.profile.by_operator()
    macs = 2 * (3 * 5 + 5 * 7)
    forward = found["mylib.fused_mlp.default"].cost
    assert forward is not None
    assert (forward.macs, forward.flops) == (macs, 2 * macs)
    backward = found["mylib.fused_mlp_backward.default"].cost
    assert backward is not None and backward.flops == 2 * 2 * macs


def test_the_two_commands_name_files_that_are_there() -> None:
    text = README.read_text(encoding="utf-8")
    commands = re.findall(r"^```sh\npython3 -m venv .*?$", text, flags=re.MULTILINE)
    assert len(commands) == 2
    assert all("tests/constraints.txt" in command for command in commands)
    assert (README.parent / "tests" / "constraints.txt").is_file()
    for image in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (README.parent / image).is_file()
