"""From what the user typed to a model and its inputs, ready to run.

Every mistake and every error of the user's own code is a ``TargetError`` of one line; the
error of their code is its ``__cause__``. Importing a target adds its folder to ``sys.path``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dispatch_flops.cli.targets import objects
from dispatch_flops.cli.targets.inputs import (
    Inputs,
    ShapeSpec,
    as_inputs,
    converted,
    from_shapes,
    parse_dtype,
    parse_shape,
)
from dispatch_flops.cli.targets.libraries import Exported, HuggingFace, Timm
from dispatch_flops.cli.targets.source import Source, blame, first_line
from dispatch_flops.errors import TargetError

__all__ = ["Inputs", "Subject", "find", "first_line", "parse_dtype", "parse_shape", "prepare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model on its device, and the inputs of one call."""

    model: nn.Module
    inputs: Inputs


def find(target: str) -> Source:
    """The source that a target names.

    ``package.module:name``, ``file.py:name``, ``hf:config.json[:TaskClass]``, ``timm:name``, or
    the path of a ``.pt2`` file. Raises TargetError where it is none of these.
    """
    if target.startswith("hf:"):
        path, task = target.removeprefix("hf:"), "AutoModel"
        head, _, tail = path.rpartition(":")
        if head and tail.isidentifier():
            path, task = head, tail
        return HuggingFace(Path(path), task)
    if target.startswith("timm:"):
        return Timm(target.removeprefix("timm:"))
    if target.endswith(".pt2"):
        return Exported(Path(target))
    return objects.find(target)


def prepare(
    target: str,
    *,
    shapes: Sequence[ShapeSpec] = (),
    inputs: str | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    variables: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Subject:
    """The model that a target names, and inputs for it.

    shapes: tensors of ones. inputs: a target that makes the inputs; see ``as_inputs``. Without
        either, the inputs that the target itself comes with, if any.
    dtype: floating point: the model's and its inputs'; any other: of inputs given by shape.
    device: "meta" builds shapes alone, so that the model need not fit anywhere; the caller runs
        it there (``profile_model(..., device="meta")``), for not all of it may be there yet.
    variables: sizes in shapes, and keyword arguments of factories that have such parameters.
    say: is told of anything unexpected.
    """
    if shapes and inputs is not None:
        raise TargetError("--input-shape and --inputs exclude each other")
    given = dict(variables or {})
    where = _device(device)
    kind = parse_dtype(dtype) if dtype is not None else None
    floating = kind if kind is not None and (kind.is_floating_point or kind.is_complex) else None
    source = find(target)
    maker = objects.find(inputs) if inputs is not None else None
    _refuse_unused(given, shapes, [source, *([maker] if maker else [])])

    model, found = _built(lambda: source.build(given), where, say)
    if maker is not None:
        made = _built(lambda: objects.call(maker.label, maker.found, given), where, say)
        found = as_inputs(made)
    elif shapes:
        # On the meta device at once: there may be no memory for them.
        found = from_shapes(tuple(shapes), model, kind, given, where if where == "meta" else None)
    moved_to = None if where == "meta" else device
    try:
        if floating is not None:
            model = model.to(floating)
        model = model if moved_to is None else model.to(moved_to)
        return Subject(model=model, inputs=converted(found or Inputs(), moved_to, floating))
    except Exception as error:
        blame(f"moving the model and its inputs to {device} raised", error)


def _device(name: str) -> str:
    """The kind of device; raises TargetError where torch does not know it or cannot use it."""
    try:
        kind = torch.device(name).type
        if kind != "meta":
            torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise TargetError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return kind


def _built(build: Callable[[], Any], device: str, say: Callable[[str], None]) -> Any:
    """What is built; on meta without data, unless it cannot be built so."""
    if device != "meta":
        return build()
    try:
        with torch.device("meta"):
            return build()
    except TargetError as error:
        if not isinstance(error.__cause__, RuntimeError) or "meta tensor" not in str(error):
            raise
        say("building needs data: built on the CPU, then moved to meta")
        return build()


def _refuse_unused(
    variables: Mapping[str, Any], shapes: Sequence[ShapeSpec], sources: Sequence[Source]
) -> None:
    taken: set[str] = set().union(*(spec.variables for spec in shapes))
    for source in sources:
        if source.variables is None:
            return
        taken |= source.variables
    for name in variables:
        if name not in taken:
            known = f" (they take {', '.join(sorted(taken))})" if taken else ""
            raise TargetError(f"--set {name}: neither the target nor its inputs take it{known}")
