"""Backend for ``torch.compile`` that compiles as usual and counts the costs of its graphs."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import fx, nn

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.compile.attribution import NodeAttribution
from dispatch_flops.compile.call_recorder import RECORDER
from dispatch_flops.compile.compilers import Compiler
from dispatch_flops.compile.eager_parts import EagerParts
from dispatch_flops.compile.graph import GraphCost
from dispatch_flops.compile.graph_runs import (
    GraphRun,
    Runs,
    costs_by_phase,
    module_calls_of,
    module_phases_of,
    runs_of,
    uncounted_calls,
)
from dispatch_flops.compile.opaque_regions import LATER, OpaqueRegions
from dispatch_flops.compile.step import Step
from dispatch_flops.compile.step_parts import StepParts
from dispatch_flops.counting.aggregation import CallAggregator
from dispatch_flops.counting.first_call import call_facts
from dispatch_flops.counting.formulas_not_asked import FormulasNotAsked, note_on
from dispatch_flops.counting.meter_totals import Part, sample_count
from dispatch_flops.counting.metered_run import MeteredRun
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.placement import Placement, run_info
from dispatch_flops.counting.profile_builder import Observed, build_profile
from dispatch_flops.counting.python_frames import call_arguments
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.counting.uncounted import unknown_costs_text
from dispatch_flops.errors import TargetError, UncountedOpsError, UncountedWarning
from dispatch_flops.operators import (
    formulas,  # noqa: F401  (fills the registry)
    registry,
)
from dispatch_flops.operators.composites import taken_apart_of
from dispatch_flops.operators.conventions import Causal, Conventions, Flops
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.operators.operator_keys import name_of
from dispatch_flops.operators.registry import Formula
from dispatch_flops.profile import OUTSIDE, Profile, add_costs
from dispatch_flops.profile.cost import OpCost, Phase


def counting_backend(
    backend: str | Callable[..., Any] = "inductor",
    model: nn.Module | Sequence[nn.Module] | None = None,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    causal: Causal = "full",
    flops: Flops = "all",
    custom_mapping: Mapping[Any, Formula] | None = None,
    strict: bool = False,
    machine: Machine | None = None,
    window: int = 100,
) -> CountingBackend:
    """Return a backend for ``torch.compile(model, backend=...)`` that counts what its graphs run.

        backend = counting_backend("inductor", model)
        compiled = torch.compile(model, backend=backend)
        compiled(x).sum().backward()
        print(backend.total().flops)

    backend: the backend that compiles, by a name that ``torch.compile`` knows or as a callable.
        One that does not use AOTAutograd itself is given AOTAutograd's forward and backward graphs,
        one by one, in place of the function as it was traced.
    model: the model or models whose modules ``profile()`` names; None: it has totals only.
    mode, options: those of ``torch.compile``; one of them, and neither for "aot_eager".
    causal, flops, custom_mapping: as in ``FlopCounterMode``. The formula of a module class is asked
        for its calls in compiled code. Where it cannot be, the operators of the module are counted;
        an UncountedWarning, issued once for each class, and a note of the profile say why. That is
        so for a call with a graph break inside, for one in ``torch.cond`` or the like, and for a
        formula that is registered after the call was compiled. The same goes for formulas of
        composite operators, such as ``aten.linear``, and also where the compiler merges the
        operators of the call with others.
    strict: ``step()`` and ``total()`` raise UncountedOpsError if something that ran has no known
        cost. Without it (the default) they issue an UncountedWarning, once.
    machine: machine whose peaks MFU and HFU refer to; None (the default) for the device of
        ``model``, if its peaks are known.
    window: number of steps of ``window`` (default 100).

    Modules of one class may share a compiled graph, if they are compiled one by one or after a
    graph break. Each is shown with its own runs if it has parameters; without, the first of them is
    shown with the cost of all. Totals are exact either way.

    Raises TargetError for a backend that torch does not know and for a model that is not one, and
    ConfigError for a mode, options, convention or window that is not allowed.
    """
    return CountingBackend(
        Compiler(backend, mode, options),
        _as_models(model),
        conventions=Conventions(causal=causal, flops=flops),
        own_rules=registry.own_rules(custom_mapping),
        strict=strict,
        machine=machine,
        window=window,
    )


class CountingBackend(MeteredRun):
    """Backend that counts the runs of the graphs that it compiles.

    ``counting_backend`` makes one and has an example. graphs: the cost of each compiled graph.

    It has the readings of ``FlopMeter``: ``last_step``, ``window`` and ``run``, their totals and
    rates, and the state of a run. A step ends with a call of ``step()``. Rates are of the steps in
    which nothing was compiled.

    Example::

        backend = counting_backend("aot_eager", model)
        compiled = torch.compile(model, backend=backend)
        for _ in range(3):
            compiled(x).sum().backward()
            print(backend.step(samples=len(x)).total.macs)  # of this step
        print(backend.total_flops, backend.window.flops_per_s)
        print(backend.profile().by_module("backward"))
    """

    def __init__(
        self,
        compiler: Compiler,
        models: Sequence[nn.Module],
        *,
        conventions: Conventions,
        own_rules: Mapping[Any, registry.Rule],
        strict: bool,
        machine: Machine | None,
        window: int,
    ) -> None:
        super().__init__(machine, window)
        self.graphs: list[GraphCost] = []
        self._step_parts = StepParts(self.graphs)
        self._compiler = compiler
        self._names = ModuleNames(models)
        self._conventions = conventions
        self._own_rules = own_rules
        self._strict = strict
        self._warned = False
        self._problems: dict[Any, str] = {}  # of classes and operators
        self._not_asked = FormulasNotAsked()
        self._shared_keys: set[str] = set()  # as ``NodeAttribution`` adds them
        self._followed: set[OpOverload] | None = None  # composite operators, by all functions
        self._eager_parts = EagerParts(self, self._names)
        self._first_call: dict[str, Any] | None = None  # its facts, as ``call_facts`` returns them
        self._runs_at_last_step: Counter[GraphRun] = Counter()
        self._graphs_at_last_step = 0
        self._now = time.perf_counter
        self._last_step_s = self._now()
        RECORDER.add_backend(self, own_rules)

    def __call__(
        self,
        graph: fx.GraphModule,
        example_inputs: Any,
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile one traced function; ``torch.compile`` calls this.

        Raises ConfigError for mode or options that do not fit the backend.
        """
        self._eager_parts.read()
        with _torch.modes_disabled():
            attribution = NodeAttribution(self._names, graph, self._shared_keys)
            rules = registry.module_rules(self._own_rules)
            operators = self._composites_with_formulas()
            is_rewritten = self._compiler.rewrites_graphs
            regions = OpaqueRegions(attribution, graph, rules, operators, is_rewritten=is_rewritten)
        self._note_problems(regions)
        self._followed = operators & (operators if self._followed is None else self._followed)
        if attribution.is_of_compiled_autograd:
            _torch.keep_node_meta(graph)
        if self._first_call is None:
            self._first_call = self._facts_of_running_model()
        add_graph = partial(self._add_graph, attribution, regions)
        with regions.recorded():
            return self._compiler.compile(graph, example_inputs, add_graph, mode, options)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a CountingBackend belongs to the compiled code of its process and cannot be pickled; "
            "make one with counting_backend(...) in each process"
        )

    def __deepcopy__(self, memo: Any) -> CountingBackend:
        """Return the backend itself: a copy of a compiled model runs the same compiled code."""
        return self

    def __repr__(self) -> str:
        return f"<CountingBackend of {len(self.graphs)} graphs: {self.run.text()}>"

    def step(self, samples: int | None = None, tokens: int | None = None) -> Step:
        """Return what ran since the previous call, or since the backend was made.

        samples, tokens: the numbers of them in the step, for the rates; None if not known.

        Code that ``torch.compile`` left eager is in ``Step.uncounted``, with the number 1, from the
        step on in which it was found.

        Raises ConfigError if ``samples`` or ``tokens`` is not a count, and UncountedOpsError under
        ``strict`` if something has no known cost.
        """
        size = sample_count(samples) or 0, sample_count(tokens, "tokens") or 0
        now = self._now()
        runs = runs_of(self.graphs)
        new = runs - self._runs_at_last_step
        seconds, self._last_step_s = now - self._last_step_s, now
        self._runs_at_last_step = runs
        has_compiled = self._graphs_at_last_step != len(self.graphs)
        self._graphs_at_last_step = len(self.graphs)
        left_eager = self._left_eager()
        with _torch.modes_disabled():
            costs = costs_by_phase(self.graphs, new)
            parts = self._step_parts.of(new, left_eager)
        self._totals.add(parts, None if has_compiled else seconds, *size)
        return Step(costs=costs, seconds=seconds, uncounted=self._report_uncounted(new, left_eager))

    def _parts(self) -> Iterable[Part]:
        return self._step_parts.all()

    def _all_modules(self) -> Iterable[nn.Module]:
        return self._names.modules()

    def _forget_parts(self) -> None:
        self._step_parts = StepParts(self.graphs)

    def total(self) -> OpCost:
        """Return the cost of all runs so far by the formulas that apply now; raises as ``step``.

        Readings such as ``run`` have each step by those that applied when it ended.
        """
        runs = runs_of(self.graphs)
        self._report_uncounted(runs, self._left_eager())
        with _torch.modes_disabled():
            return add_costs(costs_by_phase(self.graphs, runs).values())

    def profile(self) -> Profile:
        """Return the costs of all runs so far by module, phase and operator.

        It lists what has no known cost (``Profile.uncounted_ops``).
        """
        with _torch.modes_disabled():
            notes = {"compiled graphs only: what ran outside of them is not counted": None}
            self._warn_of_formulas()
            for name, problem in self._formulas_not_asked().items():
                notes[note_on(name, problem)] = None
            module_phases, notes_on_runs = module_phases_of(self.graphs, runs_of(self.graphs))
            notes |= notes_on_runs
            used_params = set[int]().union(*(graph.used_params for graph in self.graphs))
            for cost in self._left_eager():
                outside: tuple[str, Phase] = (OUTSIDE, "forward")
                module_phases.setdefault(outside, ModulePhase(*outside)).counts[cost] = 1
            _, held = self._names.read_facts()
            return build_profile(
                CallAggregator().including(module_phases.values()),
                self._names,
                Observed(calls=module_calls_of(self.graphs), used_params=used_params),
                run_info(Placement.of_tensors(held), self._conventions, self._first_call),
                notes=tuple(notes),
            )

    def _left_eager(self) -> tuple[CallCost, ...]:
        return self._eager_parts.found(self.graphs)

    def _composites_with_formulas(self) -> set[OpOverload]:
        return taken_apart_of(registry.keys_with_formulas(self._own_rules))

    def _note_problems(self, regions: OpaqueRegions) -> None:
        self._problems = {**regions.problems, **self._problems}

    def _formulas_not_asked(self) -> dict[str, str]:
        """Return ``{class or operator: why its formula is not asked}`` of those that have one."""
        followed = self._followed
        later = set() if followed is None else self._composites_with_formulas() - followed
        problems = {**dict.fromkeys(later, LATER), **self._problems}
        return {
            name_of(getattr(target, "overloadpacket", target)): problem
            for target, problem in problems.items()
            if registry.formula_of(target, self._own_rules) is not None
        }

    def _warn_of_formulas(self) -> None:
        """Warn, once of each class or operator, that its formula is not asked."""
        for name, problem in self._formulas_not_asked().items():
            self._not_asked.add(name, problem)

    def _facts_of_running_model(self) -> dict[str, Any] | None:
        """Return the facts of the call of a model that is running now; None if none is."""
        for root in self._names.roots:
            module = root.module()
            arguments = call_arguments(module) if module is not None else None
            if module is not None and arguments is not None:
                return call_facts(module, module.forward, arguments)
        return None

    def _note_first_run(self) -> None:
        """Note inference mode, which torch.compile leaves while it compiles."""
        if self._first_call is not None and torch.is_inference_mode_enabled():
            self._first_call["grad_mode"] = "inference"

    def _report_uncounted(self, runs: Runs, left_eager: Iterable[CallCost]) -> dict[str, int]:
        """Return ``{name: calls}`` of what has no known cost; warn or raise if there is any."""
        self._warn_of_formulas()
        costs: Counter[CallCost] = Counter(left_eager)
        with _torch.modes_disabled():
            costs += uncounted_calls(self.graphs, runs)
        found: Counter[str] = Counter()
        for cost, calls in costs.items():
            found[cost.op] += calls
        errors = {cost.op: cost.error for cost in costs if cost.error}
        if found and (self._strict or not self._warned):
            text = unknown_costs_text(found, errors)
            if self._strict:
                raise UncountedOpsError(text)
            self._warned = True
            warnings.warn(text, UncountedWarning, stacklevel=3)
        return dict(found)

    def _add_graph(
        self,
        attribution: NodeAttribution,
        regions: OpaqueRegions,
        graph: fx.GraphModule,
        is_backward: bool,
    ) -> GraphCost:
        """Add a graph that is about to be compiled, and return its cost."""
        with _torch.modes_disabled():
            cost = GraphCost(
                graph,
                attribution,
                regions=regions,
                is_backward=is_backward or attribution.is_of_compiled_autograd,
                conventions=self._conventions,
                own_rules=self._own_rules,
                on_first_run=self._note_first_run if not self.graphs else None,
            )
        self.graphs.append(cost)
        self._note_problems(regions)
        return cost


def _as_models(given: Any) -> tuple[nn.Module, ...]:
    if given is None:
        return ()
    models = (given,) if isinstance(given, nn.Module) else given
    if not isinstance(models, (list, tuple)) or not all(isinstance(m, nn.Module) for m in models):
        raise TargetError(f"model={given!r:.60}: pass an nn.Module, a list of them, or None")
    return tuple(models)
