"""What a profile says of parameters, without the parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

Holder = TypeVar("Holder", bound=Hashable)


class ParameterFacts(NamedTuple):
    """key: the parameter's id, the same wherever it is held. elements: see ``elements_of``.

    stands_in: operators do not see it itself, but its gathered or its local part: it is a tensor
        subclass, as a sharded parameter is.
    """

    key: int
    elements: int
    trainable: bool
    stands_in: bool


class ParameterCounts(NamedTuple):
    """Elements of distinct parameters: held itself; in all; of these, used; trainable."""

    own: int = 0
    total: int = 0
    active: int = 0
    trainable: int = 0


def facts_of(module: nn.Module) -> Iterator[ParameterFacts]:
    """Of the parameters that the module holds itself."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield ParameterFacts(
                key=id(parameter),
                elements=elements_of(parameter),
                trainable=parameter.requires_grad,
                stands_in=type(parameter) is not nn.Parameter,
            )


def elements_of(parameter: Any) -> int:
    """Logical elements: of the whole parameter where an engine has split it, 0 while lazy."""
    whole = getattr(parameter, "ds_numel", None)  # ZeRO-3 leaves an empty tensor in its place
    if whole is not None:
        return int(whole)
    if torch.nn.parameter.is_lazy(parameter):
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
    circles = list(_circles(held))
    place = {member: number for number, circle in enumerate(circles) for member in circle}
    below = [
        {place[found] for member in circle for found in held[member]} - {number}
        for number, circle in enumerate(circles)
    ]
    holders = Counter(number for numbers in below for number in numbers)
    weights = {
        facts.key: _Weights(facts.elements, facts.key in used, facts.trainable)
        for each in own.values()
        for facts in each
    }
    sets: dict[int, _Distinct] = {}
    counts: dict[Holder, ParameterCounts] = {}
    for number, circle in enumerate(circles):
        alone = [_Distinct(weights, own.get(member, ())) for member in circle]
        own_totals = [distinct.total for distinct in alone]
        holders.subtract(below[number])
        kept = [sets[n] for n in below[number] if holders[n]]
        free = [*alone, *(sets.pop(n) for n in below[number] if not holders[n])]
        whole = sets[number] = _merged(free, kept)
        for member, total in zip(circle, own_totals, strict=True):
            counts[member] = ParameterCounts(total, whole.total, whole.active, whole.trainable)
    return counts


class _Weights(NamedTuple):
    elements: int
    used: bool
    trainable: bool


class _Distinct:
    """Distinct parameters and how many elements they hold: in all, used, trainable."""

    __slots__ = ("_weights", "active", "keys", "total", "trainable")

    def __init__(
        self, weights: Mapping[int, _Weights], parameters: Iterable[ParameterFacts] = ()
    ) -> None:
        self._weights = weights
        self.keys: set[int] = set()
        self.total = self.active = self.trainable = 0
        self.add({facts.key for facts in parameters})

    def add(self, keys: set[int]) -> None:
        new = keys - self.keys
        self.keys |= new
        for key in new:
            elements, used, trainable = self._weights[key]
            self.total += elements
            self.active += elements * used
            self.trainable += elements * trainable

    def copy(self) -> _Distinct:
        other = _Distinct(self._weights)
        other.keys = self.keys.copy()
        other.total, other.active, other.trainable = self.total, self.active, self.trainable
        return other


def _merged(free: Sequence[_Distinct], kept: Sequence[_Distinct]) -> _Distinct:
    """All of them in one; those in ``kept`` stay as they are.

    The largest grows where nobody else holds it: a deep model's sets are not copied anew at
    every level.
    """
    largest = max((*free, *kept), key=lambda distinct: len(distinct.keys))
    whole = largest.copy() if any(largest is one for one in kept) else largest
    for other in (*free, *kept):
        if other is not largest:
            whole.add(other.keys)
    return whole


def _circles(held: Mapping[Holder, Collection[Holder]]) -> Iterator[list[Holder]]:
    """Each holder once, those that hold each other in one list; what is held comes first."""
    # Tarjan's strongly connected components, without recursion. earliest: of those in ``opened``
    # that a holder leads to, where the first one stands.
    earliest: dict[Holder, int] = {}
    closed = len(held)
    for start in held:
        opened: list[Holder] = []
        path = [] if start in earliest else [_enter(start, held, earliest, opened)]
        while path:
            at, position, rest = path[-1]
            for found in rest:
                if found not in earliest:
                    path.append(_enter(found, held, earliest, opened))
                    break
                earliest[at] = min(earliest[at], earliest[found])
            else:
                path.pop()
                if path:
                    above = path[-1].holder
                    earliest[above] = min(earliest[above], earliest[at])
                if earliest[at] == position:
                    circle = opened[position:]
                    del opened[position:]
                    earliest.update(dict.fromkeys(circle, closed))
                    yield circle


class _Step(NamedTuple):
    holder: Any
    position: int
    rest: Iterator[Any]


def _enter(
    holder: Holder,
    held: Mapping[Holder, Collection[Holder]],
    earliest: dict[Holder, int],
    opened: list[Holder],
) -> _Step:
    position = earliest[holder] = len(opened)
    opened.append(holder)
    return _Step(holder, position, iter(held[holder]))
