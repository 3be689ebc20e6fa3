"""Find modules whose calls are not seen, because their class calls forward without hooks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from dispatch_flops.counting.module_tree import ModuleName
from dispatch_flops.counting.unseen_modules import at_or_above


def call_is_own(cls: type[nn.Module]) -> bool:
    """Return True if the class has a ``__call__`` that is not torch's, and may run no hooks."""
    call: Any = cls.__call__
    return str(call.__module__).partition(".")[0] != "torch"


def hookless_modules(
    names: Mapping[str, ModuleName], called: Iterable[str], used_params: Collection[int]
) -> tuple[str, ...]:
    """Return the fqns of such modules that took part in the run.

    A parameter at or below such a module took part in an operator, and no call of it was seen. A
    ``__call__`` that calls torch's runs the hooks.

    names: the modules by fqn, with their facts read. called: fqns whose forward ran. used_params:
        ids of the parameters that took part in an operator.
    """
    known = dict(names)  # other threads may name modules meanwhile
    seen = {known[fqn].canonical() for fqn in called if fqn in known}
    using = {
        above
        for named in known.values()
        if any(facts.key in used_params for facts in named.canonical().facts.parameters)
        for above in at_or_above(named)
    }
    return tuple(
        fqn
        for fqn, named in known.items()
        if fqn in using
        and named.canonical() not in seen
        and (module := named.module()) is not None
        and call_is_own(type(module))
    )
