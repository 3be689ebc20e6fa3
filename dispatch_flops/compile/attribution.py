"""Attribute operators of compiled graphs to a module and a phase.

A node's ``nn_module_stack`` lists the ids of the modules in which torch.compile traced it; a
backward node has the stack of its forward node. The module whose ``forward`` is the compiled
function is not in the stack. It is found as the owner of the graph's inputs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from dispatch_flops import _torch
from dispatch_flops.compile.node_stacks import module_stack
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.python_frames import running_modules
from dispatch_flops.counting.thread_state import ACCUMULATION
from dispatch_flops.profile import OUTSIDE
from dispatch_flops.profile.cost import Phase

_ATTRIBUTE = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_FILE = re.compile(r'File "([^"]*)", line')
_GRADIENTS = "_autograd_grad"  # the call by which torch.func differentiates
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)


class NodeAttribution:
    """Modules to which the nodes of one traced function belong.

    traced: the function as torch.compile traced it, before AOTAutograd.
    shared_keys: of modules in functions that siblings run as well. Each run of such a function
        leads to the same graph of compiled autograd, whose nodes then belong to no module. The
        function adds to them.
    fqn: the module whose forward the function is.
    function_id: the Python function of which it is a part. Code after a graph break has its own.
    used_params: ids of the parameters among the inputs.
    parameter_positions: positions, among the inputs of the function, of its own module's
        parameters, and of those below it.
    is_of_compiled_autograd: the function is a backward pass that torch.compile traced.
    own_module: the module whose forward the function is; None if it is not one's.
    """

    def __init__(
        self, names: ModuleNames, traced: fx.GraphModule, shared_keys: set[str] | None = None
    ) -> None:
        self._names = names
        self._shared_keys = set() if shared_keys is None else shared_keys
        self._modules = {id(module): module for module in _all_modules(names)}
        self.function_id = str(traced.meta.get("dynamo_compile_id", id(traced))).partition("/")[0]
        self.is_of_compiled_autograd = self.function_id.startswith("!")
        self.own_module: nn.Module | None = None
        self.fqn = self._find_own_fqn(traced)
        self.used_params = {id(p) for _, _, p in _inputs(traced) if isinstance(p, nn.Parameter)}
        own = self._own_parameters(traced)
        self.parameter_positions = frozenset(own)
        self._parameter_paths = tuple(own.values())
        if self.has_siblings and self.own_module is not None:
            self._shared_keys.update(str(id(module)) for module in self.own_module.modules())

    @property
    def has_siblings(self) -> bool:
        """True if another module of the model might run the same compiled function."""
        own = self.own_module
        return (
            own is not None
            and bool(self._parameter_paths)
            and any(
                module is not own and type(module) is type(own) for module in self._modules.values()
            )
        )

    def find_sibling(self, parameter: nn.Parameter) -> str | None:
        """Return the fqn of the module that holds ``parameter`` where the traced one has its own.

        Its parameters become used ones. None without such a module of the same class.
        """
        for module in self._modules.values():
            if type(module) is not type(self.own_module):
                continue
            held = [_held(module, path) for path in self._parameter_paths]
            if any(found is parameter for found in held):
                self.used_params.update(id(found) for found in held if found is not None)
                return self._names.find(module, self._names.roots).fqn
        return None

    def fqn_of(self, node: fx.Node) -> str:
        """Return the fqn of the module to which the node belongs."""
        if node.meta.get("is_gradient_acc"):
            return ACCUMULATION
        return self._stack_of(node)[-1][1]

    def fqn_of_call(self, stack: Mapping[str, Any], module: nn.Module | None) -> str:
        """Return the fqn of a module that is called within these, as torch.compile keeps them."""
        keys = [*stack, *(() if module is None else (str(id(module)),))]
        return self._fqns_of(keys)[-1][1]

    def module_named(self, fqn: str) -> nn.Module | None:
        """Return the module of that fqn; None if it does not exist any more."""
        named = self._names.by_fqn.get(fqn)
        return None if named is None else named.module()

    def module_calls(self, graph: fx.Graph) -> dict[str, int]:
        """Return ``{fqn: its calls in one run of the graph}`` of the modules below ``fqn``."""
        calls = {call for node in graph.nodes for call in self._stack_of(node)[1:]}
        return Counter(fqn for _, fqn in calls)

    def _stack_of(self, node: fx.Node) -> list[tuple[str, str]]:
        """Return the running calls as ``(torch.compile's key, fqn)``, outermost first."""
        return self._fqns_of(module_stack(node))

    def _fqns_of(self, keys: Iterable[str]) -> list[tuple[str, str]]:
        callers = list(self._names.roots)
        stack = [("", self.fqn)]
        for key, module in self._modules_of(keys):
            named = self._names.find(module, callers)
            callers.append(named)
            stack.append((key, named.fqn))
        return stack

    def _modules_of(self, keys: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
        keys = list(keys)
        ids = [str(key).partition("@")[0] for key in keys]  # "@1" where one is called again
        if self.is_of_compiled_autograd and not self._shared_keys.isdisjoint(ids):
            return
        for key, digits in zip(keys, ids, strict=True):
            module = self._modules.get(int(digits)) if digits.isdigit() else None
            if module is not None:
                yield key, module

    def _find_own_fqn(self, traced: fx.GraphModule) -> str:
        """Return the fqn of the module whose forward was compiled; "outside" for a function."""
        calls = [node for node in traced.graph.nodes if node.op.startswith("call_")]
        if self.is_of_compiled_autograd or (
            calls and all(is_from_optimizer(node) for node in calls)
        ):
            return OUTSIDE
        entered = {
            id(m) for node in traced.graph.nodes for _, m in self._modules_of(module_stack(node))
        }
        for _, source, value in _inputs(traced):
            owner = self._find_owner(value, _ATTRIBUTE.findall(source))
            if owner is not None:
                if id(owner) in entered:
                    return OUTSIDE
                self.own_module = owner
                return self._names.find(owner, self._names.roots).fqn
        for module in self._running_modules():
            if id(module) not in entered:
                self.own_module = module
                return self._names.find(module, self._names.roots).fqn
        return OUTSIDE

    def _running_modules(self) -> Iterator[nn.Module]:
        """Yield the modules whose calls led to this function, innermost first.

        A module that is compiled in place has no frame of its own.
        """
        running = list(running_modules())
        frame = _torch.compiled_frame()
        if frame is not None and frame.code.co_varnames:
            running.insert(0, id(frame.variables.get(frame.code.co_varnames[0])))
        for key in running:
            module = self._modules.get(key)
            if module is not None:
                yield module

    def _own_parameters(self, traced: fx.GraphModule) -> dict[int, tuple[str, ...]]:
        """Return ``{position among the inputs: attributes from the own module down}``."""
        own: dict[int, tuple[str, ...]] = {}
        for position, source, value in _inputs(traced):
            path = tuple(_ATTRIBUTE.findall(source))
            if isinstance(value, nn.Parameter) and _held(self.own_module, path) is value:
                own[position] = path
        return own

    def _find_owner(self, value: Any, attributes: list[str]) -> nn.Module | None:
        """Return the module that has ``value`` at the end of this chain of attributes."""
        if value is None or not attributes:
            return None
        for module in self._modules.values():
            if _held(module, attributes) is value:
                return module
        return None


def _held(module: nn.Module | None, attributes: Sequence[str]) -> Any:
    """Return the parameter or buffer at the end of this chain of attributes; None without one."""
    if not attributes:
        return None
    *path, last = attributes
    for name in path:
        module = module._modules.get(name) if module is not None else None
    if module is None:
        return None
    found = module._parameters.get(last)
    return module._buffers.get(last) if found is None else found


def is_from_optimizer(node: fx.Node) -> bool:
    """Return True if code of torch.optim made the node, not code that it called."""
    files = _FILE.findall(str(node.meta.get("stack_trace") or ""))
    own = [file for file in files if not file.startswith(_torch.POLYFILLS)]
    return bool(own) and own[-1].startswith(_OPTIMIZERS)


def phase_of(node: fx.Node, *, is_backward: bool) -> Phase:
    """Return the phase of a node.

    A forward node that the partitioner put into the backward graph is recomputation. What
    ``torch.func.grad`` runs is one call in the traced function.
    """
    if is_from_optimizer(node):
        return "optimizer"
    tag = str(node.meta.get("partitioner_tag") or "")
    if is_backward:
        return "recompute" if tag == "is_forward" else "backward"
    called = [name for name, _ in node.meta.get("source_fn_stack") or ()]
    is_gradient = any(str(name).startswith(_GRADIENTS) for name in called)
    return "backward" if is_gradient or tag.endswith("backward") else "forward"


def _all_modules(names: ModuleNames) -> Iterator[nn.Module]:
    for root in names.roots:
        module = root.module()
        if module is not None:
            yield from module.modules()


def _inputs(traced: fx.GraphModule) -> Iterator[tuple[int, str, Any]]:
    """Yield ``(position, expression in the program, tensor)`` of a traced function's inputs."""
    for position, node in enumerate(traced.graph.find_nodes(op="placeholder")):
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        if argument is None or source is None:
            continue
        name = source.name
        try:
            yield position, (name() if callable(name) else name), argument.example
        except AssertionError:  # torch.compile has dropped the example
            continue
