"""Opaque calls in the graphs of one compiled function: which nodes are theirs, who counts them.

They are calls of modules and of composite operators that have a formula of the user's. What one
runs in forward is not counted besides it. Its backward pass is counted as operators. If the whole
call is recomputed, the formula is asked again; a part that is recomputed is counted as operators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import fx, nn

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.compile.attribution import NodeAttribution, forwards_of
from dispatch_flops.compile.call_recorder import RECORDER, Trace
from dispatch_flops.compile.composite_regions import CompositeRegions
from dispatch_flops.compile.formula_calls import FormulaCall, Region, regions_of
from dispatch_flops.compile.node_calls import NodeCall, Opaque
from dispatch_flops.compile.node_stacks import module_stack
from dispatch_flops.compile.opaque_calls import OpaqueCall
from dispatch_flops.counting.python_frames import call_arguments
from dispatch_flops.operators.registry import Rule
from dispatch_flops.profile.cost import Phase

LATER = "it was registered after the call was compiled"
_NOT_CALLED = "its forward was called without the module"
_PART = "torch.compile compiled a part of the call"
_UNSEEN = "torch.compile does not trace its call as that of a module"


class OpaqueRegions:
    """Opaque calls of one function that a backend compiles.

    rules: of module classes. operators: composite ones that have a formula.
    is_rewritten: the compiler may merge operators before the backend has the graphs.
    """

    def __init__(
        self,
        attribution: NodeAttribution,
        traced: fx.GraphModule,
        rules: Mapping[type, Rule],
        operators: Iterable[OpOverload],
        *,
        is_rewritten: bool,
    ) -> None:
        self._problems: dict[type, str] = {}
        self._composites = CompositeRegions(
            attribution, traced, operators, self._around, is_rewritten=is_rewritten
        )
        self._attribution = attribution
        self._rules = rules
        trace = RECORDER.trace()
        self._own = self._find_own(trace)
        marks = set[str]()
        for node in _all_nodes(traced):
            marks.update(module_stack(node))
            self._note_problems(node)
        calls = [call for call in trace.calls.values() if call.problem is None]
        here = [call for call in calls if call.mark in marks or not call.has_nodes]
        if self._own is not None:
            here.append(self._own)
        self._claimed = [call for call in here if not call.is_claimed]
        for call in self._claimed:
            call.is_claimed = True

    @property
    def problems(self) -> Mapping[Any, str]:
        """``{class or operator: why its formula is not asked}`` of what the function calls.

        It has classes with a formula and without.
        """
        return {**self._problems, **self._composites.problems}

    def recorded(self) -> AbstractContextManager[None]:
        """Return a block in which AOTAutograd traces the function."""
        return self._composites.recorded()

    def around(self, phase: Phase, node: fx.Node) -> tuple[Opaque, ...]:
        """Return the opaque calls in which a node was made, outermost first."""
        modules = self._around(module_stack(node)) if phase in ("forward", "recompute") else ()
        return (*modules, *self._composites.around(node))

    def formula_calls(
        self, graph: fx.GraphModule, node_calls: Iterable[NodeCall], *, is_backward: bool
    ) -> tuple[FormulaCall, ...]:
        """Return the opaque calls that a graph with these operator calls counts."""
        regions = regions_of(node_calls)
        return (
            *self._module_calls(regions, is_backward=is_backward),
            *self._composites.formula_calls(graph, regions, is_backward=is_backward),
        )

    def _module_calls(
        self, regions: Mapping[Opaque, Region], *, is_backward: bool
    ) -> Iterator[FormulaCall]:
        own = {call: regions[call] for call in regions if isinstance(call, OpaqueCall)}
        if is_backward:
            counted = [call for call in own if call.is_recomputed_by(own[call].operators)]
        else:
            counted = self._claimed
            for call in own:
                call.operators += own[call].operators
        for call in counted:
            call.make_templates()
            yield FormulaCall(
                call=call,
                fqn=self._fqn_of(call),
                phase="recompute" if is_backward else "forward",
                times=len(own[call].runs) if call in own else 1,
                around=() if call is self._own else self._around(call.stack),
            )

    def _around(self, stack: Iterable[str]) -> tuple[OpaqueCall, ...]:
        known = (call for key in stack if (call := RECORDER.call(key)) and call.problem is None)
        return (*(() if self._own is None else (self._own,)), *known)

    def _fqn_of(self, call: OpaqueCall) -> str:
        if call is self._own:
            return self._attribution.fqn
        return self._attribution.fqn_of_call(call.stack, call.module())

    def _note_problems(self, node: fx.Node) -> None:
        if self._own is not None:
            return
        for key, (_, cls) in module_stack(node).items():
            call = RECORDER.call(key)
            if call is None:
                self._problems.setdefault(cls, _UNSEEN if cls in self._rules else LATER)
            elif call.problem is None:
                return
            else:
                self._problems[cls] = call.problem

    def _find_own(self, trace: Trace) -> OpaqueCall | None:
        """Return the call that the function is; None if it is not that of an opaque module."""
        if trace.own is None:
            trace.own = _own_call(self._attribution, self._rules)
        if trace.own is None or trace.own.problem is None:
            return trace.own
        self._problems[trace.own.target] = trace.own.problem
        return None


def _own_call(attribution: NodeAttribution, rules: Mapping[type, Rule]) -> OpaqueCall | None:
    """Return the call of the module to whose forward the compiled function belongs."""
    frame, module = _torch.compiled_frame(), attribution.own_module
    if frame is not None:
        first = frame.variables.get(next(iter(frame.code.co_varnames), ""))
        module = first if isinstance(first, nn.Module) else module
    if frame is None or module is None:
        return None
    call = OpaqueCall("", module, {})
    forward = next((one for one in forwards_of(module) if one.__code__ is frame.code), None)
    given = call_arguments(module)
    if call.target not in rules:
        call.problem = LATER
    elif forward is None:
        is_rest = frame.code.co_name.startswith(_torch.RESUMING)
        call.problem = call.problem if is_rest else _PART
    elif given is None:
        call.problem = _NOT_CALLED
    elif frame.read is not None:
        read, signature = frame.read, inspect.signature(forward, follow_wrapped=False)
        call.take(lambda: _read_arguments(read, signature, module, *given))
    return call


def _read_arguments(
    read: Callable[[Sequence[str]], _torch.TracedValues],
    signature: inspect.Signature,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _torch.TracedValues:
    """Return ``(args, kwargs, result)`` as the program gives them, not as parameters' values."""
    names = list(signature.bind(module, *args, **kwargs).arguments)[1:]
    (values, out), leaves, kept = read(names)
    by_name = dict(zip(names, values, strict=True))
    kinds = {name: signature.parameters[name].kind for name in names}
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for name, kind in kinds.items():
        if kind is inspect.Parameter.VAR_POSITIONAL:
            positional.extend(by_name[name])
        elif kind is inspect.Parameter.VAR_KEYWORD:
            keywords.update(by_name[name])
        elif name in kwargs:
            keywords[name] = by_name[name]
        else:
            positional.append(by_name[name])
    return _torch.TracedValues((tuple(positional), keywords, out), leaves, kept)


def _all_nodes(traced: fx.GraphModule) -> Iterator[fx.Node]:
    for module in traced.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes
