"""The recorded facts of a run, in every format that has room for them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dispatch_flops.profile import Profile, RunInfo, TensorInput
from dispatch_flops.renderers import View, chrome_trace, deepspeed, notebook, table
from dispatch_flops.renderers.html.payload import payload
from dispatch_flops.renderers.run_facts import inputs_text, run_facts
from tests.helpers.trees import lenet5

X = TensorInput(name="x", shape=(3, 7), dtype="float32", device="cuda:1")
RUN = RunInfo(
    torch_version="2.13.0",
    inputs=(X, TensorInput(name="cache.0", shape=None, dtype="int64", device="cpu")),
    training=False,
    grad_mode="no_grad",
    autocast="bfloat16",
    python_version="3.12.3",
    dispatch_flops_version="0.1.0",
    platform="Linux-6.1",
    command="dispatch-flops profile net.py:Net",
    date="2026-01-02T03:04:05+00:00",
)
FACTS = {
    "Inputs": "x float32 [3, 7] on cuda:1; cache.0 int64 nested on cpu",
    "Mode": "evaluation, no_grad, autocast bfloat16",
    "Versions": "dispatch_flops 0.1.0, torch 2.13.0, Python 3.12.3",
    "Platform": "Linux-6.1",
    "Command": "dispatch-flops profile net.py:Net",
    "Date": "2026-01-02T03:04:05+00:00",
}


@pytest.fixture
def profile() -> Profile:
    return dataclasses.replace(lenet5(), run=RUN)


def test_run_facts_are_one_line_each() -> None:
    assert dict(run_facts(RUN)) == FACTS
    assert not dict(run_facts(RunInfo(torch_version="2.13.0")))
    odd = dataclasses.replace(
        RUN, command="a\nb\x1b[1m", inputs=(dataclasses.replace(X, name="\n"),)
    )
    assert all(text.isprintable() for _, text in run_facts(odd))


def test_every_mode_has_its_text() -> None:
    run = dataclasses.replace(RUN, training=True, grad_mode="grad", autocast=None)
    assert dict(run_facts(run))["Mode"] == "training, gradients on, autocast off"
    run = dataclasses.replace(RUN, grad_mode="inference")
    assert dict(run_facts(run))["Mode"] == "evaluation, inference_mode, autocast bfloat16"


def test_many_inputs_are_cut_and_their_number_given() -> None:
    text = inputs_text(dataclasses.replace(RUN, inputs=(X,) * 11))
    assert text.count("x float32 [3, 7] on cuda:1") == 8
    assert text.endswith("; and 3 more")
    assert inputs_text(dataclasses.replace(RUN, inputs=())) == "no tensors"
    symbolic = dataclasses.replace(X, shape=(-1, 7))
    assert "[?, 7]" in inputs_text(dataclasses.replace(RUN, inputs=(symbolic,)))


def test_texts_state_the_facts(profile: Profile) -> None:
    for text in (
        deepspeed.render(profile),
        table.render(profile),
    ):
        for label, fact in FACTS.items():
            assert f"\n{label}: {fact}" in text
        assert text.count("torch 2.13.0") == 1
    markdown = table.render(profile, View(style="markdown"))
    for label, fact in FACTS.items():
        assert f"\n- {label}: `{fact}`" in markdown


def test_operator_table_has_no_facts_of_the_run(profile: Profile) -> None:
    assert "Inputs" not in table.render(profile, View(table="operators"))


def test_pages_and_trace_state_the_facts(profile: Profile) -> None:
    page = notebook.render(profile)
    for label, fact in FACTS.items():
        assert f"{label}: {fact}" in page
    facts = dict(payload(profile, None, "LeNet5")["facts"])
    assert FACTS.items() <= facts.items()
    assert "torch" not in facts
    assert json.loads(chrome_trace.render(profile))["otherData"] == FACTS


def test_names_of_inputs_are_not_markup_in_a_notebook(profile: Profile) -> None:
    odd = (dataclasses.replace(X, name="<b>"),)
    page = notebook.render(dataclasses.replace(profile, run=dataclasses.replace(RUN, inputs=odd)))
    assert "&lt;b&gt; float32" in page


def test_target_of_attention_without_data_is_shown_where_it_is_not_the_cpu() -> None:
    profile = dataclasses.replace(lenet5(), run=RunInfo(target="cuda"))
    assert "the kernel that cuda would choose" in deepspeed.render(profile, View())
    assert "would choose" not in deepspeed.render(lenet5(), View())
