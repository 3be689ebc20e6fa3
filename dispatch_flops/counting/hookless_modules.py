"""Find modules whose calls are not seen, because their class calls forward without hooks."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from dispatch_flops.counting.module_tree import ModuleName
from dispatch_flops.counting.unseen_modules import at_or_above

_TORCHS = frozenset(("__call__", "_call_impl", "_wrapped_call_impl"))  # what runs the hooks


def runs_no_hooks(cls: type[nn.Module]) -> bool:
    """Return True if the ``__call__`` of the class does not end in torch's.

    Its code, and that of each class above to which it leads, names what it calls.
    """
    for base in cls.__mro__:
        call: Any = vars(base).get("__call__")
        if call is not None:
            if str(call.__module__).partition(".")[0] == "torch":
                return False
            code = getattr(inspect.unwrap(call), "__code__", None)
            if code is None or _TORCHS.isdisjoint(code.co_names):
                return True
    return False


def hookless_modules(
    names: Mapping[str, ModuleName], called: Iterable[str], used_params: Collection[int]
) -> tuple[str, ...]:
    """Return the fqns of such modules that took part in the run.

    A parameter at or below such a module took part in an operator, and no call of it was seen.

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
        and runs_no_hooks(type(module))
    )
