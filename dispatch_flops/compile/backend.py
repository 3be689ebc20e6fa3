"""Backend for ``torch.compile`` that compiles as usual and counts the costs of its graphs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import fx, nn

from dispatch_flops import _torch
from dispatch_flops.compile.attribution import NodeAttribution
from dispatch_flops.compile.graph import GraphCost, Sizes
from dispatch_flops.counting.aggregation import CallAggregator
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
AddGraph = Callable[[fx.GraphModule, bool], GraphCost]  # the graph, is_backward
_Run = tuple[int, Sizes]  # the index of a graph, and the sizes in its inputs
_NO_OPTIONS = 'mode and options apply to backend="inductor" only; leave them out'


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Cost and wall time of the graphs that ran between two calls of ``CountingBackend.step``.

        step = backend.step()
        print(step.total.flops, step.flops_per_s, step.mfu(peak_flops_per_s=989e12))

    costs: by phase. seconds: wall time between the calls. The device is not synchronized, so that
    a single step may be off; over many steps the error averages out.
    """

    costs: Mapping[Phase, OpCost] = field(default_factory=dict)
    seconds: float

    @property
    def total(self) -> OpCost:
        """Cost of all phases (hardware FLOPs)."""
        return add_costs(self.costs.values())

    @property
    def model_total(self) -> OpCost:
        """Cost of forward and backward, without recomputation (model FLOPs)."""
        return add_costs(self.costs.get(phase) for phase in MODEL_PHASES)

    @property
    def flops_per_s(self) -> float | None:
        """FLOP/s over all phases; None if no time passed."""
        return ratio(self.total.flops, self.seconds)

    def mfu(self, peak_flops_per_s: float) -> float | None:
        """Return the model FLOPs utilization, a share of the peak; None if no time passed.

        peak_flops_per_s: dense peak of the device for the model's dtype. Raises ConfigError if it
        is not positive.
        """
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
    """Return a backend for ``torch.compile(model, backend=...)`` that counts what its graphs run.

        backend = counting_backend("inductor", model)
        compiled = torch.compile(model, backend=backend)
        compiled(x).sum().backward()
        print(backend.total().flops)

    backend: the backend that compiles, "inductor" or "aot_eager".
    model: the model or models whose modules ``profile()`` names; None: it has totals only.
    mode, options: those of ``torch.compile``, for inductor only.
    causal, custom_mapping: as in ``FlopCounterMode``.

    Modules of one class may share a compiled graph, if they are compiled one by one or after a
    graph break. The first of them is then shown with the cost of all; totals are exact.

    Raises TargetError for any other backend, and for mode or options with "aot_eager".
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
    """Backend that counts the runs of the graphs that it compiles.

    ``counting_backend`` makes one and has an example. graphs: the cost of each compiled graph.
    """

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
            raise TargetError(_NO_OPTIONS)
        roots = (model,) if isinstance(model, nn.Module) else tuple(model or ())
        self.graphs: list[GraphCost] = []
        self._compile = _compile_with_inductor if backend == "inductor" else _compile_with_aot_eager
        self._patches = _merge_options(mode, options)
        self._names = ModuleNames(roots)
        self._conventions = conventions
        self._own_rules = own_rules
        self._used_params: set[int] = set()
        self._runs_at_last_step: Counter[_Run] = Counter()
        self._last_step_s = time.perf_counter()

    def __call__(
        self,
        graph: fx.GraphModule,
        example_inputs: Any,
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile one traced function; ``torch.compile`` calls this.

        Raises TargetError for mode or options with "aot_eager".
        """
        patches = self._patches | _merge_options(mode, options)
        with _torch.modes_disabled():
            attribution = NodeAttribution(self._names, graph)
        self._used_params |= attribution.used_params
        add_graph = partial(self._add_graph, attribution)
        return self._compile(graph, example_inputs, add_graph, patches)

    def step(self) -> Step:
        """Return what ran since the previous call, or since the backend was made."""
        now = time.perf_counter()
        runs = self._runs()
        new = runs - self._runs_at_last_step
        seconds, self._last_step_s = now - self._last_step_s, now
        self._runs_at_last_step = runs
        return Step(costs=self._costs_by_phase(new), seconds=seconds)

    def total(self) -> OpCost:
        """Return the cost of all runs so far."""
        return add_costs(self._costs_by_phase(self._runs()).values())

    def profile(self) -> Profile:
        """Return the costs of all runs so far by module, phase and operator."""
        with _torch.modes_disabled():
            module_phases: dict[tuple[str, Phase], ModulePhase] = {}
            for (index, sizes), times in self._runs().items():
                for (fqn, phase, cost), calls in self.graphs[index].costs(sizes).items():
                    found = module_phases.setdefault((fqn, phase), ModulePhase(fqn, phase))
                    found.counts[cost] += calls * times
            self._names.read_facts()
            return build_profile(
                CallAggregator().including(module_phases.values()),
                self._names,
                Observed(calls=self._module_calls(), used_params=self._used_params),
                run_info(self._names.modules(), self._conventions),
                notes=("compiled graphs only: what ran outside of them is not counted",),
            )

    def _add_graph(
        self, attribution: NodeAttribution, graph: fx.GraphModule, is_backward: bool
    ) -> GraphCost:
        """Add a graph that is about to be compiled, and return its cost."""
        with _torch.modes_disabled():
            cost = GraphCost(
                graph,
                attribution,
                is_backward=is_backward,
                conventions=self._conventions,
                own_rules=self._own_rules,
            )
        self.graphs.append(cost)
        return cost

    def _module_calls(self) -> dict[str, int]:
        """Return ``{fqn: times its forward ran}``."""
        calls: Counter[str] = Counter()
        function_runs: Counter[tuple[str, str]] = Counter()
        for graph in self.graphs:
            if not graph.is_backward:
                times = graph.runs.total()
                function_runs[graph.function] += times
                for fqn, count in graph.module_calls.items():
                    calls[fqn] += count * times
        # Graph breaks split a forward into several functions, of which each runs once per call.
        own: dict[str, int] = {}
        for (fqn, _), times in function_runs.items():
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

    def _costs_by_phase(self, runs: Mapping[_Run, int]) -> dict[Phase, OpCost]:
        costs = dict.fromkeys(PHASES, ZERO)
        with _torch.modes_disabled():
            for (index, sizes), times in runs.items():
                for phase, cost in self.graphs[index].costs_by_phase(sizes).items():
                    costs[phase] += cost * times
        return costs


def count_runs(cost: GraphCost, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``compiled`` so that its runs are counted.

    cost: of the graph. compiled: takes a list of inputs, and may empty it.
    """
    runs, read_sizes = cost.runs, cost.read_sizes

    def run(inputs: list[Any]) -> Any:
        runs[() if read_sizes is None else read_sizes(inputs)] += 1
        return compiled(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _compile_with_inductor(
    graph: fx.GraphModule, example_inputs: Any, add_graph: AddGraph, patches: Mapping[str, Any]
) -> Callable[..., Any]:
    def compile_part(part: fx.GraphModule, inputs: Any, **kwargs: Any) -> Callable[..., Any]:
        cost = add_graph(part, bool(kwargs.get("is_backward")))  # first: inductor rewrites the part
        return count_runs(cost, _torch.compile_part(part, inputs, **kwargs))

    # A hit in AOTAutograd's cache would return code that does not count. Inductor's cache stays on.
    with _torch.no_autograd_cache():
        compiled: Callable[..., Any] = _torch.compile_with_inductor(
            graph, example_inputs, compile_part, dict(patches) or None
        )
    return compiled


def _compile_with_aot_eager(
    graph: fx.GraphModule, example_inputs: Any, add_graph: AddGraph, patches: Mapping[str, Any]
) -> Callable[..., Any]:
    def interpret(part: fx.GraphModule, _inputs: Any, *, is_backward: bool) -> Callable[..., Any]:
        return count_runs(add_graph(part, is_backward), fx.Interpreter(part).boxed_run)

    if patches:
        raise TargetError(_NO_OPTIONS)
    with _torch.no_autograd_cache():
        compiled: Callable[..., Any] = _torch.aot_autograd(
            fw_compiler=partial(interpret, is_backward=False),
            bw_compiler=partial(interpret, is_backward=True),
        )(graph, example_inputs)
    return compiled


def _merge_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return inductor's options for a mode of ``torch.compile``, with ``options`` on top."""
    patches: dict[str, Any] = {}
    if mode is not None and mode != "default":
        patches.update(_torch.options_of_mode(mode))
    patches.update(options or {})
    return patches
