"""Plans over a mesh of a model of transformers, which states its tensor-parallel plan."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from dispatch_flops import plan
from dispatch_flops.analysis.planned import PlannedStep
from dispatch_flops.errors import TargetError

transformers = pytest.importorskip("transformers")

WIDTH, HIDDEN, LAYERS, HEADS, GROUPS, HEAD, VOCABULARY = 48, 87, 2, 6, 3, 8, 110
BATCH, SEQUENCE, BF16 = 3, 7, 2
ROWS = BATCH * SEQUENCE


def build(**changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    settings = {
        "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": VOCABULARY,
        "head_dim": HEAD, "use_cache": False,
    }  # fmt: skip
    config = transformers.LlamaConfig(**settings | changes)
    ids = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


@functools.cache
def planned_on(**mesh: int) -> PlannedStep:
    return planned(mesh)


def planned(mesh: dict[str, int] | None, **changes: Any) -> PlannedStep:
    arguments = {"dtype": torch.bfloat16, "optimizer": "sgd", "causal": "half"}
    (step,) = plan(
        lambda: build(**changes), "H100", mesh=mesh, search_batch=False, **arguments
    ).steps
    return step


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 3}, {"tp": 3}, {"dp": 2, "tp": 3}])
def test_rank_has_the_products_of_its_heads_and_columns(mesh: dict[str, int]) -> None:
    step, tp = planned_on(**mesh), mesh.get("tp", 1)
    matrices = WIDTH * HEAD * (2 * HEADS + 2 * GROUPS) // tp + 3 * WIDTH * HIDDEN // tp
    pairs = SEQUENCE * (SEQUENCE + 1) // 2  # of a kernel that skips the masked half
    attention = 2 * BATCH * HEADS // tp * pairs * HEAD
    head = ROWS * WIDTH * -(-VOCABULARY // tp)
    forward = LAYERS * (ROWS * matrices + attention) + head
    assert step.cluster is not None
    first = step.cluster.ranks[0].profile
    assert first.total("forward").macs == forward
    assert first.total("backward").macs == 2 * forward
    weights = WIDTH * HEAD * (2 * HEADS + 2 * GROUPS) + 3 * WIDTH * HIDDEN + 2 * WIDTH
    assert step.cluster.parameters == LAYERS * weights + WIDTH + 2 * VOCABULARY * WIDTH
    times = mesh.get("dp", 1)
    assert (step.samples, step.tokens) == (times * BATCH, times * ROWS)


@pytest.mark.slow
def test_mesh_of_one_rank_has_the_work_of_a_device() -> None:
    one, mesh = planned(None), planned({"dp": 1})
    for phase in ("forward", "backward", "recompute"):
        assert mesh.profile.total(phase).macs == one.profile.total(phase).macs
        assert mesh.profile.total(phase).flops == one.profile.total(phase).flops


@pytest.mark.slow
def test_experts_in_float32_have_the_products_of_their_tokens() -> None:
    """torch's grouped product refuses float32 where tensors have no data, and runs it elsewhere."""
    hidden, chosen = 16, 2
    config = transformers.Qwen3MoeConfig(
        hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS, head_dim=HEAD,
        num_key_value_heads=GROUPS, vocab_size=VOCABULARY, moe_intermediate_size=hidden,
        num_experts=4, num_experts_per_tok=chosen, use_cache=False,
    )  # fmt: skip

    def build() -> tuple[Any, dict[str, torch.Tensor]]:
        ids = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
        return transformers.AutoModelForCausalLM.from_config(config), {"input_ids": ids}

    (step,) = plan(build, "H100", mesh={"dp": 2}, search_batch=False).steps
    experts = step.profile.by_module("forward")["model.layers.0.mlp.experts"]
    assert experts.macs == chosen * ROWS * 3 * WIDTH * hidden


@pytest.mark.slow
def test_sums_over_tp_have_the_closed_form() -> None:
    step = planned_on(tp=3)
    assert step.cluster is not None
    (tp,) = step.cluster.communication
    # The embedding, o and down; the gradients of the inputs of q, k, v, gate, up and the head.
    sums, hidden = 1 + 7 * LAYERS + 1, BF16 * ROWS * WIDTH
    logits = BF16 * ROWS * 3 * 37  # 110 columns on 3 ranks: gathered as 37 each
    assert (tp.cost.calls, tp.cost.payload_bytes) == (sums + 1, sums * hidden + logits)


@pytest.mark.slow
def test_norms_of_heads_add_the_gradients_of_their_weights() -> None:
    def qwen() -> Any:
        config = transformers.Qwen3Config(
            hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, head_dim=HEAD,
            num_attention_heads=HEADS, num_key_value_heads=GROUPS, vocab_size=VOCABULARY,
            use_cache=False,
        )  # fmt: skip
        ids = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
        return transformers.Qwen3ForCausalLM(config), {"input_ids": ids, "labels": ids}

    (step,) = plan(
        qwen, "H100", mesh={"tp": 3}, search_batch=False, dtype=torch.bfloat16, optimizer="sgd"
    ).steps
    assert step.cluster is not None
    (tp,) = step.cluster.communication
    sums, hidden, logits = 1 + 7 * LAYERS + 1, BF16 * ROWS * WIDTH, BF16 * ROWS * 3 * 37
    norms = 2 * LAYERS  # of queries and of keys
    assert tp.cost.calls == sums + 1 + norms
    assert tp.cost.payload_bytes == sums * hidden + logits + norms * BF16 * HEAD


@pytest.mark.slow
def test_tied_embedding_is_one_parameter() -> None:
    apart, tied = planned_on(tp=3), planned({"tp": 3}, tie_word_embeddings=True)
    assert apart.cluster is not None and tied.cluster is not None
    assert apart.cluster.parameters - tied.cluster.parameters == VOCABULARY * WIDTH


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "tp=3 does not divide num_key_value_heads=2"),
        ({"intermediate_size": 88}, r"does not divide out_features=88 of model\.layers\.0\.mlp"),
    ],
)
def test_sizes_that_cannot_be_divided_are_an_error(changes: dict[str, int], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        planned({"tp": 3}, **changes)
