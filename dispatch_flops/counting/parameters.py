"""Counts of parameters, from facts that do not keep the parameters alive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.counting.held_tensors import HeldTensors

_ELEMENTS = torch.Tensor.numel
_IS_META, _IS_TRAINABLE = attrgetter("is_meta"), attrgetter("requires_grad")
Holder = TypeVar("Holder", bound=Hashable)


class ParameterFacts(NamedTuple):
    """What the counts need to know of one parameter.

    key: the parameter's id, the same for every module that holds it. elements: see ``elements_of``.
    local_elements: those that this rank holds.
    is_hidden: operators do not see the parameter itself. It is a tensor subclass, as a sharded
        parameter is. Or it stays on the meta device, and hooks of accelerate load it for each call.
    """

    key: int
    elements: int
    is_trainable: bool
    is_hidden: bool
    local_elements: int


_facts = partial(tuple.__new__, ParameterFacts)  # takes half of the constructor's time


@dataclass(slots=True)
class ParameterCounts:
    """Elements of the distinct parameters of a module.

    own: of the parameters that it holds itself. total: with those of all modules below it.
    active, trainable: the parts of ``total`` that took part in the run and that require gradients.
    local: the part of ``total`` that this rank holds.
    """

    own: int = 0
    total: int = 0
    active: int = 0
    trainable: int = 0
    local: int = 0

    def add_own(self, facts: ParameterFacts, used: Collection[int]) -> None:
        """Add a parameter that the module holds itself."""
        elements = facts.elements
        self.own += elements
        self.total += elements
        self.local += facts.local_elements
        if facts.key in used:
            self.active += elements
        if facts.is_trainable:
            self.trainable += elements

    def add(self, other: ParameterCounts, *, inherited: bool = False) -> None:
        """Add other counts; if ``inherited``, as those of a module below."""
        if not inherited:
            self.own += other.own
        self.total += other.total
        self.active += other.active
        self.trainable += other.trainable
        self.local += other.local


class ParameterTable:
    """The own parameters of modules, as they were when it was made; keeps none of them alive.

    Facts are put together when they are asked for.

    keys: of all parameters, if operators see all of them as they are; else None.
    """

    def __init__(self, held: HeldTensors) -> None:
        self._ends = [0, *accumulate(map(len, held.by_module))]
        parameters = held.parameters
        self.keys: list[int] | None = None
        if held.are_ordinary:
            self._elements = [*map(_ELEMENTS, parameters)]
            # ZeRO-3 leaves empty ones on each rank, offloading ones on meta.
            is_present = held.are_on_cpu or not any(map(_IS_META, parameters))
            if all(self._elements) and is_present:
                self.keys = [*map(id, parameters)]
                self._are_trainable = [*map(_IS_TRAINABLE, parameters)]
        if self.keys is None:
            owners = zip(held.modules, held.by_module, strict=True)
            self._facts = [_facts_of(module, p) for module, own in owners for p in own]

    def of(self, position: int) -> tuple[ParameterFacts, ...]:
        """Return the facts of the parameters of the module at that position."""
        start, end = self._ends[position], self._ends[position + 1]
        if start == end:
            return ()
        if self.keys is None:
            return tuple(self._facts[start:end])
        keys, elements, trainable = self.keys, self._elements, self._are_trainable
        return tuple(
            [
                _facts((keys[i], elements[i], trainable[i], False, elements[i]))
                for i in range(start, end)
            ]
        )


def _facts_of(module: nn.Module, parameter: nn.Parameter) -> ParameterFacts:
    """Return the facts of a parameter that may be empty here, lazy, a subclass, or on meta."""
    is_hidden = type(parameter) is not nn.Parameter or (
        parameter.is_meta and getattr(module, "_hf_hook", None) is not None
    )
    return ParameterFacts(
        id(parameter),
        elements_of(parameter),
        parameter.requires_grad,
        is_hidden,
        local_elements_of(parameter),
    )


def elements_of(parameter: Any) -> int:
    """Return the number of elements: of the whole parameter if it is partitioned, 0 if lazy."""
    whole = getattr(parameter, "ds_numel", None)  # ZeRO-3 leaves an empty parameter on each rank
    if whole is not None:
        return int(whole)
    if _torch.is_lazy(parameter):
        return 0
    return int(parameter.numel())


def local_elements_of(parameter: Any) -> int:
    """Return the number of elements that this rank holds; 0 if lazy."""
    shard = getattr(parameter, "ds_tensor", None)
    if shard is not None:
        return int(shard.numel())
    if _torch.is_lazy(parameter):
        return 0
    if hasattr(parameter, "to_local"):  # DTensor
        with torch.no_grad():
            return int(parameter.to_local().numel())
    return int(parameter.numel())


def count_held(
    held: Mapping[Holder, Collection[Holder]],
    own: Mapping[Holder, Collection[ParameterFacts]],
    used: Collection[int],
) -> dict[Holder, ParameterCounts]:
    """Return the counts of every holder: of its own parameters and of all that it holds below it.

    held: ``{holder: the holders that it holds directly}``; cycles are allowed, and each holder is
        a key. own: the facts of each holder's own parameters. used: ids of the parameters used.
    """
    above: dict[Holder, list[Holder]] = {holder: [] for holder in held}
    for holder, below in held.items():
        for found in below:
            above[found].append(holder)
    holders: dict[int, tuple[ParameterFacts, list[Holder]]] = {}
    for holder, parameters in own.items():
        for facts in parameters:
            by = holders.setdefault(facts.key, (facts, []))[1]
            if holder not in by:
                by.append(holder)
    # Parameters with the same holders are counted as one group, usually those of one module.
    groups: defaultdict[tuple[Holder, ...], ParameterCounts] = defaultdict(ParameterCounts)
    for facts, by in holders.values():
        groups[tuple(by)].add_own(facts, used)
    counts = {holder: ParameterCounts() for holder in held}
    # Most models are trees. What has a single holder adds its counts to it, from the leaves up.
    waiting = {holder: len(below) for holder, below in held.items()}
    ready = [holder for holder, below in held.items() if not below]
    for holder in ready:  # grows in the loop; holders in cycles, or above one, never get ready
        for upper in above[holder]:
            waiting[upper] -= 1
            if not waiting[upper]:
                ready.append(upper)
        if len(above[holder]) == 1 and (holder,) in groups:
            counted = groups.pop((holder,))
            counts[holder].add(counted)
            groups[(above[holder][0],)].add(counted, inherited=True)
    # The remaining groups are added to each holder at or above them.
    for group, counted in groups.items():
        for position, holder in enumerate(_at_or_above(group, above)):
            counts[holder].add(counted, inherited=position >= len(group))
    return counts


def _at_or_above(
    holding: Iterable[Holder], above: Mapping[Holder, Iterable[Holder]]
) -> Iterable[Holder]:
    """Return these holders, then all holders above them, each once."""
    found = dict.fromkeys(holding)
    queue = list(found)
    for holder in queue:
        new = [upper for upper in above[holder] if upper not in found]
        found.update(dict.fromkeys(new))
        queue += new
    return found
