"""What the cost of a call depends on in the model: its modules, flags and parameters."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain, repeat
from operator import is_, itemgetter, methodcaller
from typing import Any
from weakref import ref

from torch import nn

_modules_of, _parameters_of = itemgetter("_modules"), itemgetter("_parameters")
_values = methodcaller("values")


class ModelState:
    """The state of a model that every call reads.

    A flag is an attribute that is True or False, such as ``training`` or one that turns activation
    checkpointing on. Modules may be replaced, added and removed, and so may flags and parameters.

    Most of this is read by loops in C, since a large model has thousands of modules.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        # A number for each set of modules. Weak references are equal if their modules are one.
        self._structures: dict[tuple[ref[nn.Module], ...], int] = {}
        self._read()

    def __reduce__(self) -> Any:
        """Return what a copy reads: the copy of the model."""
        return ModelState, (self._root,)

    def signature(self) -> tuple[Hashable, ...]:
        """Return which modules there are, their flags, and what each parameter is like.

        Of a parameter that is whether it requires a gradient, and whether it has one.
        """
        attributes = self._attributes
        children = [*chain.from_iterable(map(_values, map(_modules_of, attributes)))]
        if children != self._children or [*map(len, attributes)] != self._sizes:
            self._read()
            attributes = self._attributes
        flags = bytes(map(is_, map(dict.get, self._holders, self._flags), repeat(True)))
        parameters = chain.from_iterable(map(_values, map(_parameters_of, attributes)))
        return (
            self._structure,
            flags,
            bytes([one.training for one in self._scripted]),
            bytes(
                [
                    0 if one is None else 1 + one.requires_grad + 2 * (one.grad is not None)
                    for one in parameters
                ]
            ),
        )

    def _read(self) -> None:
        """Read what changes seldom."""
        modules = tuple(self._root.modules())
        self._attributes: list[dict[str, Any]] = [*map(vars, modules)]
        self._children = [*chain.from_iterable(map(_values, map(_modules_of, self._attributes)))]
        self._sizes = [*map(len, self._attributes)]
        key = tuple(map(ref, modules))
        self._structure = self._structures.setdefault(key, len(self._structures))
        found = [
            (held, name)
            for held in self._attributes
            for name, value in held.items()
            if value is True or value is False
        ]
        self._holders, self._flags = [held for held, _ in found], [name for _, name in found]
        # The training flags of modules that torch.jit holds outside Python.
        self._scripted = [one for one in modules if "training" not in vars(one)]
