"""Find modules that ran kernels which bypass the dispatcher, so that no operator shows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from dispatch_flops.counting.module_tree import ModuleName


def unseen_modules(
    names: Mapping[str, ModuleName],
    returned: Collection[str],
    used_params: Collection[int],
    computing: Callable[[], Iterable[str]],
) -> tuple[str, ...]:
    """Return the fqns of modules that ran while no operator showed it.

    Such a module holds parameters, none of which took part in an operator. Neither it nor a module
    below it ran, in forward, an operator that computes. A module that computes with other tensors
    in place of its parameters, as in ``torch.func.functional_call``, is not such a module. Neither
    is a container, nor a layer whose caller reads the parameters.

    names: the modules by fqn, with their facts read. returned: fqns whose forward returned a
        value; one that raised may not have come to its operators.
    used_params: ids of the parameters that took part in an operator.
    computing: returns the fqns whose forward ran an operator that is not free.
    """
    candidates = [
        fqn
        for fqn, named in list(names.items())
        if (named.facts.parameters or named.same_as is not None)
        and fqn in returned
        and not named.is_wrapper
        and _is_untouched(named, used_params)
    ]
    if not candidates:
        return ()
    above = {prefix for fqn in computing() for prefix in at_or_above(names.get(fqn))}
    return tuple(fqn for fqn in candidates if fqn not in above)


def _is_untouched(named: ModuleName, used_params: Collection[int]) -> bool:
    """Return True if the module holds parameters, and no operator took one of them."""
    is_untouched = False
    for key, elements, _, is_hidden, _ in named.canonical().facts.parameters:
        if elements:
            if is_hidden or key in used_params:
                return False
            is_untouched = True
    return is_untouched


def at_or_above(named: ModuleName | None) -> Iterator[str]:
    """Yield the fqns of a module and of those above it."""
    while named is not None:
        yield named.fqn
        named = named.parent
