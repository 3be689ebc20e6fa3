"""The examples in the docstrings of the public names run, and print what they say."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode, counting_backend, profile_model, unregister_flops
from dispatch_flops.errors import UnknownOperatorError
from dispatch_flops.integrations.testing import assert_flops
from dispatch_flops.operators import workspaces
from tests.helpers.clusters import four_ranks, of_rank
from tests.helpers.public_names import public_objects, rooms_of_names

# What cannot run here, and why.
ELSEWHERE = {
    "integrations.deepspeed.attach": "needs a DeepSpeed engine",
    "integrations.lightning.FlopsCallback": "needs Lightning, which is not installed",
    "renderers.scalars.log_tensorboard": "needs tensorboard, which is not installed",
    "renderers.scalars.scalars": "logs to Weights & Biases",
}
PUBLIC = public_objects()
SLOW = {
    "FlopMeter",
    "analysis.machine_of",
    "compile.CountingBackend",
    "counting_backend",
    "distributed.simulate",
    "integrations.transformers.FlopsCallback",
    "integrations.transformers.GenerateProfile",
    "integrations.transformers.plan_generate",
    "integrations.transformers.profile_generate",
    "measure_machine",
    "plan",
    "renderers.plan_page.render",
    "renderers.plan_table.render",
    "renderers.plots.roofline",
    "renderers.plots.scaling",
    "renderers.plots.top_modules",
}
NEED = {"dataframe": "pandas", "plots": "matplotlib", "transformers": "transformers"}


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


CASES = {name: list(examples(found.__doc__)) for name, found in PUBLIC.items()}


def said(code: str) -> list[str]:
    """Return what the comments ``# prints ...`` of an example say."""
    return re.findall(r"  # prints (.*)$", code, flags=re.MULTILINE)


@pytest.fixture
def library() -> Iterator[None]:
    """Define the operators of libraries of the user's own, and forget what is registered."""
    lib = torch.library.Library("mylib", "FRAGMENT")
    lib.define("fused_mlp(Tensor x, Tensor w1, Tensor w2) -> Tensor")
    lib.define("attention(Tensor q, Tensor k, Tensor v, bool causal) -> Tensor")
    lib.define("linear_4bit(Tensor x, Tensor packed) -> Tensor")
    lib.define("scale_rows(Tensor x, Tensor scale) -> Tensor")
    with_workspace = dict(workspaces._WORKSPACES)
    yield
    for name in ("fused_mlp", "attention", "linear_4bit"):
        with contextlib.suppress(UnknownOperatorError):
            unregister_flops(getattr(torch.ops.mylib, name))
    workspaces._WORKSPACES.clear()
    workspaces._WORKSPACES.update(with_workspace)
    lib._destroy()


def given() -> dict[str, Any]:
    """Return what the examples take as given: a model, its input, profiles, a cluster."""
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.ones(2, 3)
    before = profile_model(model, args=[x], backward=True)
    return {
        **rooms_of_names(),
        "Path": Path,
        "torch": torch,
        "nn": nn,
        "model": model,
        "x": x,
        "assert_flops": assert_flops,
        "profile": before,
        "before": before,
        "after": profile_model(model, args=[torch.ones(4, 3)], backward=True),
        "counter": FlopCounterMode(model, display=False),
        "cluster": four_ranks(),
        "texts": [of_rank(rank).to_json() for rank in range(4)],
    }


def language_model() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    from dispatch_flops.integrations.transformers import profile_generate

    config = GPT2Config(n_embd=12, n_layer=1, n_head=2, vocab_size=17, n_positions=80)
    config.eos_token_id = None
    return {
        "model": GPT2LMHeadModel(config),
        "input_ids": torch.ones(1, 3, dtype=torch.long),
        "profile_generate": profile_generate,
    }


def trainer() -> dict[str, Any]:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir="run", max_steps=7, report_to=[], use_cpu=True, disable_tqdm=True
    )
    ids = torch.ones(5, dtype=torch.long)
    rows = [{"input_ids": ids, "labels": ids}] * 8
    return language_model() | {"Trainer": Trainer, "args": args, "data": rows}


def backend() -> dict[str, Any]:
    return {"backend": counting_backend("aot_eager")}


ALSO_GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "compile.Step": backend,
    "integrations.transformers.GenerateProfile": language_model,
    "integrations.transformers.FlopsCallback": trainer,
    "integrations.transformers.plan_generate": language_model,
    "integrations.transformers.profile_generate": language_model,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in CASES
        if name not in ELSEWHERE
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_example_in_a_docstring_runs(
    name: str,
    library: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for room in set(name.split(".")) & set(NEED):
        pytest.importorskip(NEED[room])
    monkeypatch.chdir(tmp_path)
    for code in CASES[name]:
        names = given() | ALSO_GIVEN.get(name, dict)()
        # Compiled without inductor, which takes a minute.
        code = code.replace('"inductor"', '"aot_eager"')
        capsys.readouterr()
        exec(compile(code, f"<example of {name}>", "exec", dont_inherit=True), names)
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in said(code) if line not in printed] == []


@pytest.mark.parametrize("name", CASES)
def test_public_object_has_an_example(name: str) -> None:
    assert CASES[name]


def test_exceptions_are_public_names() -> None:
    assert set(ELSEWHERE) - set(CASES) <= {"integrations.lightning.FlopsCallback"}


def test_no_two_examples_are_the_same() -> None:
    texts = [code for found in CASES.values() for code in found]
    assert len(texts) == len(set(texts))
