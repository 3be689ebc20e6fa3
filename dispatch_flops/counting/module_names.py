"""What a module is called: fully qualified names, also of shared, replaced and new modules.

A module has one canonical name (as ``named_modules()`` gives it) and, if several parents
hold it, one more for each place that it is called from. ``torch.compile``'s wrapper and the
module inside it are one: ``_orig_mod`` is no part of a name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from dispatch_flops.counting.compiled_modules import WRAPPED, wrapped_module
from dispatch_flops.counting.parameters import ParameterFacts, facts_of
from dispatch_flops.operators.tensors import untraced
from dispatch_flops.profile import OUTSIDE


@dataclass(slots=True, eq=False)
class ModuleName:
    """A place in the tree of modules: the name, and the module that was found there.

    shared: the module, or one above it, has several parents, so that its name depends on
    who calls it. wrapper: this is ``torch.compile``'s wrapper of the module of that name.
    expert: one of a mixture's experts: an entry of a ModuleList or ModuleDict, where the list's
    name or the entry's class says "expert".
    remembered: what its parameters were when it was named, where the module may be gone before
    it is asked for; class_name: likewise.
    also: what the module holds beside its children in the tree, whose names are elsewhere.
    same_as: the place of the module's own name, where this is another name of it or its wrapper.
    """

    fqn: str
    module: weakref.ref[nn.Module]
    parent: ModuleName | None
    is_shared: bool = False
    is_wrapper: bool = False
    is_expert: bool = False
    class_name: str = ""
    remembered: tuple[ParameterFacts, ...] = ()
    edges: list[tuple[ModuleName, str]] = field(default_factory=list)
    also: list[ModuleName] = field(default_factory=list)
    same_as: ModuleName | None = None

    def itself(self) -> ModuleName:
        """The one place that stands for the module under all its names."""
        named = self
        while named.same_as is not None:
            named = named.same_as
        return named

    def parameters(self) -> Iterable[ParameterFacts]:
        """Of the parameters that the module holds itself."""
        module = self.module()
        return self.remembered if module is None else facts_of(module)


class ModuleNames:
    """Names of every module below some roots, and of those met on the way.

    With one root its fqn is ``""``. With several, each root is named by its class, numbered
    where that is not unique. Without any, the modules that are called first become roots.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._by_id: dict[int, ModuleName] = {}
        self.nodes: dict[str, ModuleName] = {}
        self.roots: list[ModuleName] = []
        self._adopting = not roots
        for root in roots:
            if id(root) not in self._by_id:
                name = "" if len(roots) == 1 else self._unique(type(root).__name__)
                self.roots.append(self._add_tree(root, name, None))

    def known(self, module: nn.Module) -> ModuleName | None:
        """The place of a module that has one name, whoever calls it; None for all others."""
        named = self._by_id.get(id(module))
        if named is None or named.is_shared or named.module() is not module:
            return None
        return named

    def find(self, module: nn.Module, callers: Sequence[ModuleName]) -> ModuleName:
        """The place of ``module``, now called from the last of ``callers`` (outermost first)."""
        named = self._by_id.get(id(module))
        if named is not None and named.module() is module:
            if not named.is_shared:
                return named
            return self._as_called(named, callers)
        return self._meet(module, callers[-1] if callers else None)

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules met so far that are still alive."""
        for named in list(self.nodes.values()):
            module = named.module()
            if module is not None:
                yield module

    def children(self) -> dict[str, list[str]]:
        """``{fqn: its children's fqns}`` in the order of the model."""
        nodes = dict(self.nodes)  # threads may go on meeting modules
        below: dict[str, list[str]] = {fqn: [] for fqn in nodes}
        for fqn, named in nodes.items():
            if named.parent is not None:
                below[named.parent.fqn].append(fqn)
        return {fqn: _in_order(nodes[fqn], found) for fqn, found in below.items()}

    def experts(self) -> list[str]:
        """Names of the experts of mixtures."""
        return [fqn for fqn, named in list(self.nodes.items()) if named.is_expert]

    def owners_of_parameters(self) -> dict[int, str]:
        """``{id of a parameter: name of the first module that holds it}``."""
        owners: dict[int, str] = {}
        for fqn, named in list(self.nodes.items()):
            module = named.module()
            for parameter in module._parameters.values() if module is not None else ():
                if parameter is not None:
                    owners.setdefault(id(parameter), fqn)
        return owners

    # -- known modules ----------------------------------------------------------------------

    def _add_tree(self, top: nn.Module, fqn: str, parent: ModuleName | None) -> ModuleName:
        """Name ``top`` and all below it, each by the first path that ``named_modules()`` takes."""
        named = self._add(top, fqn, parent)
        stack = list(reversed(_held_directly(named, top)))
        while stack:
            above, name, child = stack.pop()
            seen = self._by_id.get(id(child))
            if seen is not None and seen.module() is child:
                self._hold_also(above, name, seen)
                continue
            below = self._add_below(above, name, child)
            stack.extend(reversed(_held_directly(below, child)))
        return named

    def _add_below(self, above: ModuleName, name: str, child: nn.Module) -> ModuleName:
        """The place of a module that has none yet, held by ``above``."""
        if name == WRAPPED:
            above.is_wrapper = True
            below = self._named(child, above.fqn, above.parent)
            above.same_as = self._by_id[id(child)] = self.nodes[above.fqn] = below
        else:
            below = self._add(child, join(above.fqn, name), above)
        below.edges.append((above, name))
        below.is_shared = above.is_shared
        return below

    def _hold_also(self, above: ModuleName, name: str, seen: ModuleName) -> None:
        """``above`` holds a module that has its name elsewhere: one more edge."""
        held_by_model = not f"{above.fqn}.".startswith(f"{OUTSIDE}.")
        is_model = seen in self.roots and not self._adopting
        if name == WRAPPED and seen.itself() is not above:
            above.same_as = seen
        elif held_by_model or not is_model:
            self.nodes[above.fqn].also.append(seen)
        if is_model:
            return  # what the user calls the model stays the model, whoever wraps it
        seen.edges.append((above, name))
        self._mark_shared(seen)

    def _add(self, module: nn.Module, fqn: str, parent: ModuleName | None) -> ModuleName:
        named = self._named(module, fqn, parent)
        self._by_id[id(module)] = named
        self.nodes[fqn] = named
        return named

    def _named(
        self,
        module: nn.Module,
        fqn: str,
        parent: ModuleName | None,
        *,
        same_as: ModuleName | None = None,
        is_shared: bool = False,
        is_wrapper: bool = False,
    ) -> ModuleName:
        holder = self.nodes[parent.fqn] if parent is not None else None
        return ModuleName(
            fqn,
            weakref.ref(module),
            holder,
            is_shared=is_shared,
            is_wrapper=is_wrapper,
            is_expert=_is_expert(module, holder),
            class_name=type(module).__name__,
            # The user holds the models that were given; of others nobody may.
            remembered=_facts(module) if self._adopting else (),
            same_as=same_as,
        )

    def _mark_shared(self, named: ModuleName) -> None:
        stack = [named]
        while stack:
            at = stack.pop()
            if at.is_shared:
                continue
            at.is_shared = True
            module = at.module()
            for child in module._modules.values() if module is not None else ():
                below = self._by_id.get(id(child)) if child is not None else None
                if below is not None:
                    stack.append(below)

    def _as_called(self, named: ModuleName, callers: Sequence[ModuleName]) -> ModuleName:
        """The name of a shared module, as seen from the nearest caller that holds it."""
        for caller in reversed(callers):
            path = self._path_between(caller, named)
            if path is None:
                continue
            fqn = caller.fqn
            at = caller
            for name, module in path:
                fqn = fqn if name == WRAPPED else join(fqn, name)
                at = self.nodes.get(fqn) or self._alias(module, fqn, at)
            return at
        return self.nodes.get(named.fqn, named)

    def _path_between(
        self, above: ModuleName, below: ModuleName
    ) -> list[tuple[str, nn.Module]] | None:
        """Names and modules from ``above`` down to ``below``, along any edges; None if none."""
        top = above.module()
        start = below.module()
        if top is None or start is None or top is start:
            return None
        seen = {id(below)}
        queue: list[tuple[ModuleName, list[tuple[str, nn.Module]]]] = [(below, [])]
        for at, path in queue:
            module = at.module()
            if module is None:
                continue
            for parent, name in at.edges:
                longer = [(name, module), *path]
                if parent.module() is top:
                    return longer
                if id(parent) not in seen:
                    seen.add(id(parent))
                    queue.append((parent, longer))
        return None

    def _alias(self, module: nn.Module, fqn: str, parent: ModuleName) -> ModuleName:
        itself = self._by_id.get(id(module))
        named = self.nodes[fqn] = self._named(module, fqn, parent, same_as=itself, is_shared=True)
        return named

    # -- modules that were not there at the start ---------------------------------------------

    def _meet(self, module: nn.Module, caller: ModuleName | None) -> ModuleName:
        """A module that no walk has seen: replaced, lazily made, of another model, or new."""
        if caller is not None:
            held = self._held_by(module, caller)
            if held is not None:
                return held
            return self._add_tree(
                module, self._unique(join(caller.fqn, f"<{type(module).__name__}>")), caller
            )
        wrapped = self._wrapped_by(module)
        if wrapped is not None:
            named = self._by_id[id(module)] = self._named(
                module, wrapped.fqn, wrapped.parent, same_as=wrapped, is_wrapper=True
            )
            return named
        name = type(module).__name__
        if self._adopting:
            root = self._add_tree(module, self._unique(name), None)
            self.roots = [known for known in self.roots if known.fqn != root.fqn] + [root]
            return root
        return self._add_tree(module, self._unique(f"{OUTSIDE}.{name}"), None)

    def _wrapped_by(self, module: nn.Module) -> ModuleName | None:
        """The place of what ``module`` is ``torch.compile``'s wrapper of, if that is known."""
        inner = wrapped_module(module)
        wrapped = self._by_id.get(id(inner)) if inner is not None else None
        return wrapped if wrapped is not None and wrapped.module() is inner else None

    def _held_by(self, module: nn.Module, caller: ModuleName) -> ModuleName | None:
        """The module's place below its caller, if it was put there after the walk."""
        top = caller.module()
        if top is None:
            return None
        path = _path_to(module, top)
        return None if path is None else self._add_path(caller, top, path)

    def _add_path(self, at: ModuleName, module: nn.Module, path: Sequence[str]) -> ModuleName:
        """The place ``path`` below ``at``, where ``module`` is; what is new on the way is named."""
        fqn = at.fqn
        for name in path:
            module = module._modules[name]  # type: ignore[assignment]
            fqn = fqn if name == WRAPPED else join(fqn, name)
            known = self._by_id.get(id(module))
            if known is not None and known.module() is module and known.fqn == fqn:
                at = known
            else:
                at = self._add_tree(module, fqn, at)
        return at

    def _unique(self, name: str) -> str:
        """``name``, numbered if a module that is still alive has it."""
        number, candidate = 1, name
        while (named := self.nodes.get(candidate)) is not None and named.module() is not None:
            number += 1
            candidate = f"{name}_{number}"
        return candidate


def _facts(module: nn.Module) -> tuple[ParameterFacts, ...]:
    with untraced():
        return tuple(facts_of(module))


def _held_directly(named: ModuleName, module: nn.Module) -> list[tuple[ModuleName, str, nn.Module]]:
    """The modules that ``module``, whose place is ``named``, holds itself, and as what."""
    return [(named, name, child) for name, child in module._modules.items() if child is not None]


def _in_order(named: ModuleName, children: list[str]) -> list[str]:
    """Fqns of children as the module holds them; those that it does not hold come last."""
    module = named.module()
    if module is None or len(children) < 2:
        return children
    names = (join(named.fqn, name) for name, _ in module._modules.items())
    position = {fqn: number for number, fqn in enumerate(names)}
    return sorted(children, key=lambda fqn: position.get(fqn, len(position)))


def _path_to(module: nn.Module, top: nn.Module) -> list[str] | None:
    """The names that lead from ``top`` down to ``module``; None if it is not there."""
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


def _is_expert(module: nn.Module, parent: ModuleName | None) -> bool:
    """True for an entry of a ModuleList or ModuleDict that calls itself one of experts."""
    container = parent.module() if parent is not None else None
    if parent is None or not isinstance(container, (nn.ModuleList, nn.ModuleDict)):
        return False
    holder = parent.fqn.rsplit(".", 1)[-1]
    return "expert" in f"{holder} {type(module).__name__} {type(container).__name__}".lower()


def join(parent: str, name: str) -> str:
    """``"a" + "b" -> "a.b"``; below the root just ``"b"``."""
    return f"{parent}.{name}" if parent else name
