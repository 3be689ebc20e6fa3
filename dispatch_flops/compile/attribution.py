"""Attribute operators of compiled graphs to a module and a phase.

A node's ``nn_module_stack`` lists the ids of the modules in which torch.compile traced it; a
backward node has the stack of its forward node. The module in whose call the compiled function runs
is not in the stack. It is found among the Python frames.
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
from dispatch_flops.compile.node_operators import is_seeded_again
from dispatch_flops.compile.node_stacks import module_stack
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.python_frames import ACCUMULATION, running_modules
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
    fqn: the module in whose call the function runs.
    function_id: the Python function of which it is a part. Code after a graph break has its own.
    used_params: ids of the parameters among the inputs.
    called_module: the module by whose parameters runs are told apart: its own, or the only one that
        the function calls. None without one. called_fqn: the fqn of that one.
    parameter_positions: positions, among the inputs of the function, of parameters of that module
        and of those below it.
    is_of_compiled_autograd: the function is a backward pass that torch.compile traced.
    own_module: the module in whose call the function runs; None if in none's.
    is_forward: the function is the forward of that one, or the rest of it after a graph break.
    """

    def __init__(self, names: ModuleNames, traced: fx.GraphModule, shared_keys: set[str]) -> None:
        self._names = names
        self._shared_keys = shared_keys
        self._modules = {id(module): module for module in _all_modules(names)}
        self.function_id = str(traced.meta.get("dynamo_compile_id", id(traced))).partition("/")[0]
        self.is_of_compiled_autograd = self.function_id.startswith("!")
        self.own_module: nn.Module | None = None
        self.fqn = self._find_own_fqn(traced)
        self.is_forward = self.own_module is not None and _is_forward_compiled(self.own_module)
        self.used_params = {id(p) for _, _, p in _inputs(traced) if isinstance(p, nn.Parameter)}
        self.called_module, self.called_fqn = self._find_called(traced)
        own = _parameters_of(self.called_module, traced)
        self.parameter_positions = frozenset(own)
        self._parameter_paths = tuple(own.values())
        if self._has_siblings() and self.called_module is not None:
            self._shared_keys.update(str(id(module)) for module in self.called_module.modules())

    @property
    def may_be_shared(self) -> bool:
        """True if a run of the function tells by its parameters which module it calls."""
        return self.called_module is not None and bool(self._parameter_paths)

    @property
    def is_trained(self) -> bool:
        """True if a parameter of the called module requires a gradient."""
        called = self.called_module
        held = [_held(called, path) for path in self._parameter_paths]
        return any(found is not None and found.requires_grad for found in held)

    @property
    def keeps_parameters(self) -> bool:
        """True if the modules hold the same parameters all the time, which FSDP2 replaces."""
        modules = self._modules.values()
        return all(type(module) is _torch.class_of(module) for module in modules)

    def is_known(self, parameter: nn.Parameter) -> bool:
        """Return True for a parameter of one of the models."""
        return any(
            held is parameter
            for module in self._modules.values()
            for held in module._parameters.values()
        )

    def _has_siblings(self) -> bool:
        called = self.called_module
        return self.may_be_shared and any(
            module is not called and type(module) is type(called)
            for module in self._modules.values()
        )

    def find_sibling(self, parameter: nn.Parameter) -> str | None:
        """Return the fqn of the module that holds ``parameter`` where the traced one has its own.

        Its parameters become used ones. None without such a module of the same class.
        """
        for module in self._modules.values():
            if type(module) is not type(self.called_module):
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
        return self._fqns_of(module_stack(node))[-1][1]

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
        calls = {call for node in graph.nodes for call in self._calls_around(node)}
        return Counter(fqn for _, _, fqn in calls)

    def _calls_around(self, node: fx.Node) -> Iterator[tuple[str, str, str]]:
        """Yield what is one call's alone: torch.compile's key and name of it; and the fqn.

        torch.compile numbers the calls of a module by each name that the module has.
        """
        stack = module_stack(node)
        for key, fqn in self._fqns_of(stack)[1:]:
            yield key, str(stack[key][0]), fqn

    def _fqns_of(self, keys: Iterable[str]) -> list[tuple[str, str]]:
        """Return running calls as ``(torch.compile's key, fqn)``, outermost first.

        keys: torch.compile's, of the calls within that of the function.
        """
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
        """Return the fqn of the innermost running module that the graph does not call itself."""
        calls = [node for node in traced.graph.nodes if node.op.startswith("call_")]
        if self.is_of_compiled_autograd or (
            calls and all(is_from_optimizer(node) for node in calls)
        ):
            return OUTSIDE
        entered = {
            id(m) for node in traced.graph.nodes for _, m in self._modules_of(module_stack(node))
        }
        for module in self._running_modules():
            if id(module) not in entered:
                self.own_module = module
                return self._names.find(module, self._names.roots).fqn
        return OUTSIDE

    def _find_called(self, traced: fx.GraphModule) -> tuple[nn.Module | None, str]:
        """Return the called module and its fqn; ``(None, "outside")`` if there is none."""
        if self.is_of_compiled_autograd or _parameters_of(self.own_module, traced):
            return self.own_module, self.fqn
        stacks = [list(self._modules_of(module_stack(node))) for node in traced.graph.nodes]
        called = list({id(stack[0][1]): stack[0][1] for stack in stacks if stack}.values())
        if len(called) != 1:
            return self.own_module, self.fqn
        return called[0], self._names.find(called[0], self._names.roots).fqn

    def _running_modules(self) -> Iterator[nn.Module]:
        """Yield the modules whose calls led to this function, innermost first."""
        for key in running_modules():
            module = self._modules.get(key)
            if module is not None:
                yield module


def forwards_of(module: nn.Module) -> Iterator[Any]:
    """Yield the forward of a module and the functions that it wraps, as decorators do."""
    function = getattr(module.forward, "__func__", module.forward)
    while getattr(function, "__code__", None) is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_forward_compiled(module: nn.Module) -> bool:
    """Return True if what a backend compiles now is the module's forward, or the rest of it."""
    frame = _torch.compiled_frame()
    codes = [function.__code__ for function in forwards_of(module)]
    return frame is not None and any(
        code is frame.code or frame.code.co_name.startswith(f"{_torch.RESUMING}_{code.co_name}_at_")
        for code in codes
    )


def _parameters_of(module: nn.Module | None, traced: fx.GraphModule) -> dict[int, tuple[str, ...]]:
    """Return ``{position among the inputs: attributes from the module down to its parameter}``."""
    found: dict[int, tuple[str, ...]] = {}
    for position, source, value in _inputs(traced):
        path = tuple(_ATTRIBUTE.findall(source))
        if isinstance(value, nn.Parameter) and _held(module, path) is value:
            found[position] = path
    return found


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

    A forward node that the partitioner put into the backward graph is recomputation. It has a tag,
    or a node of the partitioner's own runs its operator. What ``torch.func.grad`` runs is one call
    in the traced function.
    """
    if is_from_optimizer(node):
        return "optimizer"
    tag = str(node.meta.get("partitioner_tag") or "")
    if is_backward:
        is_repeated = tag == "is_forward" or is_seeded_again(node)
        return "recompute" if is_repeated else "backward"
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
