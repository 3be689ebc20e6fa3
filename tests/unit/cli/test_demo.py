"""The demo model: its closed form, and the numbers of the published model by module."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispatch_flops import Profile, profile_model
from dispatch_flops.cli.demo import bert_base

D, FF, LAYERS = 768, 3072, 12


def _on_meta(batch: int, seq: int, layers: int = LAYERS) -> Profile:
    with torch.device("meta"):
        model, ids = bert_base(batch, seq, layers)
    return profile_model(model, args=(ids,), device="meta")


def _macs(batch: int, seq: int, layers: int = LAYERS) -> int:
    per_layer = 4 * D * D * seq + 2 * seq * seq * D + 2 * D * FF * seq
    return batch * (layers * per_layer + D * D)


def test_bert_base_at_its_default_size_matches_the_closed_form() -> None:
    assert bert_base.__defaults__ == (4, 128, LAYERS)
    profile = _on_meta(4, 128)
    assert profile.root.total("forward").macs == _macs(4, 128) == 44_696_862_720
    assert profile.total_params == 109_482_240
    assert profile.uncounted_ops() == {}


def test_bert_base_at_another_size_matches_the_closed_form() -> None:
    assert _on_meta(3, 7, 2).root.total("forward").macs == _macs(3, 7, 2)


@pytest.fixture(scope="module")
def published() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BertModel(transformers.BertConfig(num_hidden_layers=1)).eval()


def test_modules_have_the_numbers_of_the_published_model(published: Any) -> None:
    ours = _on_meta(2, 5, 1)
    theirs = profile_model(
        published, kwargs={"input_ids": torch.ones(2, 5, dtype=torch.long)}, device="meta"
    )
    expected = {n.fqn: (n.total("forward").macs, n.total_params) for n in theirs.root.walk()}
    found = {n.fqn: (n.total("forward").macs, n.total_params) for n in ours.root.walk()}
    named_differently = {"pooler.activation", "encoder.layer.0.intermediate.intermediate_act_fn"}
    assert {fqn for fqn in found if fqn not in expected} <= named_differently
    assert {fqn: numbers for fqn, numbers in found.items() if fqn in expected} == {
        fqn: expected[fqn] for fqn in found if fqn in expected
    }
    assert "encoder.layer.0.attention.self.query" in found


def test_outputs_are_those_of_the_published_model(published: Any) -> None:
    model, ids = bert_base(2, 5, 1)
    model.load_state_dict(published.state_dict())
    model.eval()
    with torch.no_grad():
        hidden, pooled = model(ids)
        expected = published(input_ids=ids)
    torch.testing.assert_close(hidden, expected.last_hidden_state)
    torch.testing.assert_close(pooled, expected.pooler_output)
