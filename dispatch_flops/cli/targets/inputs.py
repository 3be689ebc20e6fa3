"""Inputs of a model: tensors of given shapes, or what the user's factory returned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.errors import TargetError
from dispatch_flops.profilers.inputs import ones

Variables = Mapping[str, Any]

_SHAPE_HELP = (
    "write sizes such as 1,3,224,224, with a dtype 1,128:int64, as a keyword argument mask=1,128"
)
_SHAPE = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<sizes>[^:=]+)(?::(?P<dtype>\w+))?")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Positional and keyword arguments of one call of the model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShapeSpec:
    """A tensor of ones to pass to the model: ``[name=]size,size,...[:dtype]``.

    name: of the keyword argument; ``""`` for a positional one.
    sizes: numbers, or names of variables.
    dtype: ``None`` for a default.
    """

    name: str
    sizes: tuple[int | str, ...]
    dtype: torch.dtype | None

    @property
    def variables(self) -> set[str]:
        return {size for size in self.sizes if isinstance(size, str)}

    def build(self, default: torch.dtype, variables: Variables, device: str | None) -> torch.Tensor:
        """Return the tensor. Ones are valid as numbers, as token ids and as a mask.

        Raises TargetError if a variable is missing or not a size, and for too many elements.
        """
        missing = self.variables - set(variables)
        if missing:
            name = min(missing)
            raise TargetError(f"size {name!r} of --input-shape has no value; add --set {name}=4")
        sizes = [n if isinstance(n, int) else size_of(variables, n, 0) for n in self.sizes]
        return ones(sizes, self.dtype or default, device)


def size_of(variables: Variables, name: str, default: int) -> int:
    """Return the value of a size variable; raises TargetError if it is not a size."""
    size = variables.get(name, default)
    if not isinstance(size, int) or size < 0:
        given = ",".join(map(str, size)) if isinstance(size, tuple) else size
        raise TargetError(f"--set {name}={given} is not a size; give a whole number of at least 0")
    return size


def parse_shape(text: str) -> ShapeSpec:
    """Parse ``"ids=1,128:int64"``; raises TargetError for any other form."""
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise TargetError(f"--input-shape {text!r} is not a shape; {_SHAPE_HELP}")
    listed = match["sizes"].strip().strip("([])").strip(" ,")
    parts = re.split(r"\s*,\s*|(?<=\d)x(?=\d)", listed) if listed else []
    if not all(re.fullmatch(r"\d+|[^\W\d]\w*", part) for part in parts):
        raise TargetError(f"--input-shape {text!r} is not a shape; {_SHAPE_HELP}")
    sizes = tuple(int(part) if part.isdecimal() else part for part in parts)
    dtype = parse_dtype(match["dtype"]) if match["dtype"] else None
    return ShapeSpec(match["name"] or "", sizes, dtype)


_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def parse_dtype(name: str) -> torch.dtype:
    """Parse ``"bfloat16"``, ``"torch.bfloat16"`` or ``"bf16"``, in any case.

    Raises TargetError for an unknown dtype.
    """
    plain = name.casefold().removeprefix("torch.")
    dtype = getattr(torch, _SHORT_DTYPES.get(plain, plain), None)
    if not isinstance(dtype, torch.dtype):
        raise TargetError(
            f"dtype {name!r} is unknown; use a dtype of torch, such as float32, bfloat16 or int64"
        )
    return dtype


def build_inputs(
    specs: tuple[ShapeSpec, ...],
    model: nn.Module,
    dtype: torch.dtype | None,
    variables: Variables,
    device: str | None = None,
) -> Inputs:
    """Return tensors of ones for the specs.

    Their dtype is that of the spec, else ``dtype``, else that of the model's first floating-point
    or complex parameter, else float32. Raises TargetError for a name given twice.
    """
    names = [spec.name for spec in specs if spec.name]
    for name in names:
        if names.count(name) > 1:
            raise TargetError(f"--input-shape {name}=... is given twice; give it once")
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point() or p.is_complex())
    first = next(dtypes, torch.float32)
    tensors = [(spec.name, spec.build(dtype or first, variables, device)) for spec in specs]
    return Inputs(
        tuple(tensor for name, tensor in tensors if not name),
        {name: tensor for name, tensor in tensors if name},
    )


def as_inputs(value: Any) -> Inputs:
    """Return the inputs that a factory returned.

    A factory returns one input, a tuple or list of inputs, a dict of keyword arguments, or a pair
    of a tuple (or list) and a dict.
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


def convert_inputs(inputs: Inputs, device: str | None, dtype: torch.dtype | None) -> Inputs:
    """Return the inputs on a device, with floating-point tensors in a dtype.

    ``None`` keeps the device or the dtype.
    """

    def convert(leaf: Any) -> Any:
        if device is not None and callable(getattr(leaf, "to", None)):
            leaf = leaf.to(device)
        if dtype is not None and isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaf = leaf.to(dtype)
        return leaf

    return Inputs(_torch.tree_map(convert, inputs.args), _torch.tree_map(convert, inputs.kwargs))
