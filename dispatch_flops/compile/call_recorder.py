"""Record the module calls that torch.compile traces, where the class of the module has a formula.

A graph has neither the arguments of a module's forward nor the structure of its result. They are
read where torch.compile traces the call. The nodes that the call makes are marked.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dispatch_flops import _torch
from dispatch_flops.compile.node_operators import INLINED
from dispatch_flops.compile.opaque_calls import OpaqueCall
from dispatch_flops.counting.formulas_not_asked import problem_in, problem_of_call
from dispatch_flops.counting.higher_order import HANDLERS
from dispatch_flops.operators import registry
from dispatch_flops.operators.registry import Rule


@dataclass(eq=False)
class Trace:
    """Opaque calls of one traced function, by mark.

    The function may be compiled in several parts. own: the call that it is itself, once known.
    """

    calls: dict[str, OpaqueCall] = field(default_factory=dict)
    own: OpaqueCall | None = None


class CallRecorder:
    """Records the calls of opaque modules for all backends that are alive."""

    def __init__(self) -> None:
        self._rules: dict[int, Mapping[Any, Rule]] = {}  # the backends' own
        self._traces: weakref.WeakKeyDictionary[Any, Trace] = weakref.WeakKeyDictionary()
        self._calls: weakref.WeakValueDictionary[str, OpaqueCall] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def add_backend(self, backend: Any, own_rules: Mapping[Any, Rule]) -> None:
        """Record calls for a backend, as long as it is alive."""
        if not self._rules:
            _torch.follow_traced_calls(self)
        key = id(backend)
        self._rules[key] = own_rules
        weakref.finalize(backend, self._remove, key).atexit = False

    def _remove(self, key: int) -> None:
        del self._rules[key]
        if not self._rules:
            _torch.follow_traced_calls(None)

    def call(self, mark: str) -> OpaqueCall | None:
        """Return the call that a mark stands for; None for another key of a module stack."""
        return self._calls.get(mark)

    def trace(self) -> Trace:
        """Return what was recorded of the function that a backend compiles now."""
        current = _torch.current_trace()
        return Trace() if current is None else self._traces.setdefault(current, Trace())

    def begin(
        self,
        module: nn.Module,
        backend: Any,
        trace: Any,
        stack: dict[str, Any],
        inside: tuple[str, ...],
    ) -> str | None:
        """Note that a call begins; return the mark of its nodes, or None without a formula."""
        known = self._rules.get(id(backend))
        # DDP's backend splits the graph for another one. One of them may be collected meanwhile.
        possible = list(self._rules.values()) if known is None else (known,)
        cls = _torch.class_of(module)
        if not any(cls in registry.module_rules(rules) for rules in possible):
            return None
        mark = f"dispatch_flops {next(self._numbers)}"
        call = OpaqueCall(mark, module, stack, inside)
        self._traces.setdefault(trace, Trace()).calls[mark] = self._calls[mark] = call
        return mark

    def end(self, mark: str, read: Callable[[], _torch.TracedValues], has_nodes: bool) -> None:
        """Note that the call has returned."""
        call = self._calls[mark]
        call.has_nodes = has_nodes
        uncounted = [name for name in call.inside if name in HANDLERS and name not in INLINED]
        problem = problem_in(uncounted[0]) if uncounted else problem_of_call()
        if problem is not None:
            call.problem = problem
        else:
            call.take(read)


RECORDER = CallRecorder()
