"""Find a target's source, build the model and its inputs, and move them to a device."""

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
    build_inputs,
    convert_inputs,
    parse_dtype,
)
from dispatch_flops.cli.targets.libraries import Exported, HuggingFace, Timm, note_on_positions
from dispatch_flops.cli.targets.source import Source, first_line, raise_target_error
from dispatch_flops.errors import TargetError


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model on its device, and the inputs of one call."""

    model: nn.Module
    inputs: Inputs


def find_source(target: str) -> Source:
    """Return the source that a target names.

    A target is ``package.module:name``, ``file.py:name``, ``hf:config.json[:TaskClass]``,
    ``timm:name`` or the path of a ``.pt2`` file. Raises TargetError for any other text.
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
    return objects.find_factory(target, objects.MODEL)


def prepare(
    target: str,
    *,
    shapes: Sequence[ShapeSpec] = (),
    inputs: str | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    variables: Mapping[str, Any] | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> PreparedModel:
    """Build the model that a target names, and inputs for it.

    shapes: inputs that are tensors of ones.
    inputs: a target that returns the inputs; see ``as_inputs``. If neither shapes nor inputs are
        given, the target's own inputs are used.
    dtype: a floating-point or complex dtype applies to the model and its inputs, any other dtype
        to the inputs given by shape, of which there must be one.
    device: "meta" builds without data, so that the model may be larger than the memory. Parts that
        need data stay on the CPU: run it with ``profile_model(..., device="meta")``.
    variables: sizes in shapes, and keyword arguments of factories that have such parameters.
    notify: receives progress messages.

    Raises TargetError if the target cannot be found or built, or a variable is not used.
    Example: ``prepare("model.py:Net", shapes=[parse_shape("1,3,224,224")])``.
    """
    if shapes and inputs is not None:
        raise TargetError("--input-shape and --inputs cannot be combined; give one of them")
    variables = dict(variables or {})
    device_type = _check_device(device)
    kind = parse_dtype(dtype) if dtype is not None else None
    model_dtype = kind if kind is not None and (kind.is_floating_point or kind.is_complex) else None
    if kind is not model_dtype and not shapes:
        raise TargetError(
            f"--dtype {dtype} is for the inputs of --input-shape, and none is given; a model is "
            "converted to a floating-point or complex dtype, such as bfloat16"
        )
    source = find_source(target)
    factory = objects.find_factory(inputs, objects.INPUTS) if inputs is not None else None
    _check_all_used(variables, shapes, [source, *([factory] if factory else [])])

    model, found = _build_on(device_type, lambda: source.build(variables), notify)
    if factory is not None:
        found = as_inputs(_build_on(device_type, lambda: factory.call(variables), notify))
    elif shapes:
        # Built on the meta device, not moved there: they may exceed the memory.
        built_on = "meta" if device_type == "meta" else None
        found = build_inputs(tuple(shapes), model, kind, variables, built_on)
    moved_to = None if device_type == "meta" else device
    try:
        if model_dtype is not None:
            model = model.to(model_dtype)
        model = model if moved_to is None else model.to(moved_to)
        converted = convert_inputs(found or Inputs(), moved_to, model_dtype)
    except Exception as error:
        raise_target_error(f"moving the model and its inputs to {device}", error)
    if device_type == "meta" and (note := note_on_positions(model, converted)):
        notify(note)
    return PreparedModel(model=model, inputs=converted)


def _check_device(name: str) -> str:
    """Return the type of the device; raise TargetError if torch cannot use it."""
    try:
        kind = torch.device(name).type
        if kind != "meta":
            torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise TargetError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return kind


def _build_on(device_type: str, build: Callable[[], Any], notify: Callable[[str], None]) -> Any:
    """Return what ``build`` returns, built without data on meta unless it needs data."""
    if device_type != "meta":
        return build()
    try:
        with torch.device("meta"):
            return build()
    except TargetError as error:
        if not isinstance(error.__cause__, RuntimeError) or "meta tensor" not in str(error):
            raise
        notify("building needs data, which the meta device does not hold; building on the CPU")
        return build()


def _check_all_used(
    variables: Mapping[str, Any], shapes: Sequence[ShapeSpec], sources: Sequence[Source]
) -> None:
    """Raise TargetError for a variable that no shape and no source takes."""
    taken: set[str] = set().union(*(spec.variables for spec in shapes))
    for source in sources:
        if source.variables is None:
            return
        taken |= source.variables
    for name in variables:
        if name not in taken:
            known = f"; they take {', '.join(sorted(taken))}" if taken else ""
            raise TargetError(
                f"--set {name} is not used: neither the target nor its inputs take it{known}"
            )
