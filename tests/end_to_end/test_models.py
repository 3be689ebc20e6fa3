"""The test models cost their closed forms, module by module, forward and backward."""

from __future__ import annotations

import pytest
import torch

from dispatch_flops import Profile
from tests.helpers.profiling import profile_of
from tests.models import CASES, Case
from tests.models.special import CheckpointedMLP

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
small = pytest.mark.parametrize(
    "case", [c for c in CASES if c.runs_for_real], ids=lambda case: case.name
)
trained = pytest.mark.parametrize(
    "case", [c for c in CASES if c.gradient_macs is not None], ids=lambda case: case.name
)


def assert_agrees(profile: Profile, case: Case) -> None:
    assert profile.uncounted_ops() == {}
    assert profile.check().total_params == case.params
    assert profile.total("forward").macs == case.macs
    found = {name: cost.macs for name, cost in profile.by_module("forward").items()}
    assert {name: found[name] for name in case.modules} == case.modules


@pytest.mark.slow
@by_name
def test_forward_on_meta_costs_the_closed_form(case: Case) -> None:
    model, inputs = case.build("meta")
    assert_agrees(profile_of(model, *inputs, model=model), case)


@small
def test_forward_with_data_costs_the_closed_form(case: Case) -> None:
    model, inputs = case.build()
    assert_agrees(profile_of(model, *inputs, model=model), case)
    with torch.inference_mode():
        assert_agrees(profile_of(model, *inputs, model=model), case)


@pytest.mark.slow
@trained
def test_backward_costs_the_closed_form(case: Case) -> None:
    model, inputs = case.build("cpu" if case.runs_for_real else "meta")
    profile = profile_of(lambda: model(*inputs).sum().backward(), model=model)
    assert profile.total("forward").macs == case.macs
    assert profile.total("backward").macs == case.gradient_macs
    assert profile.total("recompute").macs == case.recomputed_macs
    assert profile.root.model_total().macs == case.macs + (case.gradient_macs or 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_are_counted_as_recomputation(reentrant: bool) -> None:
    rows, width, inner, blocks = 6, 8, 20, 3
    model = CheckpointedMLP(width, inner, blocks, reentrant=reentrant)
    x = torch.ones(rows, width, requires_grad=True)
    profile = profile_of(lambda: model(x).sum().backward(), model=model)
    forward = model.macs(rows, width, inner, blocks)
    assert profile.total("forward").macs == forward
    assert profile.total("backward").macs == 2 * forward
    recomputed = model.recomputed_macs(rows, width, inner, blocks)
    assert profile.total("recompute").macs == recomputed
    assert profile.node("blocks.1").total("recompute").macs == recomputed // blocks
    assert profile.model_total().macs == 3 * forward


def test_checkpointed_model_costs_four_forwards() -> None:
    """Forward, recomputed forward and backward twice that: four times."""
    model = CheckpointedMLP(256, 1024, 4, reentrant=True)
    x = torch.ones(64, 256, requires_grad=True)
    profile = profile_of(lambda: model(x).sum().backward(), model=model)
    assert profile.total().macs == 4 * (4 * 64 * 2 * 256 * 1024)


# Published totals.
QUOTED = {
    "LeNet5": 426_516_480,
    "AlexNet": 2_856_753_920,
    "ResNet-18": 1_814_073_344,
    "ResNet-50": 4_089_184_256,
    "MobileNetV2": 300_774_272,
    "ViT-B/16": 17_563_828_224,
    "GPT-2": 16_114_089_984,
    "BERT-base": 44_696_862_720,
    "Llama with grouped queries": 3_581_935_616,
    "LSTM": 1_207_959_552,
}


@pytest.mark.parametrize("name", QUOTED)
def test_closed_form_equals_the_published_total(name: str) -> None:
    (case,) = [case for case in CASES if case.name == name]
    assert case.macs == QUOTED[name]


def test_closed_form_of_resnet18_training_equals_the_published_total() -> None:
    (case,) = [case for case in CASES if case.name == "ResNet-18"]
    assert case.macs + (case.gradient_macs or 0) == 5_324_206_080
