"""The examples in the docstrings of the public names run."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import dispatch_flops
from dispatch_flops import FlopCounterMode, analysis, profile_model, renderers

# Examples of what is not here: a library of the user's own, a transformer, a GPU, a compiler.
ELSEWHERE = """
    attention_cost counting_backend matmul_cost measure_machine mfu register_flops
    register_workspace unregister_flops
""".split()


def examples(doc: str | None) -> Iterator[str]:
    """Yield the indented blocks of a docstring that are Python."""
    block: list[str] = []
    for line in [*inspect.cleandoc(doc or "").splitlines(), "end"]:
        if line.startswith("    ") or (block and not line):
            block.append(line)
            continue
        code = textwrap.dedent("\n".join(block)).strip()
        block = []
        try:
            is_code = "(" in code and bool(ast.parse(code).body)
        except SyntaxError:  # the description of a parameter
            is_code = False
        if is_code:
            yield code


def namespace() -> dict[str, Any]:
    """Return what the examples take as given: a model, its input, and profiles."""
    model, x = nn.Linear(3, 5), torch.ones(2, 3)
    before = profile_model(model, args=[x])
    return {
        **{name: getattr(dispatch_flops, name) for name in dispatch_flops.__all__},
        **{name: getattr(analysis, name) for name in analysis.__all__},
        **{name: getattr(renderers, name) for name in renderers.__all__},
        "torch": torch,
        "nn": nn,
        "model": model,
        "x": x,
        "profile": before,
        "before": before,
        "after": profile_model(model, args=[torch.ones(4, 3)]),
        "counter": FlopCounterMode(model, display=False),
    }


def public() -> Iterator[tuple[str, Any]]:
    for room in (dispatch_flops, analysis):
        for name in room.__all__:
            found = getattr(room, name)
            if callable(found) and not isinstance(found, ModuleType) and name not in ELSEWHERE:
                yield name, found


CASES = {name: list(examples(found.__doc__)) for name, found in public()}


@pytest.mark.parametrize("name", [name for name, found in CASES.items() if found])
@pytest.mark.filterwarnings("ignore")
def test_example_in_a_docstring_runs(name: str) -> None:
    for code in CASES[name]:
        exec(compile(code, f"<example of {name}>", "exec"), namespace())


@pytest.mark.parametrize("name", ["FlopCounterMode", "Profile", "ModuleNode", "OpCost", "diff"])
def test_central_name_has_an_example(name: str) -> None:
    assert CASES[name]
