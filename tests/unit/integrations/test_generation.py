"""Hugging Face's generate, split into prefill and decode, against closed forms."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode, Profile, get_model_profile, profile_model
from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.profile import ModuleMemory
from tests.helpers.plain_data import differences

pytest.importorskip("transformers")
from transformers import (
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from dispatch_flops.integrations.transformers import GenerateProfile, profile_generate

pytestmark = pytest.mark.slow

B, PROMPT, NEW = 2, 16, 8
LAYERS, D, VOCAB = 2, 24, 53
OPTIONS = {
    "max_new_tokens": NEW,
    "min_new_tokens": NEW,
    "do_sample": False,
    "pad_token_id": 0,
}


def gpt2_pass(queries: int, keys: int) -> int:
    """MACs of GPT-2 on ``queries`` new tokens that see ``keys``; logits of the last one alone.

    Per token and layer: queries, keys and values D·3D, their projection D·D, the MLP D·4D twice.
    """
    layer = queries * (3 * D * D + D * D + 2 * 4 * D * D) + 2 * queries * keys * D
    return B * (LAYERS * layer + D * VOCAB)


HEADS, KEY_HEADS, HEAD, INNER = 6, 2, 4, 40


def llama_pass(queries: int, keys: int) -> int:
    """As above. Keys and values have fewer heads, attention counts the queries'; gated MLP.

    Rotary angles, position times frequency, are pointwise: FLOPs, no MACs.
    """
    projections = 2 * D * HEADS * HEAD + 2 * D * KEY_HEADS * HEAD
    layer = queries * (projections + 3 * D * INNER) + 2 * queries * keys * HEADS * HEAD
    return B * (LAYERS * layer + D * VOCAB)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=LAYERS, n_embd=D, n_head=3, vocab_size=VOCAB, n_positions=64,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=LAYERS, hidden_size=D, num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS, head_dim=HEAD, intermediate_size=INNER,
            vocab_size=VOCAB, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            d_model=D, d_kv=8, d_ff=INNER, num_heads=3, num_layers=1, num_decoder_layers=1,
            vocab_size=VOCAB, decoder_start_token_id=0, eos_token_id=None,
        )
    )  # fmt: skip


IDS = torch.arange(B * PROMPT).reshape(B, PROMPT)
MODELS = pytest.mark.parametrize(("make", "macs"), [(gpt2, gpt2_pass), (llama, llama_pass)])


@MODELS
def test_prefill_and_each_decode_step_have_closed_form_macs(make: Any, macs: Any) -> None:
    result = profile_generate(make(), IDS, warm_up=0, **OPTIONS)
    steps = [macs(1, PROMPT + t) for t in range(1, NEW)]
    assert result.prefill.check().total().macs == macs(PROMPT, PROMPT)
    assert [step.macs for step in result.steps] == steps
    decode = result.decode.check().total()
    assert decode.macs == sum(steps)
    for figure in ("flops", "bytes_read", "bytes_written"):
        assert sum(getattr(step, figure) for step in result.steps) == getattr(decode, figure)
    assert result.total().macs == macs(PROMPT, PROMPT) + sum(steps)
    assert result.new_tokens == NEW
    assert result.prefill.root.calls == 1
    assert result.decode.root.calls == NEW - 1
    assert not result.prefill.is_lower_bound
    assert not result.decode.is_lower_bound


def test_json_has_the_figures_of_each_pass() -> None:
    result = profile_generate(gpt2(), IDS, warm_up=0, memory=True, **OPTIONS)
    data = json.loads(result.to_json(indent=1))
    assert data == result.to_dict()
    assert (data.pop("schema"), data.pop("version")) == ("dispatch_flops.generation", 1)
    assert [*differences(data, result)] == []
    assert data["prefill"]["total"]["macs"] == gpt2_pass(PROMPT, PROMPT)
    assert [step["macs"] for step in data["steps"]] == [
        gpt2_pass(1, PROMPT + t) for t in range(1, NEW)
    ]
    assert data["total"]["macs"] == gpt2_pass(PROMPT, PROMPT) + sum(
        step["macs"] for step in data["steps"]
    )
    per_layer = 4 * D * D + 2 * 4 * D * D + (3 + 1 + 4 + 1) * D + 2 * 2 * D  # biases, 2 norms
    params = LAYERS * per_layer + (VOCAB + 64) * D + 2 * D
    assert data["decode"]["total_params"] == params
    assert data["decode"]["memory"]["by_role"]["parameters"] == params * 4
    assert (data["new_tokens"], data["decode_tokens"]) == (NEW, NEW - 1)
    assert data["first_token_s"] == data["prefill"]["timing"]["seconds"]["forward"] > 0
    assert data["token_s"] * (NEW - 1) == pytest.approx(
        data["decode"]["timing"]["seconds"]["forward"]
    )


@pytest.mark.parametrize("implementation", [None, "static"])
def test_cache_of_keys_and_values_is_a_role_of_its_own(implementation: str | None) -> None:
    options = {**OPTIONS, "cache_implementation": implementation}
    result = profile_generate(llama(), IDS, warm_up=0, memory="timeline", **options)
    both = 2 * LAYERS * B * KEY_HEADS * HEAD * 4  # bytes of keys and values of one token
    last = PROMPT + NEW - 1  # the last token is not an input
    # A static cache has room for all tokens. The length in each layer is not a key.
    prefill = PROMPT if implementation is None else last
    assert cache_at_end(result.prefill) == prefill * both
    assert cache_at_end(result.decode) == last * both
    assert result.prefill.outside.memory is None or not result.prefill.outside.memory.own.kv_cache
    assert result.decode.memory is not None
    if implementation is None:
        # The peak is in the last layer, when it has joined its values: old ones are still there.
        old_values = (last - 1) * both // (2 * LAYERS)
        assert result.decode.memory.by_role()["KV cache"] == last * both + old_values


def test_cache_that_modules_made_is_a_field_of_their_memory() -> None:
    """Each attention has the keys and values of its layer, batch, key heads, tokens and head."""
    of_layer = 2 * B * KEY_HEADS * PROMPT * HEAD * 4  # float32
    model, cache = llama().eval(), DynamicCache()
    with torch.no_grad(), FlopCounterMode(model, display=False, memory=True) as counter:
        model(IDS, past_key_values=cache)
    held = {node.fqn: node.memory for node in counter.profile.check().nodes() if node.memory}
    for layer in range(LAYERS):
        assert held[f"model.layers.{layer}.self_attn"].own.kv_cache == of_layer
        assert held[f"model.layers.{layer}"].total.kv_cache == of_layer
        assert held[f"model.layers.{layer}"].own.kv_cache == 0
    assert held[""].total.kv_cache == LAYERS * of_layer
    assert held[""].own.kv_cache == 0


def test_cache_that_was_there_before_is_of_the_model_that_was_given_it() -> None:
    class Reader(nn.Module):
        """Reads a cache without making a part of it."""

        def forward(self, x: torch.Tensor, past_key_values: Any) -> torch.Tensor:
            return x + past_key_values[0].sum() + past_key_values[1].sum()

    keys, values = torch.randn(3, 5, 7), torch.randn(3, 5, 11)
    model = nn.Sequential()
    model.add_module("reader", Reader())
    with torch.no_grad(), FlopCounterMode(model, display=False, memory=True) as counter:
        model.reader(torch.randn(2), past_key_values=(keys, values))
        model.reader(torch.randn(2), past_key_values=(keys, keys))  # a smaller one
    assert reader_of(counter).own.kv_cache == 3 * 5 * (7 + 11) * 4
    shared = torch.randn(3, 5, 19)
    with torch.no_grad(), FlopCounterMode(model, display=False, memory=True) as counter:
        model.reader(torch.randn(2), past_key_values=(shared, shared))
    assert reader_of(counter).own.kv_cache == 3 * 5 * 19 * 4


def reader_of(counter: FlopCounterMode) -> ModuleMemory:
    (reader,) = counter.profile.check().root.children
    assert reader.memory is not None
    return reader.memory


@pytest.mark.parametrize("implementation", [None, "static"])
def test_largest_cache_of_a_generation_is_the_last(implementation: str | None) -> None:
    options = {**OPTIONS, "cache_implementation": implementation}
    result = profile_generate(llama(), IDS, warm_up=0, memory=True, **options)
    both = 2 * LAYERS * B * KEY_HEADS * HEAD * 4
    last = PROMPT + NEW - 1
    assert result.decode.root.memory is not None
    assert result.decode.root.memory.total.kv_cache == last * both


def cache_at_end(profile: Profile) -> int:
    assert profile.memory is not None
    return profile.memory.timeline[-1].bytes_by_role["KV cache"]


def test_keys_and_values_that_have_gradients_are_activations() -> None:
    model = llama()
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model(IDS, past_key_values=DynamicCache())
    assert counter.profile.memory is not None
    assert "KV cache" not in counter.profile.memory.by_role()


@MODELS
def test_get_model_profile_with_mode_generate_counts_the_same(make: Any, macs: Any) -> None:
    flops, counted, params = get_model_profile(
        make(),
        kwargs={"inputs": IDS, **OPTIONS},
        mode="generate",
        print_profile=False,
        as_string=False,
        warm_up=0,
    )
    assert counted == macs(PROMPT, PROMPT) + sum(macs(1, PROMPT + t) for t in range(1, NEW))
    assert flops > 2 * counted
    assert params == sum(p.numel() for p in make().parameters())


def test_generate_without_a_cache_recomputes_everything() -> None:
    result = profile_generate(gpt2(), IDS, warm_up=0, use_cache=False, **OPTIONS)
    lengths = [PROMPT + t for t in range(1, NEW)]
    assert [step.macs for step in result.steps] == [gpt2_pass(n, n) for n in lengths]


def test_cache_among_the_options_is_not_filled() -> None:
    model = gpt2().eval()
    with torch.no_grad():
        cache = model(IDS[:, :10], use_cache=True, past_key_values=DynamicCache()).past_key_values
    result = profile_generate(model, IDS, past_key_values=cache, **OPTIONS)
    assert cache.get_seq_length() == 10
    assert result.prefill.total().macs == gpt2_pass(PROMPT - 10, PROMPT)


def test_one_new_token_is_only_prefill() -> None:
    options = {**OPTIONS, "max_new_tokens": 1, "min_new_tokens": 1}
    result = profile_generate(gpt2(), IDS, **options)
    assert result.prefill.total().macs == gpt2_pass(PROMPT, PROMPT)
    assert result.decode.total().macs == 0
    assert result.steps == ()
    assert result.token_s is None
    assert "1 new tokens" in str(result)
    data = json.loads(result.to_json())
    assert data["token_s"] is None and data["steps"] == [] and data["decode_tokens"] == 0
    assert data["prefill"]["memory"] is None


def test_profile_generate_restores_random_state_and_flags() -> None:
    model = gpt2().train()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    result = profile_generate(model, IDS, **{**OPTIONS, "do_sample": True})
    assert torch.equal(torch.rand(3), expected)
    assert model.training and all(module.training for module in model.modules())
    assert result.decode.total().macs == sum(gpt2_pass(1, PROMPT + t) for t in range(1, NEW))
    assert not {"aten.bernoulli_.float", "aten.native_dropout.default"} & set(
        result.prefill.by_operator()
    )  # evaluation mode: no dropout


def test_stopping_criterion_adds_one_free_operator_per_token() -> None:
    model = gpt2().eval()
    with FlopCounterMode(model, display=False) as counter:
        model.generate(IDS, **OPTIONS)
    result = profile_generate(model, IDS, warm_up=0, **OPTIONS)
    calls = Counter({op: total.calls for op, total in result.prefill.by_operator().items()})
    calls.update({op: total.calls for op, total in result.decode.by_operator().items()})
    calls.subtract({op: total.calls for op, total in counter.profile.by_operator().items()})
    assert {op: n for op, n in calls.items() if n} == {"aten.bitwise_or.Tensor": NEW}
    assert result.total().flops == counter.get_total_flops()


def test_stopping_criteria_of_the_user_still_stop() -> None:
    class AfterThree(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((B,), input_ids.shape[1] >= PROMPT + 3)

    criteria = StoppingCriteriaList([AfterThree()])
    result = profile_generate(gpt2(), IDS, stopping_criteria=criteria, **OPTIONS)
    assert result.new_tokens == 3
    assert len(result.steps) == 2
    assert len(criteria) == 1


def test_beams_count_as_a_batch() -> None:
    result = profile_generate(gpt2(), IDS, num_beams=3, warm_up=0, **OPTIONS)
    assert result.decode.root.calls == NEW - 1
    assert result.decode.total().macs == 3 * sum(gpt2_pass(1, PROMPT + t) for t in range(1, NEW))


DRAFT = 5


def assistant(make: Any) -> Any:
    """The model itself, certain of five tokens at a time: each pass accepts them and adds one."""
    model = make()
    model.generation_config.num_assistant_tokens = DRAFT
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


@pytest.mark.parametrize(
    ("new", "after_first", "steps"), [(2 * (DRAFT + 1) + 1, DRAFT + 2, 2), (DRAFT - 1, 0, 0)]
)
def test_assisted_generation_makes_several_tokens_per_pass(
    new: int, after_first: int, steps: int
) -> None:
    options = {**OPTIONS, "max_new_tokens": new, "min_new_tokens": new}
    result = profile_generate(llama(), IDS[:1], assistant_model=assistant(llama), **options)
    assert (result.new_tokens, result.decode_tokens) == (new, after_first)
    assert len(result.steps) == steps
    if after_first:
        assert result.decode.timing.latency("forward") is not None
        assert result.token_s == result.decode.timing.latency("forward") / after_first
    else:
        assert result.token_s is None


@pytest.mark.parametrize(
    ("prompt", "drafted"),
    [
        ("embeddings", False),  # an assistant takes ids alone
        *itertools.product(["ids", "encoder's", "decoder's own"], [False, True]),
    ],
)
def test_new_tokens_are_counted_from_the_end_of_the_prompt(prompt: str, drafted: bool) -> None:
    make = llama if prompt in ("ids", "embeddings") else t5
    model, ids = make(), IDS[:1]
    options: dict[str, Any] = {
        "ids": {"inputs": ids},
        "embeddings": {"inputs_embeds": model.get_input_embeddings()(ids).detach()},
        "encoder's": {"inputs": ids},
        "decoder's own": {"inputs": ids, "decoder_input_ids": torch.arange(4)[None]},
    }[prompt]
    if drafted:
        options["assistant_model"] = assistant(make)
    result = profile_generate(model, warm_up=0, **options, **OPTIONS)
    assert result.new_tokens == NEW
    assert (result.decode_tokens < NEW - 1) is drafted


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 3, "do_sample": True},
        {"generation_config": GenerationConfig(**OPTIONS)},
        {"num_beams": 3, "num_return_sequences": 2},
    ],
)
def test_new_tokens_are_per_sequence(options: dict[str, Any]) -> None:
    own = {} if "generation_config" in options else OPTIONS
    result = profile_generate(gpt2(), IDS, warm_up=0, **{**own, **options})
    assert (result.new_tokens, result.decode_tokens) == (NEW, NEW - 1)


def test_assistant_drafts_as_many_tokens_in_every_run_and_afterwards() -> None:
    """By its heuristic schedule, an assistant drafts two more after a pass that accepted all."""
    drafting, new = assistant(llama), 2 * (DRAFT + 1) + 1
    config = drafting.generation_config
    config.num_assistant_tokens_schedule = "heuristic"
    before = config.to_dict()
    options = {**OPTIONS, "max_new_tokens": new, "min_new_tokens": new}
    result = profile_generate(llama(), IDS[:1], assistant_model=drafting, warm_up=2, **options)
    assert drafting.generation_config is config and config.to_dict() == before
    assert (result.new_tokens, result.decode_tokens) == (new, new - (DRAFT + 1))


def test_prompt_lookup_makes_several_tokens_per_pass() -> None:
    ids = torch.arange(4).repeat(1, 4)
    result = profile_generate(gpt2(), ids, prompt_lookup_num_tokens=3, warm_up=0, **OPTIONS)
    assert result.new_tokens == NEW


def whisper() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCAB, d_model=D, encoder_ffn_dim=INNER, decoder_ffn_dim=INNER,
            encoder_layers=1, decoder_layers=1, encoder_attention_heads=3,
            decoder_attention_heads=3, max_source_positions=20, max_target_positions=17,
            num_mel_bins=10, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1,
        )
    )  # fmt: skip


def test_inputs_with_another_name_are_accepted() -> None:
    model = whisper()
    model.generation_config.eos_token_id = None
    features = torch.ones(B, 10, 40)
    named, first = (
        profile_generate(model, *args, warm_up=0, **named, max_new_tokens=NEW)
        for args, named in [((), {"input_features": features}), ((features,), {})]
    )
    assert named.total() == first.total()
    assert named.new_tokens == NEW


def test_long_audio_is_generated_in_several_parts() -> None:
    """Each part of 2 x 20 frames is a sequence of its own, of ``NEW`` tokens."""
    parts, model = 3, whisper()
    model.generation_config.no_timestamps_token_id = VOCAB - 5
    model.generation_config.is_multilingual = False
    result = profile_generate(
        model, torch.ones(1, 10, parts * 40), warm_up=0, max_new_tokens=NEW,
        return_timestamps=True, attention_mask=torch.ones(1, parts * 40, dtype=torch.long),
    )  # fmt: skip
    passes = result.prefill.root.calls + result.decode.root.calls
    calls = {node.fqn: node.calls for node in result.decode.nodes()}
    assert calls["model.encoder"] == parts - 1
    assert result.new_tokens == passes
    assert result.decode_tokens == result.decode.root.calls == len(result.steps)


def test_prompt_in_chunks_takes_several_passes() -> None:
    result = profile_generate(llama(), IDS, prefill_chunk_size=5, warm_up=0, **OPTIONS)
    assert result.prefill.root.calls == -(-PROMPT // 5)
    assert f"in {-(-PROMPT // 5) + NEW - 1} passes of the model" in str(result)


def test_generate_profile_prints_latencies_per_phase() -> None:
    result = profile_generate(gpt2(), IDS, **OPTIONS)
    assert isinstance(result, GenerateProfile)
    assert result.first_token_s is not None and result.first_token_s > 0
    assert result.token_s is not None and result.token_s > 0
    for profile in (result.prefill, result.decode):
        assert profile.root.latency_s is not None and profile.root.latency_s > 0
    text = str(result)
    for words in ("prefill", "decode", "first step", "last step", f"{NEW} new tokens", "per token"):
        assert words in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": {"input_ids": IDS}}, r"inputs is of type dict; pass .*\*\*inputs"),
        ({"warm_up": -1}, "warm_up=-1: pass an int of at least 0"),
        ({"warm_up": "3"}, "warm_up='3': pass an int"),
        ({"memory": "timelin"}, "memory='timelin'"),
    ],
)
def test_wrong_argument_is_refused_before_anything_is_generated(
    given: dict[str, Any], message: str
) -> None:
    class Fails(nn.Module):
        def generate(self, inputs: Any, **_: Any) -> None:
            raise AssertionError("it generates")

    with pytest.raises((ConfigError, TargetError), match=message):
        profile_generate(Fails(), **{"inputs": IDS, **given})


def test_model_that_cannot_generate_raises_target_error() -> None:
    with pytest.raises(TargetError, match="model is the class Linear; pass an instance"):
        profile_generate(nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="Linear has no method generate"):
        profile_generate(nn.Linear(1, 1))

    class Lazy(nn.Linear):
        def generate(self, inputs: Any, **_: Any) -> None:
            pass

    with pytest.raises(TargetError, match="made no token"):
        profile_generate(Lazy(1, 1), IDS)


class OwnLoop(nn.Linear):
    """Generates without transformers."""

    def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = self(x)
        return x


def test_model_whose_generate_cannot_be_split_is_referred_to_profile_model() -> None:
    with pytest.raises(TargetError, match="OwnLoop.generate takes no stopping_criteria") as raised:
        profile_generate(OwnLoop(D, D), torch.ones(B, D), steps=NEW)
    assert 'profile_model(model, mode="generate", ...)' in str(raised.value)
    profile = profile_model(OwnLoop(D, D), args=[torch.ones(B, D), NEW], mode="generate")
    assert profile.total().macs == NEW * B * D * D


class Wrapper(nn.Module):
    """Generates by a model that it holds, as models of peft do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def generate(self, *args: Any, **options: Any) -> Any:
        return self.base.generate(*args, **options)


def test_passes_of_a_wrapped_model_are_its_own() -> None:
    result = profile_generate(Wrapper(gpt2()), IDS, warm_up=0, **OPTIONS)
    assert f"{NEW} new tokens per sequence in {NEW} passes of the model" in str(result)


def test_passes_that_are_not_known_are_not_printed() -> None:
    model = Wrapper(gpt2())
    model.other = nn.Linear(1, 1)
    result = profile_generate(model, IDS, warm_up=0, **OPTIONS)
    assert "passes" not in str(result)
