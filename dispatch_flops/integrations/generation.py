"""``generate`` of Hugging Face models, split into prefill and decode."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.errors import TargetError
from dispatch_flops.profile import PhaseSeconds, Profile, StepTiming
from dispatch_flops.profile.cost import ZERO, OpCost
from dispatch_flops.profilers.counter import FlopCounterMode
from dispatch_flops.profilers.isolation import evaluating, random_state_kept
from dispatch_flops.profilers.model import OWN_PASS, accelerators_drawn_on, attach_latencies
from dispatch_flops.timing.devices import Devices
from dispatch_flops.timing.module_timer import LatencyPass
from dispatch_flops.units import bytes_text, flops_text, macs_text, seconds_text

_CACHE = "past_key_values"  # filled by generate: every pass needs one of its own
_CONFIG = "generation_config"
_ONE_TOKEN = {"max_new_tokens": 1, "max_length": None, "min_new_tokens": None, "min_length": 0}


@dataclass(frozen=True, kw_only=True)
class GenerateProfile:
    """What generating cost.

    prefill: from the call to the first new token, the choice of that token included. Assisted
        generation may choose several at once.
    decode: everything after it. steps: of that, each decode step's cost, in order: a step is one
        pass of the model and the choice of what comes next.
    new_tokens: tokens generated per sequence. decode_tokens: those of them made in decode.
    """

    prefill: Profile
    decode: Profile
    steps: tuple[OpCost, ...]
    new_tokens: int
    decode_tokens: int

    def total(self) -> OpCost:
        """Prefill and decode together."""
        return self.prefill.total() + self.decode.total()

    @property
    def first_token_s(self) -> float | None:
        """Seconds to the first new token."""
        return self.prefill.timing.latency("forward")

    @property
    def token_s(self) -> float | None:
        """Seconds of decode per token made in it, on average; None if it made none."""
        seconds, tokens = self.decode.timing.latency("forward"), self.decode_tokens
        return seconds / tokens if seconds is not None and tokens else None

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
        passes = self.prefill.root.calls + self.decode.root.calls
        return (
            f"{table}\n{self.new_tokens} new tokens per sequence in "
            f"{passes} passes of the model{per_token}"
        )


def profile_generate(
    model: nn.Module, inputs: Any = None, *, warm_up: int = 1, **options: Any
) -> GenerateProfile:
    """Profiles ``model.generate(inputs, **options)`` of a Hugging Face model.

    warm_up: runs before anything is measured.

    Generates several times, each from the same random state and with a copy of a cache that is
    passed in: a single token to see how long the prompt is, then once for each phase's seconds,
    once for the modules', once to count. The model runs in evaluation mode; train flags and
    random state are as before afterwards.
    Raises TargetError for what cannot generate.
    """
    if not isinstance(model, nn.Module) or not callable(getattr(model, "generate", None)):
        raise TargetError(f"{type(model).__name__} has no method generate")

    def run(relay: _Relay, options: dict[str, Any] = options) -> _Relay:
        own = {**options, _CACHE: copy.deepcopy(options[_CACHE])} if _CACHE in options else options
        with random_state_kept(accelerators_drawn_on(model)):
            relay.run(lambda criteria: _generate(model, inputs, own, criteria))
        return relay

    devices = Devices.of(model.modules())
    with evaluating(model):
        single = run(_Relay(nullcontext(), nullcontext(), devices), _for_one_token(options))
        for _ in range(warm_up):
            run(_Relay(nullcontext(), nullcontext(), devices))
        timed = run(_Relay(nullcontext(), nullcontext(), devices))
        clocks = [LatencyPass(ModuleNames([model]), devices=devices) for _ in range(2)]
        run(_Relay(clocks[0], clocks[1], devices))
        counters = [FlopCounterMode(model, display=False) for _ in range(2)]
        counted = run(
            _Relay(counters[0], counters[1], devices, lambda: counters[1].profile.total())
        )
    prefill, decode = (
        attach_latencies(
            counter.profile,
            clock.seconds(),
            StepTiming(seconds=PhaseSeconds({"forward": seconds}), method=OWN_PASS),
        )
        for counter, clock, seconds in zip(counters, clocks, timed.seconds(), strict=True)
    )
    return GenerateProfile(
        prefill=prefill,
        decode=decode,
        steps=counted.steps(decode.total()),
        new_tokens=counted.lengths[-1] - (single.lengths[0] - 1),
        decode_tokens=counted.lengths[-1] - counted.lengths[0],
    )


def _for_one_token(options: dict[str, Any]) -> dict[str, Any]:
    """The same options, but for how much is generated: set in the configuration if one is given."""
    changed = {name: value for name, value in options.items() if name not in _ONE_TOKEN}
    config = copy.deepcopy(changed.get(_CONFIG))
    if config is None:
        return {**changed, **_ONE_TOKEN}
    config.update(**_ONE_TOKEN)
    return {**changed, _CONFIG: config}


def _generate(model: Any, inputs: Any, options: dict[str, Any], criterion: _Relay) -> None:
    from transformers import StoppingCriteriaList

    named = dict(options)
    criteria = StoppingCriteriaList([*(named.pop("stopping_criteria", None) or ()), criterion])
    given = () if inputs is None else (inputs,)  # a model may have other names for the first
    model.generate(*given, stopping_criteria=criteria, **named)


class _Relay:
    """A stopping criterion that never stops: it tells where a token is done.

    ``prefill`` is entered until the first token, ``decode`` after it. snapshot: what the decode
    phase has cost so far, asked for after each of its steps. lengths: of the sequence, prompt
    included, each time.
    """

    def __init__(
        self,
        prefill: AbstractContextManager[Any],
        decode: AbstractContextManager[Any],
        devices: Devices,
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
            raise TargetError("generate made no token: give it room for one (max_new_tokens)")

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        if len(self.lengths) == 1:
            self._open.close()
            self._stamp()
            self._open.enter_context(self._decode)
        else:
            self._costs.append(self._snapshot())
        with _disable_current_modes():
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def seconds(self) -> tuple[float, float]:
        """Seconds of prefill and decode."""
        start, between, end = self._stamps
        return between - start, end - between

    def steps(self, whole: OpCost) -> tuple[OpCost, ...]:
        """What each decode step cost; the last one lasts to the end of ``whole``."""
        until = [*self._costs[:-1], whole] if self._costs else []
        return tuple(map(_difference, until, [ZERO, *until]))

    def _stamp(self) -> None:
        self._stamps.append(self._now())


def _difference(after: OpCost, before: OpCost) -> OpCost:
    names = [field.name for field in dataclasses.fields(OpCost)]
    return OpCost(**{name: getattr(after, name) - getattr(before, name) for name in names})


def _row(name: str, cost: OpCost, seconds: float | None) -> list[str]:
    return [
        name,
        macs_text(cost.macs),
        flops_text(cost.flops),
        bytes_text(cost.bytes_total),
        seconds_text(seconds) if seconds is not None else "",
    ]
