"""Opaque calls in the graphs of one compiled function: which nodes are theirs, who counts them.

What an opaque call runs in forward is not counted besides its formula. Its backward pass is counted
as operators. If a checkpoint recomputes the whole call, the formula is asked again; a part that is
recomputed is counted as operators.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import fx, nn

from dispatch_flops import _torch
from dispatch_flops.compile.attribution import NodeAttribution
from dispatch_flops.compile.call_recorder import RECORDER, Trace
from dispatch_flops.compile.node_calls import NodeCall
from dispatch_flops.compile.node_stacks import module_stack
from dispatch_flops.compile.opaque_calls import OpaqueCall
from dispatch_flops.counting.python_frames import call_arguments
from dispatch_flops.operators.registry import Rule
from dispatch_flops.profile.cost import Phase

_LATER = "it was registered after the call was compiled"
_NOT_CALLED = "its forward was called without the module"
_PART = "torch.compile compiled a part of the call"
_UNSEEN = "torch.compile does not trace its call as that of a module"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaCall:
    """Opaque call that a graph counts.

    times: in one run. around: opaque calls that enclose it.
    """

    call: OpaqueCall
    fqn: str
    phase: Phase
    times: int
    around: tuple[OpaqueCall, ...]


class OpaqueRegions:
    """Opaque calls of one function that a backend compiles.

    rules: of module classes. problems: ``{class: why its formula is not asked}`` of the modules
    that the function calls, and of its own, with a formula or without.
    """

    def __init__(
        self, attribution: NodeAttribution, traced: fx.GraphModule, rules: Mapping[type, Rule]
    ) -> None:
        self.problems: dict[type, str] = {}
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

    def around(self, node: fx.Node) -> tuple[OpaqueCall, ...]:
        """Return the opaque calls in which a forward node was made, outermost first."""
        return self._around(module_stack(node))

    def formula_calls(
        self, node_calls: Iterable[NodeCall], *, is_backward: bool
    ) -> tuple[FormulaCall, ...]:
        """Return the opaque calls that a graph with these operator calls counts."""
        occurrences: dict[OpaqueCall, set[Any]] = {}
        operators: dict[OpaqueCall, Counter[str]] = {}
        for node_call in node_calls:
            for call, occurrence in node_call.around:
                occurrences.setdefault(call, set()).add(occurrence)
                operators.setdefault(call, Counter()).update(node_call.arithmetic)
        if is_backward:
            counted = [call for call, found in operators.items() if call.is_recomputed_by(found)]
        else:
            counted = self._claimed
            for call, found in operators.items():
                call.operators += found
        for call in counted:
            call.make_templates()
        return tuple(
            FormulaCall(
                call=call,
                fqn=self._fqn_of(call),
                phase="recompute" if is_backward else "forward",
                times=max(1, len(occurrences.get(call, ()))),
                around=() if call is self._own else self._around(call.stack),
            )
            for call in counted
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
                self.problems.setdefault(cls, self._problem_of_unrecorded(cls))
            elif call.problem is None:
                return
            else:
                self.problems[cls] = call.problem

    def _problem_of_unrecorded(self, cls: type) -> str:
        return _UNSEEN if cls in self._rules else _LATER

    def _find_own(self, trace: Trace) -> OpaqueCall | None:
        """Return the call that the function is; None if it is not that of an opaque module."""
        if trace.own is None:
            trace.own = _own_call(self._attribution, self._rules)
        if trace.own is None or trace.own.problem is None:
            return trace.own
        self.problems[trace.own.cls] = trace.own.problem
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
    forward = _wrapped_with(frame.code, getattr(module.forward, "__func__", module.forward))
    given = call_arguments(module)
    if type(module) not in rules:
        call.problem = _LATER
    elif forward is None:
        is_rest = frame.code.co_name.startswith(_torch.RESUMING)
        call.problem = call.problem if is_rest else _PART
    elif given is None:
        call.problem = _NOT_CALLED
    elif frame.read is not None:
        read, signature = frame.read, inspect.signature(forward, follow_wrapped=False)
        call.take(lambda: _read_arguments(read, signature, module, *given))
    return call


def _wrapped_with(code: CodeType, function: Any) -> Any:
    """Return the function of that code among a function and those that it wraps; None if none."""
    while function is not None and getattr(function, "__code__", None) is not code:
        function = getattr(function, "__wrapped__", None)
    return function


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
