"""A backend for ``torch.compile`` that compiles as usual, and knows what its graphs cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import fx, nn

from dispatch_flops import _torch
from dispatch_flops.compile.attribution import Places
from dispatch_flops.compile.graph import GraphCost
from dispatch_flops.counting.aggregation import Ledger
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.placement import run_info
from dispatch_flops.counting.profile_builder import Observed, build_profile
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.operators import (
    formulas,  # noqa: F401  (fills the registry)
    registry,
)
from dispatch_flops.operators.conventions import Causal, Conventions
from dispatch_flops.operators.registry import Formula
from dispatch_flops.profile import OUTSIDE, Profile, add_costs
from dispatch_flops.profile.cost import MODEL_PHASES, PHASES, ZERO, OpCost, Phase
from dispatch_flops.units import ratio

Backend = Literal["inductor", "aot_eager"]
Count = Callable[[fx.GraphModule, bool], Callable[[Callable[..., Any]], Callable[..., Any]]]
_Run = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What compiled graphs did between two calls of ``CountingBackend.step``.

    costs: by phase. seconds: the wall time between the calls. A device's work may still be
    going on when they return: over many steps that evens out.
    """

    costs: Mapping[Phase, OpCost] = field(default_factory=dict)
    seconds: float

    @property
    def total(self) -> OpCost:
        """Everything that ran: the hardware's work."""
        return add_costs(self.costs.values())

    @property
    def model_total(self) -> OpCost:
        """Forward and backward, without recomputation: the model's work."""
        return add_costs(self.costs.get(phase) for phase in MODEL_PHASES)

    @property
    def flops_per_s(self) -> float | None:
        """FLOPs that ran, per second; None where no time passed."""
        return ratio(self.total.flops, self.seconds)

    def mfu(self, peak_flops_per_s: float) -> float | None:
        """The share of a device's peak that the model's FLOPs took; None likewise."""
        if not peak_flops_per_s > 0:
            raise ConfigError(f"peak_flops_per_s={peak_flops_per_s!r}: pass FLOP/s above 0")
        achieved = ratio(self.model_total.flops, self.seconds)
        return None if achieved is None else achieved / peak_flops_per_s


def counting_backend(
    backend: Backend = "inductor",
    model: nn.Module | Sequence[nn.Module] | None = None,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    causal: Causal = "full",
    custom_mapping: Mapping[Any, Formula] | None = None,
) -> CountingBackend:
    """A backend to pass to ``torch.compile(model, backend=...)``.

    backend: what really compiles.
    model: names the places in ``profile()``; without it there are totals only.
    mode, options: as torch.compile has them for inductor (it takes them for no other backend).
    causal, custom_mapping: as in FlopCounterMode.

    Modules of one class may share a compiled graph (compiled one by one, or after a graph break):
    what it runs is then shown on the first of them; totals are exact.

    Raises TargetError for a backend that does not go through AOTAutograd's partitioned graphs.
    """
    return CountingBackend(
        backend,
        model,
        mode=mode,
        options=options,
        conventions=Conventions(causal=causal),
        own_rules=registry.rules_from(custom_mapping or {}),
    )


class CountingBackend:
    """Counts what the graphs that it compiled have run; make one with ``counting_backend``."""

    def __init__(
        self,
        backend: str,
        model: nn.Module | Sequence[nn.Module] | None,
        *,
        mode: str | None,
        options: Mapping[str, Any] | None,
        conventions: Conventions,
        own_rules: Mapping[Any, registry.Rule],
    ) -> None:
        if backend not in ("inductor", "aot_eager"):
            raise TargetError(f'backend={backend!r}: choose "inductor" or "aot_eager"')
        if backend == "aot_eager" and (mode or options):
            raise TargetError("mode and options are inductor's: aot_eager has none")
        roots = (model,) if isinstance(model, nn.Module) else tuple(model or ())
        self.graphs: list[GraphCost] = []
        self._compile = _with_inductor if backend == "inductor" else _with_aot_eager
        self._patches = _inductor_options(mode, options)
        self._names = ModuleNames(roots)
        self._conventions = conventions
        self._own_rules = own_rules
        self._used_params: set[int] = set()
        self._at_last_step: Counter[_Run] = Counter()
        self._last_step_s = time.perf_counter()

    def __call__(
        self,
        graph: fx.GraphModule,
        example_inputs: Any,
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile one traced function; torch.compile calls this."""
        patches = self._patches | _inductor_options(mode, options)
        with _torch.modes_disabled():
            places = Places(self._names, graph)
        self._used_params |= places.used_params
        return self._compile(graph, example_inputs, partial(self._count, places), patches)

    def step(self) -> Step:
        """What ran since the last call (the first time: since the backend was made)."""
        now = time.perf_counter()
        runs = self._runs()
        new = runs - self._at_last_step
        seconds, self._last_step_s = now - self._last_step_s, now
        self._at_last_step = runs
        return Step(costs=self._costs(new), seconds=seconds)

    def total(self) -> OpCost:
        """Everything that the compiled graphs have run."""
        return add_costs(self._costs(self._runs()).values())

    def profile(self) -> Profile:
        """Everything that the compiled graphs have run, by module, phase and operator."""
        with _torch.modes_disabled():
            places: dict[tuple[str, Phase], ModulePhase] = {}
            for (index, sizes), times in self._runs().items():
                for (fqn, phase, entry), count in self.graphs[index].costs(sizes).items():
                    place = places.setdefault((fqn, phase), ModulePhase(fqn, phase))
                    place.counts[entry] += count * times
            ledger = Ledger()
            ledger.fold(places.values())
            return build_profile(
                ledger,
                self._names,
                Observed(calls=self._module_calls(), used_params=self._used_params),
                run_info(self._names.modules(), self._conventions),
                notes=("compiled graphs only: what ran outside of them is not counted",),
            )

    def _count(
        self, places: Places, graph: fx.GraphModule, is_backward: bool
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What makes the code compiled from ``graph`` count its runs."""
        with _torch.modes_disabled():
            cost = GraphCost(
                graph,
                places,
                is_backward=is_backward,
                conventions=self._conventions,
                own_rules=self._own_rules,
            )
        self.graphs.append(cost)
        return partial(_counted, cost)

    def _module_calls(self) -> dict[str, int]:
        calls: Counter[str] = Counter()
        parts: Counter[tuple[str, str]] = Counter()
        for graph in self.graphs:
            if not graph.is_backward:
                times = graph.runs.total()
                parts[graph.part_of] += times
                for fqn, count in graph.module_calls.items():
                    calls[fqn] += count * times
        own: dict[str, int] = {}  # every part of a forward has run as often as the forward
        for (fqn, _), times in parts.items():
            own[fqn] = max(own.get(fqn, 0), times)
        own.pop(OUTSIDE, None)
        return calls + Counter(own)

    def _runs(self) -> Counter[_Run]:
        return Counter(
            {
                (index, sizes): times
                for index, graph in enumerate(self.graphs)
                for sizes, times in graph.runs.items()
            }
        )

    def _costs(self, runs: Mapping[_Run, int]) -> dict[Phase, OpCost]:
        costs = dict.fromkeys(PHASES, ZERO)
        with _torch.modes_disabled():
            for (index, sizes), times in runs.items():
                for phase, cost in self.graphs[index].by_phase(sizes).items():
                    costs[phase] += cost * times
        return costs


def _counted(cost: GraphCost, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, which takes a list of inputs and empties it, counting its runs."""
    runs, read_sizes = cost.runs, cost.read_sizes

    def run(inputs: list[Any]) -> Any:
        runs[() if read_sizes is None else read_sizes(inputs)] += 1
        return compiled(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _with_inductor(
    graph: fx.GraphModule, example_inputs: Any, count: Count, patches: Mapping[str, Any]
) -> Callable[..., Any]:
    def compile_counted(part: fx.GraphModule, inputs: Any, **kwargs: Any) -> Callable[..., Any]:
        make_counted = count(part, bool(kwargs.get("is_backward")))  # inductor rewrites the graph
        return make_counted(_torch.compile_part(part, inputs, **kwargs))

    # A hit in this cache would hand back code that does not count. Inductor's own stays on.
    with _torch.no_autograd_cache():
        compiled: Callable[..., Any] = _torch.compile_with_inductor(
            graph, example_inputs, compile_counted, dict(patches) or None
        )
    return compiled


def _with_aot_eager(
    graph: fx.GraphModule, example_inputs: Any, count: Count, patches: Mapping[str, Any]
) -> Callable[..., Any]:
    def interpret(part: fx.GraphModule, _inputs: Any, *, is_backward: bool) -> Callable[..., Any]:
        return count(part, is_backward)(fx.Interpreter(part).boxed_run)

    if patches:
        raise TargetError("mode and options are inductor's: aot_eager has none")
    with _torch.no_autograd_cache():
        compiled: Callable[..., Any] = _torch.aot_autograd(
            fw_compiler=partial(interpret, is_backward=False),
            bw_compiler=partial(interpret, is_backward=True),
        )(graph, example_inputs)
    return compiled


def _inductor_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    patches: dict[str, Any] = {}
    if mode is not None and mode != "default":
        patches.update(_torch.options_of_mode(mode))
    patches.update(options or {})
    return patches
