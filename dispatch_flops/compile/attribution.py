"""Whose work is a node of a compiled graph: the modules that torch.compile wrote on it.

A node's ``nn_module_stack`` names the modules that it was traced in, by their ids; a backward
node has its forward node's. The module whose ``forward`` is itself the compiled function is not
in it: it is found as the owner of what the graph takes in under its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from dispatch_flops import _torch
from dispatch_flops.counting.module_names import ModuleName, ModuleNames
from dispatch_flops.counting.thread_state import ACCUMULATION
from dispatch_flops.profile import OUTSIDE
from dispatch_flops.profile.cost import Phase

_STEP = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_FILE = re.compile(r'File "([^"]*)", line')
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)


class Places:
    """Places of one traced function's nodes.

    top: the function, as torch.compile traced it, before AOTAutograd.
    function: of which Python function it is a part; what follows a graph break is another one.
    own: the fqn of the module whose forward it is.
    used_params: ids of the parameters that it takes in.
    """

    def __init__(self, names: ModuleNames, top: fx.GraphModule) -> None:
        self._names = names
        self._modules = {id(module): module for module in _all_modules(names)}
        self.function = str(top.meta.get("dynamo_compile_id", id(top))).partition("/")[0]
        self.own = self._function_itself(top)
        self.used_params = {id(p) for _, p in _inputs(top) if isinstance(p, nn.Parameter)}

    def of(self, node: fx.Node) -> str:
        """The fqn that the node belongs to."""
        if node.meta.get("is_gradient_acc"):
            return ACCUMULATION
        return self._stack(node)[-1][1]

    def calls(self, graph: fx.Graph) -> dict[str, int]:
        """How often one run of the graph runs each module below ``own``."""
        keys = {step for node in graph.nodes for step in self._stack(node)[1:]}
        calls: dict[str, int] = {}
        for _, fqn in keys:
            calls[fqn] = calls.get(fqn, 0) + 1
        return calls

    def _stack(self, node: fx.Node) -> list[tuple[str, str]]:
        """``(torch.compile's key of the call, fqn)``, outermost first."""
        callers = list(self._names.roots)
        stack = [("", self.own)]
        for key, module in self._traced_in(node):
            named = self._names.find(module, callers)
            callers.append(named)
            stack.append((key, named.fqn))
        return stack

    def _traced_in(self, node: fx.Node) -> Iterator[tuple[str, nn.Module]]:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        for key in stack:
            digits = str(key).partition("@")[0]  # "@1" where a module is called a second time
            module = self._modules.get(int(digits)) if digits.isdigit() else None
            if module is not None:
                yield key, module

    def _function_itself(self, top: fx.GraphModule) -> str:
        """The fqn of the module whose forward was compiled; the outside where it is a function."""
        made = [node for node in top.graph.nodes if node.op.startswith("call_")]
        if made and all(is_optimizers(node) for node in made):
            return OUTSIDE
        entered = {id(m) for node in top.graph.nodes for _, m in self._traced_in(node)}
        for path, value in _inputs(top):
            owner = self._owner(value, _STEP.findall(path))
            if owner is not None:
                return OUTSIDE if id(owner) in entered else self._find(owner).fqn
        for root in self._names.roots:
            module = root.module()
            if module is not None and id(module) not in entered:
                return root.fqn
        return OUTSIDE

    def _owner(self, value: Any, steps: list[str]) -> nn.Module | None:
        """The module that has ``value`` at the end of ``steps``."""
        if value is None or not steps:
            return None
        *path, last = steps
        for module in self._modules.values():
            at: Any = module
            for name in path:
                at = at._modules[name] if at is not None and name in at._modules else None
            if at is not None and any(
                value is held for held in (at._parameters.get(last), at._buffers.get(last))
            ):
                return module
        return None

    def _find(self, module: nn.Module) -> ModuleName:
        return self._names.find(module, self._names.roots)


def is_optimizers(node: fx.Node) -> bool:
    """True if a line of torch.optim, and of nothing that it calls in turn, made the node."""
    files = _FILE.findall(str(node.meta.get("stack_trace") or ""))
    own = [file for file in files if not file.startswith(_torch.POLYFILLS)]
    return bool(own) and own[-1].startswith(_OPTIMIZERS)


def phase_of(node: fx.Node, *, is_backward: bool) -> Phase:
    """Forward work that the partitioner put into the backward graph is recomputation."""
    if is_optimizers(node):
        return "optimizer"
    tag = str(node.meta.get("partitioner_tag") or "")
    if is_backward:
        return "recompute" if tag == "is_forward" else "backward"
    return "backward" if tag.endswith("backward") else "forward"


def _all_modules(names: ModuleNames) -> Iterator[nn.Module]:
    for root in names.roots:
        module = root.module()
        if module is not None:
            yield from module.modules()


def _inputs(top: fx.GraphModule) -> Iterator[tuple[str, Any]]:
    """``(where the program has it, the tensor)`` for every input of a traced function."""
    for node in top.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        if argument is None or source is None:
            continue
        name = source.name
        try:
            yield (name() if callable(name) else name), argument.example
        except AssertionError:  # torch.compile has let go of its example
            continue
