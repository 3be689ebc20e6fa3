"""What the cost of a call depends on in the model: its modules, flags and parameters."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final
from weakref import ref

from torch import nn

_OWN: Final = frozenset(vars(nn.Module())) - {"training"}  # that every module has


class ModelState:
    """The state of a model that every call reads.

    A flag is an attribute that is True, False or None, such as ``training`` or one that turns
    activation checkpointing on. Modules may be replaced, added and removed, and so may attributes.

    A large model has thousands of modules and parameters, and all are looked at: plain loops over
    tables, which take about 0.1 us for each.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        # A number for the modules and how many attributes each has: pruning adds some, and so does
        # a ``forward`` of a module's own. Weak references are equal if their modules are one.
        self._structures: dict[tuple[tuple[ref[nn.Module], int], ...], int] = {}
        # Nothing is read before the first signature: where a model that holds its meter is copied
        # or unpickled, the copy is still empty now.
        self._attributes: list[dict[str, Any]] = []
        self._children: list[nn.Module | None] | None = None

    def __reduce__(self) -> Any:
        """Return what a copy reads: the copy of the model."""
        return ModelState, (self._root,)

    def signature(self) -> tuple[Hashable, ...]:
        """Return which modules there are, their flags, and what each parameter is like.

        Of a parameter that is whether it requires a gradient, whether it has one, and whether it
        is the result of a computation, as under ``torch.func.functional_call``. The dtype is that
        of the first one: a model is converted as a whole, and inputs such as ids stay as they are.
        """
        if self._children_now() != self._children or [*map(len, self._attributes)] != self._sizes:
            self._read()
        held, name = self._first
        return (
            self._structure,
            getattr(held[name], "dtype", None) if name in held else None,
            bytes(
                [
                    1 if (value := held.get(name)) is True else 2 if value is None else 0
                    for held, name in self._flags
                ]
            ),
            bytes([getattr(one, "training", False) for one in self._scripted])
            if self._scripted
            else b"",
            bytes(
                [
                    0
                    if p is None
                    else 1 + p.requires_grad + 2 * (p.grad is not None)
                    if p.is_leaf
                    else 5  # torch warns where its gradient is read
                    for held in self._attributes
                    for p in held["_parameters"].values()
                ]
            ),
        )

    def _children_now(self) -> list[nn.Module | None]:
        return [
            child
            for held in self._attributes
            if held["_modules"]
            for child in held["_modules"].values()
        ]

    def _read(self) -> None:
        """Read what changes seldom."""
        modules = tuple(self._root.modules())
        self._attributes = [*map(vars, modules)]
        self._children = self._children_now()
        self._sizes = [*map(len, self._attributes)]
        key = tuple(zip(map(ref, modules), self._sizes, strict=True))
        self._structure = self._structures.setdefault(key, len(self._structures))
        self._flags = [
            (held, name)
            for held in self._attributes
            for name, value in held.items()
            if (value is True or value is False or value is None) and name not in _OWN
        ]
        parameters = (
            (held["_parameters"], name)
            for held in self._attributes
            for name, value in held["_parameters"].items()
            if value is not None and value.is_floating_point()
        )
        self._first: tuple[dict[str, Any], str] = next(parameters, ({}, ""))
        # The training flags of modules that torch.jit holds outside Python.
        self._scripted = [one for one in modules if "training" not in vars(one)]
