"""Which storages a tensor consists of, and which operators allocate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.memory.reused_arguments import may_reuse
from dispatch_flops.operators import registry
from dispatch_flops.operators.memory import stored_parts
from dispatch_flops.operators.tensors import is_sparse, tensors_in

Allocation = Literal[
    "none", "in place", "result", "reuse", "result or zeros", "argument", "arrival", "gathering",
    "annotation",
]  # fmt: skip
Taken = Literal["none", "one", "two", "three", "any"]
Storage = torch.UntypedStorage

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# A zero tensor of forward-mode differentiation has a storage without memory. Its product with a
# number is one, too. Torch runs most other operators on zeros that it has made in its place.
_WITHOUT_MEMORY = frozenset(("aten::_efficientzerotensor",))
_WITHOUT_MEMORY_OF_ZEROS = frozenset(("aten::mul.Scalar",))
# Their results share the memory of their argument, which their schemas do not say.
_SHARING = frozenset(
    f"aten::{name}"
    for name in ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")
)
# Their argument holds data that torch.tensor and torch.from_numpy have just allocated or taken.
_ARRIVALS = frozenset(("aten::lift_fresh", "aten::lift"))
_NUMBERS = re.compile(
    r"((Optional|List)\[)*(int|float|bool|complex|number|str|Device|Generator)\]*"
)
_COUNTS: tuple[Taken, ...] = ("none", "one", "two", "three")
_GATHERING = "fsdp::all_gather_copy_in"


def storages_in(value: Any) -> list[tuple[Storage, torch.device]]:
    """Return the storages of every tensor in nested containers, as ``storages_of`` yields them."""
    found: list[tuple[Storage, torch.device]] = []
    for item in value if value.__class__ is tuple else (value,):
        if item.__class__ is torch.Tensor and item.layout is torch.strided:
            if _has_memory(item):
                found.append((item.untyped_storage(), item.device))
        elif item is not None:
            for tensor in tensors_in(item):
                found += storages_of(tensor)
    return found


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return True for a tensor with a storage that has memory: that of a zero tensor has none.

    No subclass is asked whether it is one, for it may refuse what it does not know.
    """
    is_zero = tensor.__class__ is torch.Tensor and tensor._is_zerotensor()
    return _torch.has_storage(tensor) and not is_zero


def storages_of(tensor: torch.Tensor) -> Iterator[tuple[Storage, torch.device]]:
    """Yield each storage that a tensor consists of, with its device.

    Wrapper subclasses consist of their inner tensors: DTensor of this rank's shard. Opaque
    tensors, such as oneDNN's, have none that can be seen.
    """
    for part in dense_parts_of(tensor):
        yield part.untyped_storage(), part.device


def dense_parts_of(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Return the tensors with a storage that a tensor consists of; itself if it has one."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:  # most are
        return (tensor,) if _has_memory(tensor) else ()
    return _find_dense_parts(tensor)


def _find_dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if _torch.is_lazy(tensor):  # asked for anything else, it raises
        return
    if _torch.is_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # DTensor names its mesh, too
                yield from dense_parts_of(inner)
    elif is_sparse(tensor):
        with _torch.modes_disabled():  # no mode sees the operators that tell the parts
            parts = stored_parts(tensor)
        for part in parts:
            yield from dense_parts_of(part)
    elif _has_memory(tensor):
        yield tensor


def tensors_taken(func: Any) -> Taken:
    """Return which arguments of a call are tensors: none, the first one to three, or any."""
    if not isinstance(func, OpOverload):
        return "any"
    arguments = _torch.schema_of(func).arguments
    if any(argument.is_out for argument in arguments):
        return "any"
    types = [str(argument.type) for argument in arguments]
    others = [kind for kind in types if not _NUMBERS.fullmatch(kind)]
    if len(others) >= len(_COUNTS) or others != types[: len(others)] or set(others) - {"Tensor"}:
        return "any"
    return _COUNTS[len(others)]


def allocation_of(func: Any) -> Allocation:
    """Return which tensors of a call may have memory that was allocated in it.

    "none": results share the memory of arguments. "in place": so they do, but a sparse argument may
    get another size, and with it other storages. "result": the results. "reuse": the results; in a
    backward pass perhaps none, if no dispatch mode were on. "result or zeros": the results, unless
    they are zero tensors. "argument": the results, and arguments that the call may resize.
    "arrival": an argument, which no operator made. "gathering": the results, into which FSDP2
    gathers parameters. "annotation": the call only names a range for torch.profiler, as around an
    optimizer's step, or asks for a tensor's metadata.
    """
    if not isinstance(func, OpOverload):
        return "result"
    name = func.name().partition(".")[0]
    rule = registry.lookup(func)
    if rule is not None and not rule.is_recorded:
        return "annotation"
    if name in _WITHOUT_MEMORY or name in _SHARING:
        return "none"
    if name in _ARRIVALS:
        return "arrival"
    if name == _GATHERING:
        return "gathering"
    if func.name() in _WITHOUT_MEMORY_OF_ZEROS:
        return "result or zeros"
    schema = _torch.schema_of(func)
    if "resize" in name or name == "aten::set_" or any(arg.is_out for arg in schema.arguments):
        return "argument"
    if may_reuse(func.name()):
        return "reuse"
    are_written = [out.alias_info.is_write for out in schema.returns if out.alias_info is not None]
    if len(are_written) < len(schema.returns):
        return "result"
    return "in place" if any(are_written) else "none"
