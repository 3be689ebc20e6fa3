"""Profile ``generate`` of Hugging Face models, split into prefill and decode."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.analysis.plain_figures import PlainFigures, figures_of, plain
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.errors import TargetError
from dispatch_flops.profile import ModuleNode, PhaseSeconds, Profile, StepTiming
from dispatch_flops.profile.cost import COST_FIELDS, ZERO, OpCost
from dispatch_flops.profile.memory import FollowMemory
from dispatch_flops.profilers.counter import FlopCounterMode
from dispatch_flops.profilers.inputs import check_model
from dispatch_flops.profilers.isolation import evaluating, preserving_random_state
from dispatch_flops.profilers.model import SEPARATE_PASS, attach_latencies, check_calls
from dispatch_flops.timing.calibrated import ModulePass
from dispatch_flops.timing.devices import Devices
from dispatch_flops.units import bytes_text, flops_text, macs_text, seconds_text

GENERATION_SCHEMA = "dispatch_flops.generation"
GENERATION_VERSION = 1

_CACHE = "past_key_values"  # generate fills it, so every pass needs a copy
_CONFIG = "generation_config"
_ASSISTANT = "assistant_model"
_CRITERIA = "stopping_criteria"
_NOTHING = nullcontext()
_ONE_TOKEN = {"max_new_tokens": 1, "max_length": None, "min_new_tokens": None, "min_length": 0}


@dataclass(frozen=True, kw_only=True)
class GenerateProfile(PlainFigures):
    """Cost of one ``generate``.

    prefill: from the call to the first new token, including its choice. Assisted generation may
        choose several tokens at once.
    decode: everything after that. Where generate makes several sequences one after the other, as of
        long audio, it includes the prompts of all but the first.
    steps: cost of each decode step, in order. A step is one pass of the model and the choice of
        the next token or tokens.
    new_tokens: tokens generated per sequence. decode_tokens: those of them made in decode.

    Example::

        generated = profile_generate(model, input_ids, max_new_tokens=8)
        growth = generated.steps[-1].macs - generated.steps[0].macs  # of attention to the cache
        print(generated.prefill.total().macs, growth, generated.first_token_s, generated.token_s)
        figures = generated.to_dict()
        print(figures["decode"]["total"]["bytes_read"], figures["steps"][-1]["macs"])
    """

    prefill: Profile
    decode: Profile
    steps: tuple[OpCost, ...]
    new_tokens: int
    decode_tokens: int

    def total(self) -> OpCost:
        """Return the cost of prefill and decode together."""
        return self.prefill.total() + self.decode.total()

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first new token."""
        return self.prefill.timing.latency("forward")

    @property
    def token_s(self) -> float | None:
        """Mean seconds of decode per token made in it; None if it made none."""
        seconds, tokens = self.decode.timing.latency("forward"), self.decode_tokens
        return seconds / tokens if seconds is not None and tokens else None

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain dicts, lists, strings and numbers, such as for a dashboard.

        Keys are the names of fields and properties; what is unknown is None. ``prefill`` and
        ``decode`` have their totals, seconds and memory; ``Profile.to_dict`` has their modules.
        """
        return {
            "schema": GENERATION_SCHEMA,
            "version": GENERATION_VERSION,
            **figures_of(self),
            "total": plain(self.total()),
        }

    def __str__(self) -> str:
        rows = [
            _row("prefill", self.prefill.total(), self.first_token_s),
            _row("decode", self.decode.total(), self.decode.timing.latency("forward")),
        ]
        if self.steps:
            rows.append(_row("  first step", self.steps[0], None))
            rows.append(_row("  last step", self.steps[-1], None))
        table = tabulate(rows, headers=["", "MACs", "FLOPs", "bytes", "latency"])
        per_token = f"; {seconds_text(self.token_s)} per token" if self.token_s is not None else ""
        passes = _passes(self.prefill.root) + _passes(self.decode.root)
        of_model = f" in {passes} passes of the model" if passes else ""
        return f"{table}\n{self.new_tokens} new tokens per sequence{of_model}{per_token}"


def profile_generate(
    model: nn.Module,
    inputs: Any = None,
    *,
    warm_up: int = 1,
    memory: FollowMemory = False,
    **options: Any,
) -> GenerateProfile:
    """Profile ``model.generate(inputs, **options)`` of a Hugging Face model.

        from dispatch_flops.integrations.transformers import profile_generate

        generated = profile_generate(model, input_ids, max_new_tokens=64)
        print(generated)
        generated.prefill.total().macs, generated.token_s

    model: a module with a method ``generate`` that takes ``stopping_criteria``.
    inputs: its first argument, such as token ids of shape (batch, length); None if the inputs are
        among the options.
    warm_up: calls before the first measurement (default 1).
    memory: as for ``FlopCounterMode``. What was allocated before decode counts from its first use.
    options: further arguments of ``generate``.

    ``generate`` runs several times: for one token, to find the length of the prompt; for the
    latency of each phase; for the latencies of modules; and for the counts. Each time it starts
    from the same random state, and with a copy of a cache among the options. The model runs in
    evaluation mode; train flags and random state are as before afterwards.

    Raises TargetError if the model has no such method ``generate``, if it generates no token, and
    for inputs by name; ConfigError for a wrong ``warm_up`` or ``memory``.
    """
    check_model(model)
    _require_generate(model)
    if isinstance(inputs, Mapping):
        raise TargetError(
            f"inputs is of type {type(inputs).__name__}; pass inputs by name as options, **inputs"
        )
    check_calls("warm_up", warm_up, 0)
    counters = [FlopCounterMode(model, display=False, memory=memory) for _ in range(2)]

    def run(relay: _Relay, options: dict[str, Any] = options) -> _Relay:
        own = {**options, _CACHE: copy.deepcopy(options[_CACHE])} if _CACHE in options else options
        with preserving_random_state(model), _preserving_config(options.get(_ASSISTANT)):
            relay.run(lambda criteria: _generate(model, inputs, own, criteria))
        return relay

    devices = Devices.of(model.modules())
    with evaluating(model):
        single = run(_Relay(devices), _for_one_token(options))
        for _ in range(warm_up):
            run(_Relay(devices))
        timed = run(_Relay(devices))
        clocks = [ModulePass(ModuleNames([model]), devices=devices) for _ in range(2)]
        run(_Relay(devices, clocks[0], clocks[1]))
        counted = run(
            _Relay(devices, counters[0], counters[1], lambda: counters[1].profile.total())
        )
    prefill, decode = (
        attach_latencies(
            counter.profile,
            clock.seconds(),
            StepTiming(seconds=PhaseSeconds({"forward": seconds}), method=SEPARATE_PASS),
        )
        for counter, clock, seconds in zip(counters, clocks, timed.seconds(), strict=True)
    )
    decode_tokens = counted.tokens_after_first()
    return GenerateProfile(
        prefill=prefill,
        decode=decode,
        steps=counted.steps(decode.total()),
        new_tokens=counted.lengths[0] - (single.lengths[0] - 1) + decode_tokens,
        decode_tokens=decode_tokens,
    )


@contextmanager
def _preserving_config(assistant: Any) -> Iterator[None]:
    """Give the model that drafts a copy of its config inside: generate adapts it to what it saw."""
    config = getattr(assistant, _CONFIG, None)
    if config is None:
        yield
        return
    setattr(assistant, _CONFIG, copy.deepcopy(config))
    try:
        yield
    finally:
        setattr(assistant, _CONFIG, config)


def _for_one_token(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for one new token, set in the generation config if one is given."""
    changed = {name: value for name, value in options.items() if name not in _ONE_TOKEN}
    config = copy.deepcopy(changed.get(_CONFIG))
    if config is None:
        return {**changed, **_ONE_TOKEN}
    config.update(**_ONE_TOKEN)
    return {**changed, _CONFIG: config}


def _require_generate(model: Any) -> None:
    name, method = type(model).__name__, getattr(model, "generate", None)
    if not callable(method):
        raise TargetError(f"{name} has no method generate; pass a generative model")
    parameters = inspect.signature(method).parameters
    if _CRITERIA not in parameters and all(
        parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        raise TargetError(
            f"{name}.generate takes no {_CRITERIA}, which tell prefill from decode; profile all "
            'of it by profile_model(model, mode="generate", ...)'
        )


def _generate(model: Any, inputs: Any, options: dict[str, Any], criterion: _Relay) -> None:
    from transformers import StoppingCriteriaList

    named = dict(options)
    criteria = StoppingCriteriaList([*(named.pop(_CRITERIA, None) or ()), criterion])
    given = () if inputs is None else (inputs,)  # its name differs between models
    model.generate(*given, stopping_criteria=criteria, **named)


class _Relay:
    """Stopping criterion that never stops, but is called after every token.

    devices: on which the model computes. prefill: entered until the first token. decode: entered
        after it.
    snapshot: returns the cost of decode so far; called after each decode step.
    lengths: length of the sequence, including the prompt, after each token.
    """

    def __init__(
        self,
        devices: Devices,
        prefill: AbstractContextManager[Any] = _NOTHING,
        decode: AbstractContextManager[Any] = _NOTHING,
        snapshot: Callable[[], OpCost] = lambda: ZERO,
    ) -> None:
        self._prefill, self._decode = prefill, decode
        self._now = devices.clock()
        self._snapshot = snapshot
        self._open = ExitStack()
        self._costs: list[OpCost] = []
        self._stamps: list[float] = []
        self.lengths: list[int] = []

    def run(self, generate: Callable[[_Relay], None]) -> None:
        with self._open:
            self._stamp()
            self._open.enter_context(self._prefill)
            generate(self)
            self._stamp()
        if not self.lengths:
            raise TargetError("generate made no token; allow at least one (max_new_tokens)")

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        if len(self.lengths) == 1:
            self._open.close()
            self._stamp()
            self._open.enter_context(self._decode)
        else:
            self._costs.append(self._snapshot())
        with _torch.modes_disabled():
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of prefill and decode."""
        start, between, end = self._stamps
        return between - start, end - between

    def tokens_after_first(self) -> int:
        """Return the tokens per sequence that were chosen after the first choice.

        A sequence that is no longer than before is a new one, as of the next part of long audio.
        """
        grown = (after - before for before, after in pairwise(self.lengths))
        return sum(tokens if tokens > 0 else 1 for tokens in grown)

    def steps(self, decode: OpCost) -> tuple[OpCost, ...]:
        """Return the cost of each decode step; the last one ends with all of decode."""
        until = [*self._costs[:-1], decode] if self._costs else []
        return tuple(map(_difference, until, [ZERO, *until]))

    def _stamp(self) -> None:
        self._stamps.append(self._now())


def _passes(node: ModuleNode) -> int:
    """Return the calls of a model, or of the one that it wraps; 0 where neither is called."""
    while not node.calls and len(node.children) == 1:
        (node,) = node.children
    return node.calls


def _difference(after: OpCost, before: OpCost) -> OpCost:
    return OpCost(**{name: getattr(after, name) - getattr(before, name) for name in COST_FIELDS})


def _row(name: str, cost: OpCost, seconds: float | None) -> list[str]:
    return [
        name,
        macs_text(cost.macs),
        flops_text(cost.flops),
        bytes_text(cost.bytes_total),
        seconds_text(seconds) if seconds is not None else "",
    ]
