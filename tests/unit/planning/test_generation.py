"""Plans of generation with a small Llama whose counts and bytes are products of its sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dispatch_flops import Machine
from dispatch_flops.analysis.planned_generation import PlannedGeneration
from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.planning.generation import plan_generate
from dispatch_flops.planning.packed_sequences import NewTokens, parse_sequences
from dispatch_flops.renderers import plan_table

LAYERS, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 2, 6, 3, 8, 56, 101
HIDDEN = HEADS * HEAD
BATCH, PROMPT, NEW, F32 = 5, 37, 11, 4
LINEAR = LAYERS * (2 * HIDDEN * HEADS * HEAD + 2 * HIDDEN * KV_HEADS * HEAD + 3 * HIDDEN * FFN)
NORMS = (2 * LAYERS + 1) * HIDDEN
TABLE = VOCAB * HIDDEN
READ_PARAMS = LINEAR + NORMS + TABLE
SIZES = {"batch": BATCH, "prompt": PROMPT, "new": NEW}
PEAK, BANDWIDTH = 1e9, 1e8
MACHINE = Machine(
    name="test", flops_per_s={"float32": PEAK}, bytes_per_s=BANDWIDTH, memory_bytes=10e6
)


COMMON = {
    "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "intermediate_size": FFN,
    "vocab_size": VOCAB,
}  # fmt: skip
WINDOW, EXPERTS, CHOSEN = 7, 8, 2


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**COMMON))


def mistral() -> nn.Module:
    return MistralForCausalLM(MistralConfig(**COMMON, sliding_window=WINDOW))


def mixtral(implementation: str = "grouped_mm") -> nn.Module:
    config = MixtralConfig(**COMMON, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN)
    model = MixtralForCausalLM(config)
    model.set_experts_implementation(implementation)
    return model


def only(sizes: Any = None, machine: Machine = MACHINE, **options: Any) -> PlannedGeneration:
    options = {"search_batch": False, **options}
    (choice,) = plan_generate(llama, machine, sizes=sizes, **options).choices
    return choice


@pytest.fixture(scope="module")
def planned() -> PlannedGeneration:
    """The plan of ``SIZES`` with its batches, which takes a second."""
    return only(SIZES, search_batch=True, host_s_per_operator=3.0)


def cache_bytes(tokens: int, element: int = F32) -> int:
    """Keys and values of so many tokens, of all sequences together."""
    return 2 * LAYERS * KV_HEADS * HEAD * tokens * element


def read_bytes(tokens: int) -> int:
    """All parameters but one table, the rows that tokens choose of it, and rotary frequencies."""
    return F32 * (READ_PARAMS + min(tokens, VOCAB) * HIDDEN + HEAD // 2)


def macs(new: int, attended: int, logits: int) -> int:
    """Products of new tokens, of query-key pairs, and of the rows that get logits."""
    return new * LINEAR + 2 * LAYERS * HEADS * HEAD * attended + logits * TABLE


@pytest.mark.parametrize(("dtype", "element"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_cache_holds_keys_and_values_of_all_tokens_but_the_last(
    planned: PlannedGeneration, dtype: torch.dtype, element: int
) -> None:
    choice = planned if dtype is torch.float32 else only(SIZES, dtype=dtype)
    assert choice.cache_bytes == cache_bytes(BATCH * (PROMPT + NEW - 1), element)
    assert choice.prefill.cache_bytes == cache_bytes(BATCH * PROMPT, element)
    assert choice.decode.cache_bytes == cache_bytes(BATCH * (PROMPT + NEW // 2), element)


def test_prefill_computes_the_prompt_and_the_logits_of_its_last_token(
    planned: PlannedGeneration,
) -> None:
    prefill = planned.prefill
    assert prefill.profile.total().macs == macs(BATCH * PROMPT, BATCH * PROMPT**2, BATCH)
    assert prefill.tokens == (BATCH, BATCH)
    assert prefill.read_bytes == read_bytes(BATCH * PROMPT)
    assert "KV cache" in prefill.memory_by_role


def test_decode_computes_one_position_after_the_mean_length(planned: PlannedGeneration) -> None:
    choice, cached = planned, PROMPT + (NEW - 2) // 2
    assert choice.decode.profile.total().macs == macs(BATCH, BATCH * (cached + 1), BATCH)
    assert choice.decode.read_bytes == read_bytes(BATCH) + cache_bytes(BATCH * cached)
    assert choice.last.read_bytes == read_bytes(BATCH) + cache_bytes(BATCH * (PROMPT + NEW - 2))
    assert choice.steps == (NEW - 1, NEW - 1)


def test_times_are_of_computing_and_of_reading_parameters_and_cache(
    planned: PlannedGeneration,
) -> None:
    prefill, decode = planned.prefill, planned.decode
    reading = decode.read_bytes / BANDWIDTH
    computing = prefill.profile.total().flops / PEAK
    assert decode.reading_s == decode.fused_s == pytest.approx(reading)
    assert decode.bound == "memory" and decode.bounds.least_s > reading
    assert prefill.fused_s == pytest.approx(computing) and prefill.bound == "compute"
    serial = decode.bounds.least_s + 3 * decode.bounds.operators
    assert decode.tokens_per_s == (pytest.approx(BATCH / serial), pytest.approx(BATCH / reading))
    assert planned.seconds == (
        pytest.approx(computing + (NEW - 1) * reading),
        pytest.approx(prefill.bounds.serial_s + (NEW - 1) * serial),
    )


def test_drafted_tokens_are_further_positions_of_a_step() -> None:
    draft = 3
    choice, cached = only({**SIZES, "draft": draft}), PROMPT + (NEW - 2) // 2
    positions = draft + 1
    assert choice.decode.profile.total().macs == macs(
        BATCH * positions, BATCH * positions * (cached + positions), BATCH * positions
    )
    assert choice.decode.tokens == (BATCH, BATCH * positions)
    assert choice.steps == (3, 10)  # 10 tokens after the first, 4 or 1 at a time
    fastest, slowest = choice.decode.token_s
    assert fastest == pytest.approx(choice.decode.fused_s / positions)
    assert slowest == choice.decode.bounds.serial_s


def test_single_new_token_comes_from_prefill_alone() -> None:
    choice = only({**SIZES, "new": 1})
    assert choice.decode is None and choice.last is None and choice.steps == (0, 0)
    assert choice.cache_bytes == cache_bytes(BATCH * PROMPT)
    assert choice.seconds[0] == choice.prefill.fused_s


def test_sequences_of_a_step_attend_to_their_own_tokens() -> None:
    step = only(None, sequences=["2x1@37+4@13+11@0"]).decode
    new = 2 + 4 + 11
    attended = 2 * 38 + 4 * 17 + 11**2
    assert step.profile.total().macs == macs(new, attended, logits=2 + 4 + 1)
    assert step.cache_bytes == cache_bytes(2 * 38 + 17 + 11)
    assert step.tokens == (4, 2 + 4 + 1)
    assert step.read_bytes >= read_bytes(new) + cache_bytes(2 * 37 + 13)
    assert step.memory_by_role["KV cache"] >= step.cache_bytes


def test_single_step_of_sequences_may_be_passed_by_itself() -> None:
    assert only(None, sequences="1@3").sizes == {"sequences": "1@3"}


def test_step_of_equal_sequences_computes_what_a_batch_does(planned: PlannedGeneration) -> None:
    cached = PROMPT + (NEW - 2) // 2
    packed = only(None, sequences=[f"{BATCH}x1@{cached}"]).decode
    assert packed.profile.total().macs == planned.decode.profile.total().macs
    assert packed.cache_bytes == planned.decode.cache_bytes


def test_sliding_window_limits_what_a_sequence_attends_to() -> None:
    plan = plan_generate(mistral, MACHINE, sequences=["1@37", "2x4@37+3@0+11@0"])
    one, several = (choice.decode for choice in plan.choices)
    assert one.profile.total().macs == macs(1, WINDOW, 1)
    assert one.cache_bytes == cache_bytes(WINDOW)
    reach = 4 + WINDOW - 1
    attended = 2 * 4 * reach + 3**2 + 11**2
    assert several.profile.total().macs == macs(2 * 4 + 3 + 11, attended, 2 * 4 + 1 + 1)
    assert several.cache_bytes == cache_bytes(2 * reach + 3 + 11)


def test_sequences_choose_experts() -> None:
    (choice,) = plan_generate(mixtral, MACHINE, sequences=["2x1@37"]).choices
    assert choice.decode.read_bytes >= mixtral_bytes(2, F32) + cache_bytes(2 * 37)
    chosen = 2 * LAYERS * HIDDEN * (EXPERTS + (CHOSEN - 1) * 3 * FFN)  # one is LINEAR's
    assert choice.decode.profile.total().macs == macs(2, 2 * 38, 2) + chosen


def gptj() -> nn.Module:
    """A model whose attention is not chosen by name."""
    return GPTJForCausalLM(
        GPTJConfig(n_embd=HIDDEN, n_head=HEADS, n_layer=LAYERS, rotary_dim=2, vocab_size=VOCAB)
    )


def bloom() -> nn.Module:
    """A model that asks more of its cache."""
    return BloomForCausalLM(
        BloomConfig(n_layer=LAYERS, hidden_size=HIDDEN, n_head=HEADS, vocab_size=VOCAB)
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (gptj, "GPTJForCausalLM has no attention that transformers chooses by name"),
        (bloom, "BloomForCausalLM cannot run a step of sequences, which raised AttributeError"),
    ],
)
def test_sequences_of_a_model_that_cannot_pack_them_are_refused(build: Any, message: str) -> None:
    with pytest.raises(TargetError, match=f"{message}.*plan batches of equal lengths"):
        plan_generate(build, MACHINE, sequences=["1@3"])


def test_packed_attention_is_undone() -> None:
    model = llama()
    before = model.config._attn_implementation
    plan_generate(lambda: model.to("meta"), MACHINE, sequences=["1@3"])
    assert model.config._attn_implementation == before
    assert "dispatch_flops_packed" not in ALL_ATTENTION_FUNCTIONS


@pytest.mark.slow
def test_compute_bound_batch_is_where_computing_takes_as_long_as_reading() -> None:
    ratio = 20  # FLOPs at the peak in the time of a byte
    machine = Machine(name="slow", flops_per_s={"float32": ratio * 1e8}, bytes_per_s=1e8)
    sizes = {"prompt": 3, "new": 2}
    bound = only(sizes, machine, search_batch=True).compute_bound_batch
    flops = only(sizes, machine).decode.profile.total().flops  # of one sequence
    params, cached = read_bytes(0), cache_bytes(3) + F32 * HIDDEN
    # flops x batch / ratio >= params + cached x batch
    assert bound == -(-ratio * params // (flops - ratio * cached)) > 20
    for batch, word in ((bound - 1, "memory"), (bound, "compute")):
        assert only({**sizes, "batch": batch}, machine).decode.bound == word


def test_decode_whose_cache_takes_longer_than_computing_is_never_bound_by_it() -> None:
    machine = Machine(name="fast", flops_per_s={"float32": 1e12}, bytes_per_s=1e8)
    sizes = {**SIZES, "new": 2}
    assert only(sizes, machine, search_batch=True).compute_bound_batch == 0


def mixtral_bytes(tokens: int, element: int) -> int:
    """As above: each token chooses experts, of which there are 8, by a router's table."""
    experts = min(EXPERTS, CHOSEN * tokens)
    mlps = LAYERS * ((experts - 1) * 3 * HIDDEN * FFN + EXPERTS * HIDDEN)  # the first is LINEAR's
    return (READ_PARAMS + min(tokens, VOCAB) * HIDDEN + mlps + HEAD // 2) * element


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("dtype", "element"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_step_reads_the_experts_that_its_tokens_choose(
    dtype: torch.dtype, element: int, implementation: str
) -> None:
    plan = plan_generate(
        lambda: mixtral(implementation), MACHINE, dtype=dtype, search_batch=False,
        sizes={"prompt": PROMPT, "new": 2, "batch": [1, 3, BATCH]},
    )  # fmt: skip
    for choice in plan.choices:
        batch = choice.sizes["batch"]
        cached = cache_bytes(batch * PROMPT, element)
        assert choice.decode.read_bytes == mixtral_bytes(batch, element) + cached
        assert choice.prefill.read_bytes == mixtral_bytes(batch * PROMPT, element)


@pytest.mark.slow
def test_experts_are_bound_by_computing_from_the_batch_that_reads_them_all_often_enough() -> None:
    machine = Machine(name="slow", flops_per_s={"float32": 20 * 1e8}, bytes_per_s=1e8)
    sizes = {"prompt": 3, "new": 2}

    def planned_of(**options: Any) -> PlannedGeneration:
        options = {"search_batch": False, **options}
        (choice,) = plan_generate(mixtral, machine, **options).choices
        return choice

    bound = planned_of(sizes=sizes, search_batch=True).compute_bound_batch
    assert bound > EXPERTS
    for batch, word in ((1, "memory"), (bound - 1, "memory"), (bound, "compute")):
        assert planned_of(sizes={**sizes, "batch": batch}).decode.bound == word


def test_step_reads_what_a_sliding_window_keeps_of_the_cache() -> None:
    (choice,) = plan_generate(mistral, MACHINE, sizes=SIZES, search_batch=False).choices
    for step in (choice.decode, choice.last):
        assert step.read_bytes == read_bytes(BATCH) + cache_bytes(BATCH * (WINDOW - 1))


class Int8Linear(nn.Module):
    """A linear layer without bias, whose weight of 8 bits and scales are buffers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros_like(linear.weight, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(len(linear.weight)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale


def test_weights_that_are_buffers_are_read() -> None:
    def quantized() -> nn.Module:
        model = llama()
        for layer in model.model.layers:
            for name in ("gate_proj", "up_proj", "down_proj"):
                setattr(layer.mlp, name, Int8Linear(getattr(layer.mlp, name)))
        return model

    (choice,) = plan_generate(quantized, MACHINE, sizes=SIZES, search_batch=False).choices
    mlps, scales = LAYERS * 3 * HIDDEN * FFN, LAYERS * (2 * FFN + HIDDEN)
    smaller = (F32 - 1) * mlps - F32 * scales
    assert choice.prefill.read_bytes == read_bytes(BATCH * PROMPT) - smaller


def test_largest_batch_fits_in_prefill_and_decode_and_the_next_does_not(
    planned: PlannedGeneration,
) -> None:
    largest = planned.largest_batch
    at, beyond = (only({**SIZES, "batch": batch}) for batch in (largest, largest + 1))
    assert at.fits and at.headroom_bytes >= 0
    assert beyond.fits is False
    assert at.peak_bytes == max(step.peak_bytes for step in (at.prefill, at.decode, at.last))


def test_machine_without_figures_has_no_times_and_no_searched_batches() -> None:
    choice = only({**SIZES, "new": 2}, Machine(name="unknown"), search_batch=True)
    assert choice.decode.fused_s is None and choice.decode.bound is None
    assert choice.seconds == (None, None) and choice.fits is None
    assert choice.largest_batch is None and choice.compute_bound_batch is None


def test_other_sizes_are_passed_to_build() -> None:
    built: list[int] = []

    def build(width: int) -> nn.Module:
        built.append(width)
        return llama()

    plan_generate(
        build, MACHINE, sizes={"prompt": 3, "new": 1, "width": [7, 8]}, search_batch=False
    )
    assert built == [7, 8]


@pytest.mark.parametrize(
    ("build", "sizes", "error", "message"),
    [
        (llama, {}, ConfigError, 'sizes is empty; pass "prompt" and "new"'),
        (llama, {"prompt": 3}, ConfigError, "new=None: pass a whole number of at least 1"),
        (llama, {**SIZES, "prompt": 0}, ConfigError, "prompt=0: pass a whole number"),
        (llama, {**SIZES, "draft": -1}, ConfigError, "draft=-1: pass a whole number"),
        (lambda: 3, SIZES, TargetError, "build returned an object of type int; return a model"),
    ],
)
def test_plan_of_unusable_sizes_says_what_to_pass(build, sizes, error, message: str) -> None:
    with pytest.raises(error, match=message):
        plan_generate(build, MACHINE, sizes=sizes)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"build": None}, "build is of type NoneType; pass a function that returns the model$"),
        ({"sizes": 3}, "sizes=3: pass a dict of names and values"),
        ({"dtype": "bf16"}, "dtype='bf16': pass a dtype of torch, such as torch.bfloat16"),
        ({"sequences": None}, "sequences=None: pass texts, such as '12x1@1024"),
        ({"sequences": [5]}, "sequences=.5.: pass texts, such as '12x1@1024"),
    ],
)
def test_argument_of_the_wrong_type_is_named(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_generate(**{"build": llama, "machine": MACHINE, "sizes": SIZES, **option})


def test_model_without_a_cache_is_refused() -> None:
    class Plain(nn.Module):
        def forward(self, input_ids: torch.Tensor, past_key_values: Any, use_cache: bool) -> Any:
            return input_ids

    with pytest.raises(TargetError, match="Plain returned no past_key_values; plan a model that"):
        plan_generate(Plain, MACHINE, sizes=SIZES)
    with pytest.raises(TargetError, match="Plain has no attention that transformers chooses"):
        plan_generate(Plain, MACHINE, sequences=["1@3"])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: T5ForConditionalGeneration(
                T5Config(d_model=HIDDEN, d_kv=HEAD, d_ff=FFN, num_heads=HEADS, num_layers=1)
            ),
            "T5ForConditionalGeneration has an encoder; plan a model that is a decoder alone",
        ),
        (lambda: nn.Linear(3, 5), "Linear.forward has no parameter input_ids; plan a model that"),
    ],
)
@pytest.mark.parametrize("asked", [{"sizes": SIZES}, {"sequences": ["1@3"]}])
def test_model_that_is_not_a_decoder_alone_is_refused(build, message: str, asked: Any) -> None:
    with pytest.raises(TargetError, match=message):
        plan_generate(build, MACHINE, **asked)


def test_model_in_use_is_refused() -> None:
    with pytest.raises(TargetError, match="is on cpu; make the model in build"):
        plan_generate(lambda: llama().to_empty(device="cpu"), MACHINE, sizes=SIZES)


def test_parse_sequences_repeats_counted_parts() -> None:
    assert parse_sequences("2x1@37+5@0") == (NewTokens(1, 37), NewTokens(1, 37), NewTokens(5, 0))


@pytest.mark.parametrize("text", ["", "1", "0x1@3", "0@3", "1@3+", "ax1@3", "1@-3"])
def test_parse_sequences_of_another_text_says_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match="is not COUNTxNEW@CONTEXT"):
        parse_sequences(text)


def test_table_of_a_plan_has_prefill_step_and_assumptions() -> None:
    planned = plan_generate(llama, MACHINE, sizes=SIZES, sequences=["1@3"], search_batch=False)
    lines = plan_table.render(planned).splitlines()
    assert "batch=5, prompt=37, new=11" in lines[2] and "sequences=1@3" in lines[2]
    cache = next(line for line in lines if line.startswith("KV cache at the end"))
    held = cache_bytes(BATCH * (PROMPT + NEW - 1)) / 1000
    assert f" {held:g} KB " in cache
    assert any(line.startswith("prefill, least time") for line in lines)
    assert any("attention is an operator for each sequence" in line for line in lines)


def test_plan_says_which_peaks_of_the_machine_are_missing() -> None:
    machine = replace(MACHINE, flops_per_s={"float16": 1e12})
    planned = plan_generate(llama, machine, sizes=SIZES, search_batch=False)
    assert any("no peak of" in text and "float32" in text for text in planned.assumptions)
