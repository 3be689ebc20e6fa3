"""What a profile says of parameters, without the parameters."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import nn

from dispatch_flops import _torch

Holder = TypeVar("Holder", bound=Hashable)


class ParameterFacts(NamedTuple):
    """key: the parameter's id, the same wherever it is held. elements: see ``elements_of``.

    stands_in: operators do not see it itself. It is a tensor subclass, as a sharded parameter is,
        or rests on the meta device and is brought in for each call, as accelerate's hooks do.
    """

    key: int
    elements: int
    trainable: bool
    stands_in: bool


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Elements of distinct parameters: held itself; in all; of these, used; trainable."""

    own: int = 0
    total: int = 0
    active: int = 0
    trainable: int = 0

    @classmethod
    def of(cls, facts: ParameterFacts, used: Collection[int]) -> ParameterCounts:
        """Of the one who holds this parameter."""
        elements = facts.elements
        return cls(elements, elements, elements * (facts.key in used), elements * facts.trainable)

    def inherited(self) -> ParameterCounts:
        """The same, as those above have them: not held by themselves."""
        return dataclasses.replace(self, own=0)

    def __add__(self, other: ParameterCounts) -> ParameterCounts:
        return ParameterCounts(
            self.own + other.own,
            self.total + other.total,
            self.active + other.active,
            self.trainable + other.trainable,
        )


def facts_of(module: nn.Module) -> Iterator[ParameterFacts]:
    """Of the parameters that the module holds itself."""
    offloaded = getattr(module, "_hf_hook", None) is not None
    for parameter in module._parameters.values():
        if parameter is not None:
            yield ParameterFacts(
                key=id(parameter),
                elements=elements_of(parameter),
                trainable=parameter.requires_grad,
                stands_in=type(parameter) is not nn.Parameter or (offloaded and parameter.is_meta),
            )


def elements_of(parameter: Any) -> int:
    """Logical elements: of the whole parameter where an engine has split it, 0 while lazy."""
    whole = getattr(parameter, "ds_numel", None)  # ZeRO-3 leaves an empty tensor in its place
    if whole is not None:
        return int(whole)
    if _torch.is_lazy(parameter):
        return 0
    return int(parameter.numel())


# -- of everything that is held --------------------------------------------------------------


def count_held(
    held: Mapping[Holder, Collection[Holder]],
    own: Mapping[Holder, Collection[ParameterFacts]],
    used: Collection[int],
) -> dict[Holder, ParameterCounts]:
    """Of each key of ``held``: what it and everything that it holds, at any depth, have.

    ``held`` may join holders in any way, in circles too; each holder is one of its keys.
    """
    above: dict[Holder, list[Holder]] = {holder: [] for holder in held}
    for holder, below in held.items():
        for found in below:
            above[found].append(holder)
    known = {facts.key: facts for parameters in own.values() for facts in parameters}
    holders: dict[int, dict[Holder, None]] = {key: {} for key in known}
    for holder, parameters in own.items():
        for facts in parameters:
            holders[facts.key][holder] = None
    # Parameters of the same holders are counted together: mostly, those of one module.
    together: defaultdict[tuple[Holder, ...], ParameterCounts] = defaultdict(ParameterCounts)
    for key, by in holders.items():
        together[tuple(by)] += ParameterCounts.of(known[key], used)
    counts = dict.fromkeys(held, ParameterCounts())
    # Models are trees, mostly: what has one holder is handed up to it, once all below has been.
    waiting = {holder: len(below) for holder, below in held.items()}
    ready = [holder for holder, below in held.items() if not below]
    for holder in ready:  # which grows; of circles, and of what is above them, none is ever ready
        for upper in above[holder]:
            waiting[upper] -= 1
            if not waiting[upper]:
                ready.append(upper)
        if len(above[holder]) == 1:
            counted = together.pop((holder,), ParameterCounts())
            counts[holder] += counted
            together[(above[holder][0],)] += counted.inherited()
    # All else goes to each that holds it at any depth.
    for group, counted in together.items():
        for place, holder in enumerate(_at_or_above(group, above)):
            counts[holder] += counted if place < len(group) else counted.inherited()
    return counts


def _at_or_above(
    holding: Iterable[Holder], above: Mapping[Holder, Iterable[Holder]]
) -> Iterable[Holder]:
    """These holders, then all that hold them at any depth, each once."""
    found = dict.fromkeys(holding)
    queue = list(found)
    for holder in queue:
        new = [upper for upper in above[holder] if upper not in found]
        found.update(dict.fromkeys(new))
        queue += new
    return found
