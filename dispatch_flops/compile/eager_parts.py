"""Names of the code that ``torch.compile`` left to run eagerly, whose cost is in no graph.

Such code follows a graph break, or is a whole function that could not be compiled or has exceeded
the recompile limit. A graph break is named for the backend that torch.compile compiled for. A whole
function is named for every backend: torch.compile marks its code, so that no backend gets it, and
records that once in a process. Backends that are made later name it as long as they have no graph.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import parallel

from dispatch_flops import _torch
from dispatch_flops.compile.graph import GraphCost
from dispatch_flops.compile.graph_runs import module_calls_of
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.operators.costing import CallCost

# Graph breaks at which only Python runs, or a tensor is read. Beginnings of torch's reasons.
_WITHOUT_ARITHMETIC = (
    "Call to `torch._dynamo.graph_break()`",
    "DDPOptimizer intentional graph-break",
    "generic_jump",
    "Data-dependent branching",
    "Unsupported Tensor.item()",
    "logging.Logger method",
)
# Those among them that Python code meets which has no tensor, and is then not compiled.
_WITHOUT_TENSORS = ("logging.Logger method", "Failed to trace builtin operator")
_IN_UNCOMPILED_CALL = (
    "a graph break in a call such as torch.utils.checkpoint's, whose function is then left eager"
)
_EAGER_BACKWARD = "a graph break in a torch.autograd.Function, whose backward is then left eager"
# Files whose functions run no operator themselves: the standard library's, and DDP's.
_FOLDERS = frozenset(Path(str(m.__file__)).parent for m in (contextlib, logging, parallel))
_LAYERS = Path(str(nn.modules.__file__)).parent
_TORCH = Path(str(torch.__file__)).parent
# torch.compile does not enter them by themselves; those of the first stand for builtins.
_INLINED_ALONE = {_TORCH / "_dynamo" / "polyfills", _TORCH / "optim"}
_AUTOGRAD_FUNCTIONS = str(_TORCH / "_functorch" / "autograd_function.py")
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_LEFT_EAGER = "torch.compile does not compile torch's own layers in it one by one"
_COMPILED_IN_PLACE = (
    "torch.compile leaves torch's own layers eager if their method compile() is called; compile "
    "them by torch.compile(layer), or a module of your own around them"
)
_Place = tuple[Any, Any, Any]  # of a frame: function, file and line
_TORCHSCRIPT = "torch.compile does not compile TorchScript"
_PRINTING = ("Failed to trace builtin operator", "`print`")
_NO_GRAPH = CallCost(
    "eager code: all of it",
    "unknown",
    error="torch.compile made no graph, as of torch.nn's own classes behind hooks of DDP or FSDP",
)


class _BreakOwners:
    """For which backends the graphs of this process ended early, where that was seen."""

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}  # ids of a reason and of a backend
        self._compiling: tuple[int, Any] = (0, None)
        self._asked = weakref.WeakSet[Any]()

    def watch(self) -> None:
        """Follow compilations from now on."""
        if _torch.call_at_compilations(self._begin, self._end):
            self._owners.clear()

    def is_of_other(self, reason: Any, backend: Any) -> bool:
        """Return True if the graph was compiled for another backend."""
        return self._owners.get(id(reason), id(backend)) != id(backend)

    def was_asked(self, backend: Any) -> bool:
        """Return True if torch.compile has traced code for the backend."""
        return backend in self._asked

    def _begin(self, _: Any) -> None:
        self._compiling = len(_torch.graph_breaks()), _torch.compiling_backend()
        with contextlib.suppress(TypeError):  # a backend that cannot be referred to weakly
            self._asked.add(self._compiling[1])

    def _end(self, _: Any) -> None:
        known, backend = self._compiling
        if backend is not None:
            for reason in _torch.graph_breaks()[known:]:
                self._owners[id(reason)] = id(backend)


_BREAK_OWNERS = _BreakOwners()


class EagerParts:
    """Collects what was left eager since this object was made.

    backend: whose graphs are counted. names: of the modules of its models.
    """

    def __init__(self, backend: Any, names: ModuleNames) -> None:
        self._backend = weakref.ref(backend)
        self._names = names
        _BREAK_OWNERS.watch()
        self._found: dict[str, CallCost] = {}
        self._inlined: dict[_Place, CallCost] = {}  # functions that must have graphs of their own
        self._entered: set[_Place] = set()  # those that have, by where their graphs ended
        self._known_graphs = 0
        self._last_break = _last(_torch.graph_breaks())
        self._last_compilation = _last(_torch.compilations())

    def found(self, graphs: Sequence[GraphCost]) -> tuple[CallCost, ...]:
        """Return an unknown cost for each part found so far.

        graphs: what torch.compile has given the backend to compile.
        """
        self.read()
        if not graphs or len(graphs) != self._known_graphs:
            self._known_graphs = len(graphs)
            self._read_modules(module_calls_of(graphs))
        never_entered = (c for place, c in self._inlined.items() if place not in self._entered)
        found = self._found | {cost.op: cost for cost in never_entered}
        if not graphs and not found:
            return self._why_no_graph()
        return tuple(found.values())

    def _why_no_graph(self) -> tuple[CallCost, ...]:
        """Return an unknown cost for what may have run, where the backend got nothing to compile.

        torch.compile does not ask it for code that it marked before this object was made.
        """
        if _BREAK_OWNERS.was_asked(self._backend()):
            return (_NO_GRAPH,)
        failed = [_cost_of_failed(r) for r in _torch.compilations() if r.fail_type is not None]
        return tuple({cost.op: cost for cost in failed if cost is not None}.values())

    def read(self) -> None:
        """Read what torch has recorded; it keeps the last compilations only."""
        breaks, backend = _torch.graph_breaks(), self._backend()
        _BREAK_OWNERS.watch()
        for reason in _after(self._last_break, breaks):
            if _BREAK_OWNERS.is_of_other(reason, backend):
                continue
            stack = reason.user_stack or []
            self._entered.add(_where(stack[:1]))
            if not _is_without_arithmetic(reason.reason):
                self._add(_cost_of(*_where(stack), reason.reason))
            else:
                self._follow_inlined(stack[1:], reason.reason)
            for frame in stack:
                if self._leaves_layers_eager(frame):
                    self._add(_cost_of(frame.name, frame.filename, frame.lineno, _LEFT_EAGER))
        self._last_break = _last(breaks)
        records = _torch.compilations()
        for record in _after(self._last_compilation, records):
            if record.fail_type is not None:
                self._add(_cost_of_failed(record))
        self._last_compilation = _last(records)

    def _follow_inlined(self, frames: Sequence[Any], reason: str) -> None:
        """Note the function in whose call, inlined by others, a graph ended.

        Its caller then calls it as it is, and torch.compile compiles it by itself: it ends a graph
        at the same place. It does not where a function calls it that torch.compile does not enter,
        or autograd.
        """
        for frame in frames:
            if frame.filename == _AUTOGRAD_FUNCTIONS:
                self._add(_cost_of(*_where(frames), _EAGER_BACKWARD))
        followed = [frame for frame in frames if _has_tensors(frame, reason)]
        cost = _cost_of(*_where(followed), _IN_UNCOMPILED_CALL) if followed else None
        if cost is not None:
            self._inlined.setdefault(_where(followed), cost)

    def _read_modules(self, counted: Mapping[str, int]) -> None:
        """Find layers of torch's own that were compiled by their method ``compile``.

        counted: fqns of the modules that graphs have.
        """
        backend = self._backend()
        for module in self._names.modules():
            if _torch.backend_of_compiled_module(module) is backend:
                for layer in _layers_never_compiled(module):
                    if self._names.find(layer, self._names.roots).fqn not in counted:
                        self._add(_cost_of_never_compiled(layer))

    def _leaves_layers_eager(self, frame: Any) -> bool:
        """Return True if a module of torch's, in which a graph ended, calls layers of torch's.

        Such a module, as ``nn.Sequential``, then runs eagerly. torch.compile compiles the modules
        that it calls one by one, except torch's own.
        """
        file = Path(frame.filename)
        if file.parent != _LAYERS:
            return False
        modules = list(self._names.modules())
        called = [
            _file_of(child)
            for module in modules
            if _file_of(module) == file
            for child in module.children()
        ]
        return not modules or any(
            other is not None and other != file and other.parent == _LAYERS for other in called
        )

    def _add(self, cost: CallCost | None) -> None:
        if cost is not None:
            self._found.setdefault(cost.op, cost)


def _cost_of(function: Any, file: Any, line: Any, reason: str) -> CallCost | None:
    """Return the unknown cost of eager code; None for a file that runs no operator itself."""
    if Path(str(file)).parent in _FOLDERS:
        return None
    why = reason.partition("\n")[0]
    name = f"eager code: {why}"
    if function is not None:
        name = f"eager code: {function} ({Path(str(file)).name}:{line})"
    return CallCost(name, "unknown", error=why)


def _cost_of_failed(record: Any) -> CallCost | None:
    """Return the unknown cost of a whole function that could not be compiled."""
    place = record.co_filename, record.co_firstlineno
    return _cost_of(record.co_name, *place, str(record.fail_reason))


def _cost_of_never_compiled(layer: nn.Module) -> CallCost | None:
    """Return the unknown cost of a layer in a module that is compiled in place."""
    code = getattr(_forward_of(layer), "__code__", None)
    if code is None:
        return _cost_of(None, None, None, _TORCHSCRIPT)
    place = code.co_filename, code.co_firstlineno
    return _cost_of(code.co_qualname, *place, _COMPILED_IN_PLACE)


def _layers_never_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that torch.compile leaves eager in a module that is compiled in place.

    ``nn.Sequential`` runs nothing itself, and its layers are compiled one by one.
    """
    forward = _forward_of(module)
    if isinstance(module, nn.Sequential) and _torch.is_never_compiled(forward):
        for child in module.children():
            yield from _layers_never_compiled(child)
    elif forward is None or _torch.is_never_compiled(forward):
        yield module


def _last(records: list[Any]) -> Any:
    return records[-1] if records else None


def _after(known: Any, records: list[Any]) -> list[Any]:
    """Return what follows ``known``; everything if torch dropped it, as ``reset`` does."""
    positions = [i for i, record in enumerate(records) if record is known]
    return records[positions[-1] + 1 if positions else 0 :]


def _file_of(module: nn.Module) -> Path | None:
    """Return the file with the code of the module's forward."""
    code = getattr(_forward_of(module), "__code__", None)
    return Path(code.co_filename) if code is not None else None


def _forward_of(module: nn.Module) -> Any:
    """Return the forward that the class of a module defines; None for one of TorchScript."""
    return getattr(type(module), "forward", None)


def _has_tensors(frame: Any, reason: str) -> bool:
    """Return False for a function that torch.compile may not compile by itself.

    It leaves alone what has no tensor, such as what only prints, and comprehensions.
    """
    is_inlined_alone = not _INLINED_ALONE.isdisjoint(Path(frame.filename).parents)
    if is_inlined_alone or frame.name in _COMPREHENSIONS:
        return False
    return frame.name == "forward" or not reason.startswith(_WITHOUT_TENSORS)


def _where(stack: Any) -> _Place:
    frame = stack[-1] if stack else None
    return (frame.name, frame.filename, frame.lineno) if frame is not None else (None, None, None)


def _is_without_arithmetic(reason: str) -> bool:
    return reason.startswith(_WITHOUT_ARITHMETIC) or all(text in reason for text in _PRINTING)
