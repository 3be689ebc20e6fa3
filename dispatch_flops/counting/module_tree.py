"""Names of modules as nodes of a tree, and functions that read the tree from the modules."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import nn

from dispatch_flops.counting.module_facts import FactsTable, ModuleFacts
from dispatch_flops.counting.wrappers import WRAPPED, wrapping_attribute
from dispatch_flops.profile import OUTSIDE

_UNREAD = ModuleFacts("")
_UNNAMED = "<unnamed>"
_MODULE = "<module>"
_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(slots=True, eq=False)
class ModuleName:
    """One name of a module, as a node of the tree of modules.

    is_shared: the module, or one above it, has several parents: its name depends on its caller.
    is_wrapper: the module is a wrapper of the module of that name, such as ``torch.compile``'s.
    is_expert: the module is an expert of a mixture, an entry of a ModuleList or ModuleDict. The
        container's name or class, or the entry's class, says "expert".
    facts_so_far: as they were when the module got the name, or were asked for. read: where they
        have been read since.
    holders: every parent that holds the module, with the attribute's name.
    held_elsewhere: modules that the module holds, but that are named below another parent.
    same_as: the module's canonical name, if this is another name of the module or its wrapper.
    """

    fqn: str
    module: weakref.ref[nn.Module]
    parent: ModuleName | None
    is_shared: bool = False
    is_wrapper: bool = False
    is_expert: bool = False
    facts_so_far: ModuleFacts = _UNREAD
    holders: tuple[tuple[ModuleName, str], ...] = ()
    held_elsewhere: tuple[ModuleName, ...] = ()
    same_as: ModuleName | None = None
    read: tuple[FactsTable, int] | None = None

    @property
    def facts(self) -> ModuleFacts:
        """The facts as they were when they were last read; the module may be gone by now."""
        if self.read is not None:
            table, position = self.read
            self.facts_so_far, self.read = table.row(position), None
        return self.facts_so_far

    def canonical(self) -> ModuleName:
        """Return the canonical name of the module."""
        named = self
        while named.same_as is not None:
            named = named.same_as
        return named


def children_last_first(
    named: ModuleName, module: nn.Module
) -> list[tuple[ModuleName, str, nn.Module]]:
    """Return ``(named, attribute, child)`` for every child of ``module``, whose name is given.

    The attribute of the module that a wrapper holds is ``WRAPPED``.
    """
    wrapping = wrapping_attribute(module)
    children = [
        (named, WRAPPED if name == wrapping else name, child)
        for name, child in module._modules.items()
        if child is not None
    ]
    children.reverse()
    return children


def sort_children(named: ModuleName, children: list[str]) -> list[str]:
    """Sort fqns of children in the order of the module; those that it does not hold come last."""
    if len(children) < 2:
        return children
    names = [join(named.fqn, name) for name in named.facts.children]
    if names == children:
        return names
    position = {fqn: number for number, fqn in enumerate(names)}
    return sorted(children, key=lambda fqn: position.get(fqn, len(position)))


def find_path(top: nn.Module, module: nn.Module) -> list[str] | None:
    """Return the attribute names from ``top`` down to ``module``; None if it is not below."""
    above: dict[int, tuple[nn.Module, str]] = {}
    queue = [top]
    for at in queue:
        for name, child in at._modules.items():
            if child is not None and id(child) not in above:
                above[id(child)] = at, name
                queue.append(child)
        if id(module) in above:
            break
    else:
        return None
    path: list[str] = []
    while module is not top:
        module, name = above[id(module)]
        path.append(name)
    return path[::-1]


def is_expert(module: nn.Module, parent: ModuleName) -> bool:
    """Return True for an entry of a ModuleList or ModuleDict whose names say "expert"."""
    container = parent.module()
    if not isinstance(container, _LISTS):
        return False
    holder = parent.fqn.rsplit(".", 1)[-1]
    return "expert" in f"{holder} {type(module).__name__} {type(container).__name__}".lower()


def join(parent: str, name: str) -> str:
    """Join fqns: ``"a"`` and ``"b"`` to ``"a.b"``; below the root, ``""``, to ``"b"``.

    A child that is called ``""`` is named ``<unnamed>``, for ``""`` is the root. A child of the
    root that is called as what runs outside the model is gets another name.
    """
    if parent:
        return f"{parent}.{name or _UNNAMED}"
    if name == OUTSIDE or name.startswith(f"{OUTSIDE}."):
        return f"{_MODULE} {name}"
    return name or _UNNAMED
