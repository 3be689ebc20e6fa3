"""Fully qualified names of modules, including shared, replaced and newly created ones.

A module has one canonical name, as ``named_modules()`` gives it. If several parents hold it, it
has a further name below each parent that calls it. A wrapper, such as ``torch.compile``'s or
FSDP's, and the module inside it share a name: ``_orig_mod`` is not a part of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn

from dispatch_flops import _torch
from dispatch_flops.counting.held_tensors import HeldTensors
from dispatch_flops.counting.module_facts import FactsTable, ModuleFacts
from dispatch_flops.counting.module_tree import (
    ModuleName,
    children_last_first,
    find_path,
    is_expert,
    join,
    sort_children,
)
from dispatch_flops.counting.parameters import ParameterTable
from dispatch_flops.counting.sharded_parameters import flat_parameters
from dispatch_flops.counting.wrappers import WRAPPED, wrapped_module, wrapping_attribute
from dispatch_flops.operators.tensors import storages_of, untraced
from dispatch_flops.profile import OUTSIDE


class ModuleNames:
    """Names of every module below some roots, and of modules found later.

    The fqn of a single root is ``""``. Several roots are named by their classes, with a number
    where that is not unique; roots in a mapping have its keys as names, also a single one. Without
    roots, every module that is called from outside any module becomes one.

    by_fqn: the names by fqn. roots: the names of the roots. are_given: the roots came in a mapping.
    remembered_in: dicts of names by the id of the module, which are emptied when a module gets
        another name, or one that depends on its caller, and which lose modules that are gone.
    """

    def __init__(self, roots: Sequence[nn.Module] | Mapping[str, nn.Module]) -> None:
        self.are_given = isinstance(roots, Mapping)
        if isinstance(roots, Mapping):
            fqns, roots = list(roots), list(roots.values())
        else:
            fqns = [type(root).__name__ if len(roots) > 1 else "" for root in roots]
        self._by_id: dict[int, ModuleName] = {}
        self.by_fqn: dict[str, ModuleName] = {}
        self.roots: list[ModuleName] = []
        self.remembered_in: list[dict[int, Any]] = []
        self._has_given_roots = bool(roots)
        self._is_named = False  # what the roots hold
        self._found_later: list[ModuleName] = []  # whose modules' release is told
        self._unread: dict[type, ModuleFacts] = {}
        for fqn, root in zip(fqns, roots, strict=True):
            if id(root) not in self._by_id:
                self.roots.append(self._add_tree(root, self._unique_fqn(fqn), None))
        self._is_named = True

    def end(self) -> None:
        """Let go of the modules: nothing is told of their release from now on."""
        self._forget_remembered()
        for named in self._found_later:
            module = named.module()
            if module is not None:
                named.module = weakref.ref(module)

    @property
    def has_single_root(self) -> bool:
        """True if the tree of the profile is that of one model."""
        return len(self.roots) == 1 and not self.are_given

    def find_unshared(self, module: nn.Module) -> ModuleName | None:
        """Return the name of a known module if it does not depend on the caller, else None."""
        named = self._by_id.get(id(module))
        if named is None or named.is_shared or named.module() is not module:
            return None
        return named

    def find(self, module: nn.Module, callers: Sequence[ModuleName]) -> ModuleName:
        """Return the name of ``module`` as the last of ``callers`` calls it.

        callers: the running module calls, outermost first. A module without a name gets one.
        """
        named = self._by_id.get(id(module))
        if named is not None and named.module() is module:
            if not named.is_shared:
                return named
            return self._find_shared(named, callers)
        return self._add_new(module, callers[-1] if callers else None)

    def modules(self) -> Iterator[nn.Module]:
        """Yield the named modules that are still alive, one of each fqn."""
        return _alive(self.by_fqn.values())

    def read_facts(self) -> tuple[FactsTable, HeldTensors]:
        """Read the facts of every module that is still alive; return what they hold, too.

        Later changes of the modules do not change what ``children`` and the names then tell.
        """
        self._name_uncalled()
        with untraced():
            flat = flat_parameters(_alive(self._by_id.values()))
            known = list(self.by_fqn.values())
            known += {named.canonical() for named in known if named.same_as is not None}
            found = [(named, module) for named in known if (module := named.module()) is not None]
            held = HeldTensors(module for _, module in found)
            table = FactsTable(held, flat, is_whole=len(found) == len(known))
        for position, (named, _) in enumerate(found):
            named.read = table, position
        return table, held

    def packed(self) -> Iterator[int]:
        """Yield the number of values of each packed weight, each once."""
        known = [named for named in self.by_fqn.values() if named.facts.packed or named.same_as]
        for named in {named.canonical() for named in known}:
            yield from named.facts.packed

    def children(self) -> dict[str, list[str]]:
        """Return ``{fqn: fqns of its children}`` in the order of the model."""
        by_fqn = dict(self.by_fqn)  # other threads may name modules meanwhile
        below: dict[str, list[str]] = {fqn: [] for fqn in by_fqn}
        for fqn, named in by_fqn.items():
            if named.parent is not None:
                below[named.parent.fqn].append(fqn)
        return {fqn: sort_children(by_fqn[fqn], found) for fqn, found in below.items()}

    def shown(self, fqn: str) -> str:
        """Return the fqn as a profile shows it.

        If a single root was found in the run, it is the model: its fqns lose their prefix.
        """
        prefix = self.roots[0].fqn if self.has_single_root else ""
        if prefix and (fqn == prefix or fqn.startswith(f"{prefix}.")):
            return fqn[len(prefix) + 1 :]
        return fqn

    def owners_of_parameters(self) -> dict[int, str]:
        """Return ``{id of a parameter: fqn of the first module that holds it}``."""
        owners: dict[int, str] = {}
        for fqn, named in list(self.by_fqn.items()):
            module = named.module()
            for parameter in module._parameters.values() if module is not None else ():
                if parameter is not None:
                    owners.setdefault(id(parameter), fqn)
        return owners

    def storages_of_gradients(self) -> frozenset[int]:
        """Return an id for the memory of each parameter's gradient."""
        parameters = (p for module in self.modules() for p in module._parameters.values())
        return storages_of([p.grad for p in parameters if p is not None])

    def fqn_of(self, module: nn.Module) -> str | None:
        """Return the canonical fqn of a known module, else None."""
        named = self._by_id.get(id(module))
        return named.canonical().fqn if named is not None and named.module() is module else None

    def owners_under_data_parallel(self) -> dict[int, str]:
        """Return ``{id of a parameter: fqn of the module whose gradients DDP averages}``."""
        owners: dict[int, str] = {}
        for named in list(self._by_id.values()):
            module = named.module()
            model = None if module is None else _torch.data_parallel_model(module)
            if model is not None:
                owners |= {id(p): named.canonical().fqn for p in model.module.parameters()}
        return owners

    # -- naming the modules of a tree -------------------------------------------------------

    def _add_tree(
        self,
        top: nn.Module,
        fqn: str,
        parent: ModuleName | None,
        holders: tuple[tuple[ModuleName, str], ...] = (),
    ) -> ModuleName:
        """Name ``top`` and every module below it, in the order of ``named_modules()``."""
        is_shared = any(holder.is_shared for holder, _ in holders)
        named = self._add(top, fqn, parent, holders, is_shared=is_shared)
        stack = children_last_first(named, top)
        while stack:
            above, name, child = stack.pop()
            known = self._by_id.get(id(child))
            if known is not None and known.module() is child:
                self._add_holder(above, name, known)
                continue
            below = self._add_below(above, name, child)
            if child._modules:
                stack += children_last_first(below, child)
        return named

    def _add_below(self, above: ModuleName, name: str, child: nn.Module) -> ModuleName:
        """Name a new module, which ``above`` holds as ``name``."""
        if not self._is_named and name != WRAPPED and not above.is_wrapper:
            fqn = join(above.fqn, name)
            if fqn not in self.by_fqn:  # the common case, written out
                named = ModuleName(
                    fqn,
                    weakref.ref(child),
                    above,
                    above.is_shared,
                    False,
                    is_expert(child, above),
                    self._unread.get(type(child)) or self._facts_when_named(child),
                    ((above, name),),
                )
                self._by_id[id(child)] = self.by_fqn[fqn] = named
                return named
        if name == WRAPPED:
            above.is_wrapper = True
            fqn, parent = above.fqn, above.parent
        else:
            fqn, parent = self._child_fqn(above, name), above
        below = self._add(child, fqn, parent, ((above, name),), is_shared=above.is_shared)
        if name == WRAPPED:
            above.same_as = below
        return below

    def _add_holder(self, above: ModuleName, name: str, held: ModuleName) -> None:
        """Record that ``above`` holds, as ``name``, a module that is named elsewhere."""
        is_holder_in_model = not f"{above.fqn}.".startswith(f"{OUTSIDE}.")
        is_model = held in self.roots and self._has_given_roots
        # What the user's model is and holds keeps its name in any module that is not of a root.
        keeps_name = is_model or (_is_of_a_root(held) and not _is_of_a_root(above))
        if name == WRAPPED and held.canonical() is not above:
            above.same_as = held
        elif is_holder_in_model or not is_model:
            self.by_fqn[above.fqn].held_elsewhere += (held,)
        if keeps_name:
            return
        alive = (holder for holder in held.holders if holder[0].module() is not None)
        held.holders = (*alive, (above, name))
        self._mark_shared(held)

    def _add(
        self,
        module: nn.Module,
        fqn: str,
        parent: ModuleName | None,
        holders: tuple[tuple[ModuleName, str], ...] = (),
        *,
        is_shared: bool = False,
    ) -> ModuleName:
        named = self._make_name(module, fqn, parent, holders, is_shared=is_shared)
        if id(module) in self._by_id:
            self._forget_remembered()
        self._by_id[id(module)] = self.by_fqn[fqn] = named
        return named

    def _forget_remembered(self) -> None:
        for names in self.remembered_in:
            names.clear()

    def _make_name(
        self,
        module: nn.Module,
        fqn: str,
        parent: ModuleName | None,
        holders: tuple[tuple[ModuleName, str], ...] = (),
        *,
        same_as: ModuleName | None = None,
        is_shared: bool = False,
        is_wrapper: bool = False,
    ) -> ModuleName:
        holder = self.by_fqn[parent.fqn] if parent is not None else None
        named = ModuleName(
            fqn,
            weakref.ref(module, self._forget(id(module)) if self._is_named else None),
            holder,
            is_shared,
            is_wrapper,
            holder is not None and is_expert(module, holder),
            self._facts_when_named(module),
            holders,
            (),
            same_as,
        )
        if self._is_named:
            self._found_later.append(named)
        return named

    def _facts_when_named(self, module: nn.Module) -> ModuleFacts:
        # The user keeps given roots alive; other modules may be gone before facts are read.
        cls = type(module)
        if self._has_given_roots:
            return self._unread.get(cls) or self._unread.setdefault(cls, ModuleFacts(cls.__name__))
        with untraced():
            parameters = ParameterTable(HeldTensors([module])).of(0)
            return ModuleFacts(cls.__name__, parameters=parameters)

    def _forget(self, key: int) -> Callable[[weakref.ref[nn.Module]], None]:
        """Return what drops a module that is gone, for its id may be another module's later."""
        by_id, remembered_in = self._by_id, self.remembered_in

        def forget(_: weakref.ref[nn.Module]) -> None:
            for names in (by_id, *remembered_in):
                names.pop(key, None)

        return forget

    def _mark_shared(self, named: ModuleName) -> None:
        stack = [named]
        while stack:
            at = stack.pop()
            if at.is_shared:
                continue
            at.is_shared = True
            self._forget_remembered()
            module = at.module()
            for child in module._modules.values() if module is not None else ():
                below = self._by_id.get(id(child))
                if below is not None and below.module() is child:
                    stack.append(below)

    def _find_shared(self, named: ModuleName, callers: Sequence[ModuleName]) -> ModuleName:
        """Return the name of a shared module below the nearest caller that holds it."""
        for caller in reversed(callers):
            path = self._path_between(caller, named)
            if path is None:
                continue
            fqn = caller.fqn
            at = caller
            for name, module in path:
                fqn = fqn if name == WRAPPED else join(fqn, name)
                known, own = self.by_fqn.get(fqn), self._by_id.get(id(module))
                # Another module may have had the name before this one came there.
                if known is None or (own and known.canonical() is not own.canonical()):
                    known = self._add_alias(module, fqn, at)
                at = known
            return at
        return self.by_fqn.get(named.fqn, named)

    def _path_between(
        self, above: ModuleName, below: ModuleName
    ) -> list[tuple[str, nn.Module]] | None:
        """Return names and modules on a path from ``above`` down to ``below``; None without one.

        The path may lead through any holder of each module.
        """
        top = above.module()
        if top is None or top is below.module():
            return None
        seen = {id(below)}
        queue: list[tuple[ModuleName, list[tuple[str, nn.Module]]]] = [(below, [])]
        for at, path in queue:
            module = at.module()
            if module is None:
                continue
            for parent, name in at.holders:
                longer = [(name, module), *path]
                if parent.module() is top:
                    return longer
                if id(parent) not in seen:
                    seen.add(id(parent))
                    queue.append((parent, longer))
        return None

    def _add_alias(self, module: nn.Module, fqn: str, parent: ModuleName) -> ModuleName:
        """Add a further name of a shared module."""
        named = self.by_fqn[fqn] = self._make_name(
            module, fqn, parent, same_as=self._by_id.get(id(module)), is_shared=True
        )
        return named

    # -- naming modules found later -----------------------------------------------------------

    def _add_new(self, module: nn.Module, caller: ModuleName | None) -> ModuleName:
        """Name a module that was added after the start, or that belongs to no known model."""
        held = None if caller is None else self._add_below_caller(module, caller)
        if held is not None:
            return held
        wrapped = self._find_wrapped(module)
        if wrapped is not None:
            named = self._by_id[id(module)] = self._make_name(
                module, wrapped.fqn, wrapped.parent, same_as=wrapped, is_wrapper=True
            )
            return named
        name = type(module).__name__
        if caller is not None:
            fqn = self._unique_fqn(join(caller.fqn, f"<{name}>"))
            return self._add_tree(module, fqn, caller)
        if not self._has_given_roots:
            root = self._add_tree(module, self._unique_fqn(name), None)
            self.roots = [known for known in self.roots if known.fqn != root.fqn] + [root]
            return root
        return self._add_tree(module, self._unique_fqn(f"{OUTSIDE}.{name}"), None)

    def _name_uncalled(self) -> None:
        """Name the modules that known ones hold by now, and that have not been called."""
        alive = [*_alive(self._by_id.values())]
        known = {id(None), *map(id, alive)}
        held = chain.from_iterable(module._modules.values() for module in alive if module._modules)
        if known.issuperset(map(id, held)):
            return
        for above in list(self._by_id.values()):
            holder = above.module()
            for module in list(holder._modules.values()) if holder is not None else ():
                if module is not None and self.fqn_of(module) is None:
                    self._name_as_if_called(module, above)

    def _name_as_if_called(self, module: nn.Module, caller: ModuleName) -> None:
        """Name a new module, and what it holds, as calls from ``caller`` down would name them."""
        calls, seen = [(module, [caller])], set[int]()
        for called, callers in calls:
            if id(called) not in seen and self._find_wrapped(called) is None:
                seen.add(id(called))
                below = [*callers, self.find(called, callers)]
                calls += [(held, below) for held in called._modules.values() if held is not None]

    def _find_wrapped(self, module: nn.Module) -> ModuleName | None:
        """Return the name of the known module that ``module`` wraps."""
        inner = wrapped_module(module)
        wrapped = self._by_id.get(id(inner)) if inner is not None else None
        return wrapped if wrapped is not None and wrapped.module() is inner else None

    def _add_below_caller(self, module: nn.Module, caller: ModuleName) -> ModuleName | None:
        """Name a module that its caller holds by now; None if the caller does not."""
        top = caller.module()
        if top is None:
            return None
        path = find_path(top, module)
        return None if path is None else self._add_path(caller, top, path)

    def _add_path(self, at: ModuleName, module: nn.Module, path: Sequence[str]) -> ModuleName:
        """Name the new modules on ``path`` below ``module``; return the name of the last one.

        at: the name of ``module``.
        """
        fqn = at.fqn
        for name in path:
            fqn = fqn if name == wrapping_attribute(module) else join(fqn, name)
            module = module._modules[name]  # type: ignore[assignment]
            known = self._by_id.get(id(module))
            if known is not None and known.module() is module and known.fqn == fqn:
                at = known
            else:
                replaced = self.by_fqn.get(fqn)
                at = self._add_tree(module, fqn, at, ((at, name),))
                if replaced is not None and not replaced.is_shared:
                    self._forget_name(replaced)
        return at

    def _forget_name(self, replaced: ModuleName) -> None:
        """Let a module whose place another took be named by where it is now.

        One that the other holds is shared, and has a name for each of its holders.
        """
        module = replaced.module()
        if module is not None and self._by_id.get(id(module)) is replaced:
            del self._by_id[id(module)]
            self._forget_remembered()

    def _child_fqn(self, above: ModuleName, name: str) -> str:
        """Return the fqn of a child, with a number if a module of another parent has it."""
        fqn = join(above.fqn, name)
        known = self.by_fqn.get(fqn)
        if known is None or (known.parent is not None and known.parent.fqn == above.fqn):
            return fqn
        return self._unique_fqn(fqn)

    def _unique_fqn(self, fqn: str) -> str:
        """Return ``fqn``, with a number if another living module has it."""
        number, candidate = 1, fqn
        while (named := self.by_fqn.get(candidate)) is not None and named.module() is not None:
            number += 1
            candidate = f"{fqn}_{number}"
        return candidate


def _alive(named: Iterable[ModuleName]) -> Iterator[nn.Module]:
    """Yield the modules of these names that are still alive."""
    for one in list(named):
        module = one.module()
        if module is not None:
            yield module


def _is_of_a_root(named: ModuleName) -> bool:
    """Return True if a root holds the module; False if one does that no root holds."""
    while named.parent is not None:
        named = named.canonical()
        if not named.holders:
            return False
        named = named.parent or named
    return not f"{named.fqn}.".startswith(f"{OUTSIDE}.")
