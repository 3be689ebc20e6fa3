"""What the model is called with: tensors of given shapes, or what the user's factory made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.errors import TargetError

Variables = Mapping[str, Any]

_SHAPE_HELP = (
    "write sizes such as 1,3,224,224, name=1,128:int64 for a keyword, a dtype after a colon"
)
_SHAPE = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<sizes>[^:=]+)(?::(?P<dtype>\w+))?")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Positional and keyword arguments of one call of the model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShapeSpec:
    """One tensor to make: ``[name=]size,size,...[:dtype]``.

    name: the keyword that it is passed as; ``""`` for a positional input.
    sizes: numbers, or names of variables.
    """

    name: str
    sizes: tuple[int | str, ...]
    dtype: torch.dtype | None

    @property
    def variables(self) -> set[str]:
        return {size for size in self.sizes if isinstance(size, str)}

    def tensor(
        self, default: torch.dtype, variables: Variables, device: str | None
    ) -> torch.Tensor:
        """Ones of the shape: valid as numbers, as token ids and as a mask."""
        missing = self.variables - set(variables)
        if missing:
            name = min(missing)
            raise TargetError(f"input shape: give {name!r} a size, as in --set {name}=4")
        sizes = [n if isinstance(n, int) else size_of(variables, n, 0) for n in self.sizes]
        return torch.ones(sizes, dtype=self.dtype or default, device=device)


def size_of(variables: Variables, name: str, default: int) -> int:
    """The size that the variable gives; raises TargetError where it is none."""
    size = variables.get(name, default)
    if not isinstance(size, int) or size < 0:
        raise TargetError(f"--set {name}={size}: this must be a size, a number of at least 0")
    return size


def parse_shape(text: str) -> ShapeSpec:
    """``"ids=1,128:int64"`` as a spec; raises TargetError where it is none."""
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise TargetError(f"input shape {text!r}: {_SHAPE_HELP}")
    listed = match["sizes"].strip().removeprefix("(").removesuffix(")").strip(" ,")
    parts = re.split(r"\s*,\s*|(?<=\d)x(?=\d)", listed) if listed else []
    if not all(re.fullmatch(r"\d+|[^\W\d]\w*", part) for part in parts):
        raise TargetError(f"input shape {text!r}: {_SHAPE_HELP}")
    sizes = tuple(int(part) if part.isdecimal() else part for part in parts)
    dtype = parse_dtype(match["dtype"]) if match["dtype"] else None
    return ShapeSpec(match["name"] or "", sizes, dtype)


def parse_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` as a dtype; raises TargetError where torch has none of that name."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise TargetError(
            f"dtype {name!r} is unknown; write torch's name: float32, bfloat16, float16, int64, ..."
        )
    return dtype


def from_shapes(
    specs: tuple[ShapeSpec, ...],
    model: nn.Module,
    dtype: torch.dtype | None,
    variables: Variables,
    device: str | None = None,
) -> Inputs:
    """Tensors of ones; without any dtype given, in that of the model's first parameter."""
    numeric = (p.dtype for p in model.parameters() if p.is_floating_point() or p.is_complex())
    first = next(numeric, torch.float32)
    tensors = [(spec.name, spec.tensor(dtype or first, variables, device)) for spec in specs]
    return Inputs(
        tuple(tensor for name, tensor in tensors if not name),
        {name: tensor for name, tensor in tensors if name},
    )


def as_inputs(value: Any) -> Inputs:
    """What a factory returned: one input, a tuple of inputs, a dict of keywords, or both.

    Both is a pair of a tuple (or list) and a dict.
    """
    if isinstance(value, Inputs):
        return value
    if isinstance(value, Mapping):
        return Inputs((), dict(value))
    if isinstance(value, (tuple, list)):
        match value:
            case [tuple() | list() as args, Mapping() as kwargs]:
                return Inputs(tuple(args), dict(kwargs))
        return Inputs(tuple(value))
    return Inputs((value,))


def converted(inputs: Inputs, device: str | None, dtype: torch.dtype | None) -> Inputs:
    """The inputs on a device, floating-point tensors in a dtype; ``None`` leaves them."""

    def convert(leaf: Any) -> Any:
        if device is not None and callable(getattr(leaf, "to", None)):
            leaf = leaf.to(device)
        if dtype is not None and isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaf = leaf.to(dtype)
        return leaf

    return Inputs(_torch.tree_map(convert, inputs.args), _torch.tree_map(convert, inputs.kwargs))
