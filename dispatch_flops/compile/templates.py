"""Arguments of a node without its tensors: shapes that may be symbolic, filled in for each run.

A graph's fake tensors are not kept: they would hold the compiler's state alive. A template says
what a formula reads of a tensor. The same tensor twice has one template, so that it is filled in
as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from dispatch_flops import _torch

UNKNOWN_SIZE = "a size depends on data: it is known only inside the compiled code"
_UNKNOWN_NUMBER = "a number is known only inside the compiled code"
Sizes = tuple[int, ...]
Values = Mapping[Any, int]  # of symbols


@dataclass(frozen=True, slots=True, eq=False)
class _TensorTemplate:
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _SizeTemplate:
    expression: Any


class Templates:
    """Makes the templates of one graph."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Any, _TensorTemplate]] = {}  # with what keeps the id in use

    def of(self, value: Any) -> Any:
        """Return ``value`` with templates in place of tensors and symbolic sizes."""
        return _map(value, self._of_leaf)

    def _of_leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return _SizeTemplate(value.node.expr)
        return value

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.is_nested:
            return tensor
        known = self._tensors.get(id(tensor))
        if known is None:
            template = _TensorTemplate(
                tuple(map(self._of_leaf, tensor.shape)),
                tuple(map(self._of_leaf, tensor.stride())),
                tensor.dtype,
                tensor.device,
            )
            known = self._tensors[id(tensor)] = tensor, template
        return known[1]


def is_symbolic(value: Any) -> bool:
    """Return True if a template has a symbolic size in it."""
    return any(
        isinstance(part, _SizeTemplate)
        or (
            isinstance(part, _TensorTemplate)
            and any(isinstance(size, _SizeTemplate) for size in (*part.shape, *part.strides))
        )
        for part in _leaves(value)
    )


def fill_in(template: Any, values: Values, *, fakes: AbstractContextManager[Any] | None) -> Any:
    """Return the template with tensors that have no data; raises TypeError for an unknown size.

    values: of the symbols. fakes: the mode that makes fake tensors on the devices of the program,
    on which functions are run; numbers must be known for them, too. None: tensors on the meta
    device, and an ``UnknownValue`` in place of an unknown number.
    """
    made: dict[int, torch.Tensor] = {}

    def known(size: Any) -> Any:
        if not isinstance(size, _SizeTemplate):
            return size
        expression = size.expression
        number = expression.subs(values) if hasattr(expression, "subs") else expression
        return int(number) if getattr(number, "is_integer", True) else float(number)

    def fill(part: Any) -> Any:
        if isinstance(part, _SizeTemplate):
            try:
                return known(part)
            except TypeError:
                if fakes is not None:
                    raise
                return _torch.UnknownValue(_UNKNOWN_NUMBER)
        if isinstance(part, _TensorTemplate):
            if id(part) not in made:
                made[id(part)] = torch.empty_strided(
                    list(map(known, part.shape)),
                    list(map(known, part.strides)),
                    dtype=part.dtype,
                    device="meta" if fakes is None else part.device,
                )
            return made[id(part)]
        return part

    with nullcontext() if fakes is None else fakes:
        return _map(template, fill)


def find_symbols(graph: fx.GraphModule) -> dict[Any, tuple[int, int | None]]:
    """Return ``{symbol: (position of an input, dimension)}``; None if the input is the size."""
    sizes: dict[Any, tuple[int, int | None]] = {}
    in_shapes: dict[Any, tuple[int, int | None]] = {}
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes.setdefault(value.node.expr, (index, None))
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    in_shapes.setdefault(size.node.expr, (index, dim))
    found = in_shapes | sizes
    return {symbol: position for symbol, position in found.items() if symbol.is_Symbol}


def size_reader(
    positions: Sequence[tuple[int, int | None]],
) -> Callable[[Sequence[Any]], Sizes]:
    """Return the function that reads the sizes at these positions from a run's inputs."""
    return lambda inputs: tuple(
        inputs[index] if dim is None else inputs[index].shape[dim] for index, dim in positions
    )


def arguments_of(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    """Return a node's arguments as the operator receives them: fake tensors, and subgraphs."""
    owner: Any = node.graph.owning_module

    def value_of(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        if "val" in argument.meta or argument.op != "get_attr":
            return argument.meta.get("val")
        return attrgetter(str(argument.target))(owner)

    return _torch.map_aggregate(node.args, value_of), _torch.map_aggregate(node.kwargs, value_of)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_map(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return change(value)
