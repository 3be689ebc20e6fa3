"""``plan_generate``: does generation fit, and how long do prompt and tokens take at least."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.memory_fit import LARGEST_SEARCHED
from dispatch_flops.analysis.planned_generation import (
    GenerationPlan,
    GenerationStep,
    PlannedGeneration,
)
from dispatch_flops.analysis.step_bounds import step_bounds
from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.memory.caches import tensors_of_cache
from dispatch_flops.operators.conventions import Causal, Target
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.planning.assumptions import of_machine, of_memory, of_unknown_costs
from dispatch_flops.planning.model_inputs import check_on_meta
from dispatch_flops.planning.packed_sequences import (
    NewTokens,
    PackedCache,
    attention_without_a_name,
    packed_attention,
    packed_inputs,
    parse_sequences,
)
from dispatch_flops.planning.planner import Size, check_host_s, check_types, choices_of, machine_of
from dispatch_flops.planning.search import (
    first_not_below,
    followed,
    largest_that_fits,
    without_batch,
)
from dispatch_flops.planning.storage_reads import StorageReads
from dispatch_flops.planning.training_step import ROUNDING
from dispatch_flops.profilers.counter import FlopCounterMode

SIZES = ("batch", "prompt", "new", "draft")
_CACHE = "past_key_values"


def plan_generate(
    build: Callable[..., nn.Module],
    machine: Machine | str,
    *,
    sizes: Mapping[str, Size | Sequence[Size]] | None = None,
    sequences: str | Iterable[str] = (),
    dtype: torch.dtype | None = None,
    causal: Causal = "full",
    target: Target = "cuda",
    host_s_per_operator: float | None = None,
    search_batch: bool = True,
) -> GenerationPlan:
    """Plan generation with a cache of keys and values on one device, without the device.

        from transformers import AutoModelForCausalLM

        from dispatch_flops.integrations.transformers import plan_generate

        planned = plan_generate(
            lambda: AutoModelForCausalLM.from_config(model.config),
            "NVIDIA H200",
            sizes={"batch": [1, 8], "prompt": 64, "new": 16},
            search_batch=False,
        )
        planned.choices[0].prefill.fused_s, planned.choices[0].decode.tokens_per_s
        print(plan_table.render(planned))

    build: called with the sizes that are not listed here, as keyword arguments; returns a model
        that is called as those of transformers: with ``input_ids``, ``past_key_values`` and
        ``use_cache``. It runs with the meta device as default, so that tensors have no data.
    sizes: values to choose from; every combination is planned. "batch" (1 by default) sequences
        have "prompt" tokens and get "new" ones each. "draft" (0 by default) tokens are proposed
        for each step of speculative decoding, which computes draft + 1 positions of each sequence
        and yields 1 to draft + 1 tokens. The model that drafts is not included.
    sequences: steps of a continuous batch, each a choice of its own: "12x1@1024+512@0" is a step
        of 12 sequences with 1 new token after 1024 cached ones, and a prompt of 512 tokens.
    machine, dtype, causal, target, host_s_per_operator: as for ``dispatch_flops.plan``.
    search_batch: search the largest batch that fits, and the smallest whose decode is bound by
        computing, by running.

    Times are lower bounds, with the assumptions in the plan.

    Raises ConfigError for an unknown machine, arguments of another type, sizes that are missing or
    too small and seconds below 0, and TargetError for a model that has an encoder, or that takes
    or returns no cache.
    """
    check_types(build, sizes, dtype, made="the model")
    check_host_s(host_s_per_operator)
    planner = _Planner(build, machine_of(machine), dtype, causal, target, host_s_per_operator)
    named = choices_of(sizes) if sizes else []
    given = [(text, parse_sequences(text)) for text in _texts(sequences)]
    if not named and not given:
        raise ConfigError('sizes is empty; pass "prompt" and "new", or sequences')
    choices = [planner.choice(sizes) for sizes in map(_checked, named)]
    if search_batch:
        choices = planner.with_batches(choices)
    choices += [planner.packed(text, found) for text, found in given]
    return GenerationPlan(
        machine=planner.machine,
        choices=tuple(choices),
        assumptions=tuple(planner.assumptions(choices)),
    )


def _texts(sequences: Any) -> list[str]:
    is_list = isinstance(sequences, Iterable) and not isinstance(sequences, str)
    texts = list(sequences) if is_list else [sequences]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"sequences={sequences!r:.60}: pass texts, such as '12x1@1024+512@0'")
    return texts


def _checked(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes with the defaults; raise ConfigError for one that cannot be run."""
    sizes = {"batch": 1, **sizes}
    for name, least in (("batch", 1), ("prompt", 1), ("new", 1), ("draft", 0)):
        value = sizes.get(name, 0 if name == "draft" else None)
        if type(value) is not int or value < least:
            raise ConfigError(f"{name}={value!r:.60}: pass a whole number of at least {least}")
    return sizes


@dataclass(slots=True)
class _Planner:
    """Counts passes of one model and compares them with one machine."""

    build: Callable[..., nn.Module]
    machine: Machine
    dtype: torch.dtype | None
    causal: Causal
    target: Target
    host_s_per_operator: float | None
    models: dict[tuple[Any, ...], nn.Module] = field(default_factory=dict)

    def choice(self, sizes: Mapping[str, Any]) -> PlannedGeneration:
        """Return the figures of sequences of equal length."""
        model, most = self._model(sizes), sizes["new"] - 1
        decode = [self._decode(model, sizes, context) for context in _contexts(sizes)]
        return PlannedGeneration(
            sizes=sizes,
            machine=self.machine,
            prefill=self._prefill(model, sizes["batch"], sizes["prompt"]),
            decode=decode[0] if decode else None,
            last=decode[-1] if decode else None,
            steps=(-(-most // _positions(sizes)), most),
        )

    def packed(self, text: str, sequences: Sequence[NewTokens]) -> PlannedGeneration:
        """Return the figures of one step of sequences of different lengths."""
        model, cache = self._model({}), PackedCache(sequences)
        with torch.device("meta"), packed_attention(model, cache):
            inputs = packed_inputs(sequences)
            _make_room(model, inputs, cache)
            step = self._count(
                model, inputs, cache, tokens=(len(sequences), sum(s.most for s in sequences))
            )
        return PlannedGeneration(
            sizes={"sequences": text}, machine=self.machine, prefill=None, decode=step, last=None,
            steps=(1, 1),
        )  # fmt: skip

    def with_batches(self, choices: Sequence[PlannedGeneration]) -> list[PlannedGeneration]:
        """Return the choices with the batches that their sizes lead to, searched once for each."""
        found: dict[tuple[Any, ...], tuple[int | None, int | None]] = {}
        changed = []
        for choice in choices:
            others = without_batch(choice.sizes)
            if others not in found:
                alike = [each for each in choices if without_batch(each.sizes) == others]
                found[others] = self._largest_batch(alike), self._compute_bound_batch(choice)
            largest, bound = found[others]
            changed.append(replace(choice, largest_batch=largest, compute_bound_batch=bound))
        return changed

    def _largest_batch(self, alike: Sequence[PlannedGeneration]) -> int | None:
        """Return the largest batch that fits, of choices that differ in the batch alone."""
        if self.machine.memory_bytes is None:
            return None
        sizes, known = alike[0].sizes, {c.sizes["batch"]: followed(c.peak_bytes) for c in alike}
        model = self._model(sizes)

        def peak(batch: int) -> int:
            if batch in known:
                return known[batch]
            steps = [self._prefill(model, batch, sizes["prompt"])]
            steps += [
                self._decode(model, {**sizes, "batch": batch}, c) for c in _contexts(sizes)[1:]
            ]
            return max(followed(step.peak_bytes) for step in steps)

        return largest_that_fits(peak, self.machine.memory_bytes, max(known))

    def _compute_bound_batch(self, choice: PlannedGeneration) -> int | None:
        """Return the smallest batch whose decode is bound by computing; 0 where none is."""
        if choice.decode is None or choice.decode.bound is None:
            return None
        sizes, model = choice.sizes, self._model(choice.sizes)
        context = _contexts(sizes)[0]

        @functools.cache
        def excess_s(batch: int) -> float:
            step = self._decode(model, {**sizes, "batch": batch}, context)
            assert step.bounds.compute_s is not None and step.reading_s is not None
            return step.bounds.compute_s - step.reading_s

        if excess_s(LARGEST_SEARCHED) < 0:
            return 0
        return first_not_below(excess_s) or 0

    def _prefill(self, model: nn.Module, batch: int, prompt: int) -> GenerationStep:
        with torch.device("meta"):
            inputs = _tokens(batch, prompt) | _last_logits(model)
            empty = _empty_cache(model)
            return self._count(model, inputs, empty, tokens=(batch, batch))

    def _decode(self, model: nn.Module, sizes: Mapping[str, Any], context: int) -> GenerationStep:
        batch, positions = sizes["batch"], _positions(sizes)
        with torch.device("meta"):
            cache = _cache_of(model, _tokens(batch, context) | _last_logits(model))
            tokens = (batch, batch * positions)
            return self._count(model, _tokens(batch, positions), cache, tokens=tokens)

    def _count(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        cache: Any,
        *,
        tokens: tuple[int, int],
    ) -> GenerationStep:
        reads = StorageReads([*model.parameters(), *model.buffers(), *tensors_of_cache(cache)])
        counter = FlopCounterMode(
            model, display=False, causal=self.causal, target=self.target, meta_value=1,
            memory=True, memory_rounding=ROUNDING,
        )  # fmt: skip
        with counter, reads:  # reads sees operators as the model calls them
            out = _call(model, inputs, cache)
        return GenerationStep(
            machine=self.machine,
            profile=counter.profile,
            bounds=step_bounds(counter.profile, self.machine, self.host_s_per_operator),
            cache_bytes=nbytes(list(tensors_of_cache(_given_cache(model, out)))),
            read_bytes=reads.bytes,
            tokens=tokens,
        )

    def _model(self, sizes: Mapping[str, Any]) -> nn.Module:
        others = {name: value for name, value in sizes.items() if name not in SIZES}
        key = tuple(others.items())
        if key not in self.models:
            with torch.device("meta"):
                model = self.build(**others)
            if not isinstance(model, nn.Module):
                raise TargetError(
                    f"build returned an object of type {type(model).__name__}; return a model"
                )
            _require_decoder(model)
            check_on_meta(model)
            self.models[key] = (model if self.dtype is None else model.to(self.dtype)).eval()
        return self.models[key]

    def assumptions(self, choices: Sequence[PlannedGeneration]) -> list[str]:
        """Return what the figures assume, in words."""
        found = [
            "one device, without communication; a value that the model reads is taken as 1",
            "least time: parameters and cache are read once, fusion saves all other traffic, and "
            "every counted FLOP runs at the machine's peak",
            "unfused: every operator takes the longer of its FLOPs at the peak and its bytes at "
            "the memory's bandwidth; a cache that the model copies to append to it is moved again",
            "kernels do not reach their peaks, so that real passes take longer",
            "a pass is bound by computing where its FLOPs at the peaks take as long as reading "
            "parameters and cache once",
        ]
        if self.host_s_per_operator is not None:
            found.append(
                f"nothing hidden: adds the host's {self.host_s_per_operator * 1e6:.1f} us for each "
                "operator"
            )
        if any(choice.prefill for choice in choices):
            found.append(
                "prefill is one pass over the whole prompt with the logits of its last token; the "
                "step of decode is that at the mean length, and memory that of the largest pass"
            )
        if any(choice.sizes.get("draft") for choice in choices):
            found.append(
                "a step of decode computes 1 + draft positions of each sequence and yields 1 to "
                "1 + draft tokens; the model that drafts is not included"
            )
        if any("sequences" in choice.sizes for choice in choices):
            found.append(
                "sequences: attention is an operator for each sequence, and keys and values are "
                "written in place; a prompt has the logits of its last token, other sequences of "
                "all new tokens"
            )
        profiles = [step.profile for choice in choices for step in choice.passes]
        found += of_machine(profiles, self.machine)
        found += of_unknown_costs(profiles)
        found += of_memory(profile.memory for profile in profiles)
        return found


def _positions(sizes: Mapping[str, Any]) -> int:
    """Return the positions of each sequence that a step of decode computes."""
    return int(sizes.get("draft", 0)) + 1


def _contexts(sizes: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the cached tokens before the step of mean length and before the last one."""
    prompt, new = sizes["prompt"], sizes["new"]
    return (prompt + (new - 2) // 2, prompt + new - 2) if new > 1 else ()


def _tokens(batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": torch.ones(batch, length, dtype=torch.long)}


def _last_logits(model: nn.Module) -> dict[str, Any]:
    """Return the argument by which a model computes the logits of the last token alone."""
    return {"logits_to_keep": 1} if _takes(model, "logits_to_keep") else {}


def _require_decoder(model: nn.Module) -> None:
    """Raise TargetError for a model that is not called as a decoder alone is."""
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise TargetError(f"{name} has an encoder; plan a model that is a decoder alone")
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    for argument in ("input_ids", _CACHE, "use_cache"):
        if not _takes(model, argument):
            raise TargetError(
                f"{name}.forward has no parameter {argument}; plan a model that is called with "
                f"input_ids, {_CACHE} and use_cache"
            )


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _call(model: nn.Module, inputs: Mapping[str, Any], cache: Any) -> Any:
    with torch.no_grad():
        return model(**inputs, past_key_values=cache, use_cache=True)


def _cache_of(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Return the cache of a model after a pass."""
    with FlopCounterMode(model, display=False, meta_value=1):
        return _given_cache(model, _call(model, inputs, None))


def _make_room(model: nn.Module, inputs: Mapping[str, Any], cache: PackedCache) -> None:
    """Run a pass that makes room in the cache; raise TargetError if the model cannot use it."""
    try:
        with FlopCounterMode(model, display=False, meta_value=1):
            _call(model, inputs, cache)
    except Exception as error:
        raise TargetError(
            f"{type(model).__name__} cannot run a step of sequences, which raised "
            f"{type(error).__name__}: {error}; plan batches of equal lengths"
        ) from error
    if not cache.is_attended:
        raise attention_without_a_name(model)


def _given_cache(model: nn.Module, out: Any) -> Any:
    cache = getattr(out, _CACHE, None)
    if cache is None:
        raise TargetError(
            f"{type(model).__name__} returned no {_CACHE}; plan a model that keeps keys and values "
            "in them, as attention does"
        )
    return cache


def _empty_cache(model: nn.Module) -> Any:
    """Return an empty cache of the class that the model makes; None where it needs arguments."""
    made = _cache_of(model, _tokens(1, 1))
    try:
        return type(made)(config=getattr(model, "config", None))
    except (AttributeError, TypeError):
        return None
