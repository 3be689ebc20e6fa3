"""Flat parameters of FSDP1, and the parameters that they consist of."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dispatch_flops import _torch
from dispatch_flops.counting.parameters import ParameterFacts


@dataclass(frozen=True, slots=True)
class FlatParameters:
    """FSDP1's flat parameters.

    parts: ``{id of a module: facts of its parameters that are part of one}``. ids: their own.
    """

    parts: Mapping[int, tuple[ParameterFacts, ...]] = field(default_factory=dict)
    ids: Collection[int] = ()

    def with_parts(
        self, module_id: int, own: tuple[ParameterFacts, ...]
    ) -> tuple[ParameterFacts, ...]:
        """Return the facts of a module's own parameters, with parts for flat parameters.

        own: facts of what it holds now: the flat parameter, or this rank's share of the parts.
        """
        parts = self.parts.get(module_id, ())
        known = {facts.key for facts in parts}.union(self.ids)
        return (*parts, *(facts for facts in own if facts.key not in known))


def flat_parameters(modules: Iterable[nn.Module]) -> FlatParameters:
    """Return the flat parameters of these modules; none unless the program uses FSDP1."""
    if not sys.modules.keys() & set(_torch.FSDP1):
        return FlatParameters()
    # Every program that trains has imported FSDP1, by way of torch._dynamo.
    name = _torch.FLAT_PARAMETER
    holding = [m for m in modules if "_handle" in m.__dict__ or name in m._parameters]
    if not holding:
        return FlatParameters()
    found: defaultdict[int, list[ParameterFacts]] = defaultdict(list)
    flats = {id(flat): flat for module in holding for flat in _flat(module)}
    for flat in flats.values():
        keys = {}
        for index, (info, shard) in enumerate(
            zip(flat._param_infos, flat._shard_param_infos, strict=True)
        ):
            # FSDP1 may keep the original parameters, with what this rank holds of them. If not,
            # the entry that describes one stands for it: it lives as long as the flat parameter.
            original = flat if flat._params is None else flat._params[index]
            facts = ParameterFacts(
                key=id(info if original is flat else original),
                elements=flat._numels[index],
                is_trainable=original.requires_grad,
                is_hidden=True,
                local_elements=shard.numel_in_shard or 0,
            )
            keys[id(info.module), info.param_name] = facts
            found[id(info.module)].append(facts)
        for shared in flat._shared_param_infos:
            facts = keys[id(shared.prim_module), shared.prim_param_name]
            found[id(shared.module)].append(facts)
    return FlatParameters({key: tuple(facts) for key, facts in found.items()}, frozenset(flats))


def _flat(module: nn.Module) -> Iterator[Any]:
    """Yield the flat parameter that the module holds, or has in place of its original ones."""
    handle = vars(module).get("_handle")  # asking the module takes longer if it has none
    candidates = [getattr(handle, "flat_param", None)]
    if _torch.FLAT_PARAMETER in module._parameters:
        candidates.append(module._parameters[_torch.FLAT_PARAMETER])
    yield from (flat for flat in candidates if hasattr(flat, "_shard_param_infos"))
