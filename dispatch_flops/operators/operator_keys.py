"""Keys of the registry: what identifies an operator, a Triton kernel or a module class.

The key of an operator is its name, "lib::op" for all overloads or "lib::op.overload" for one, so
that none has to be looked up or defined before its rule is registered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import HigherOrderOperator, OpOverload, OpOverloadPacket
from dispatch_flops.errors import UnknownOperatorError

T = TypeVar("T")
_HIGHER_ORDER = "higher_order::"


def name_of(key: Any) -> str:
    """Return the name of an operator as profiles show it.

    ``aten.addmm``, ``aten.addmm.default``, ``higher_order.cond``, ``module.Linear``, or the name
    of a Triton kernel.
    """
    if isinstance(key, (OpOverload, OpOverloadPacket)):
        key = _to_key(key)
    if isinstance(key, HigherOrderOperator):
        return f"higher_order.{key.name()}"
    if isinstance(key, type):
        return f"module.{key.__name__}"
    if isinstance(key, str):
        return key.replace("::", ".")
    return str(getattr(key, "__name__", key))


def to_keys(targets: Any) -> list[Any]:
    """Return the registry keys of ``targets``, a target or a nested collection of them."""
    if isinstance(targets, (list, tuple, set, frozenset)):
        return [key for target in targets for key in to_keys(target)]
    return [_to_key(targets)]


def check_not_empty(keys: Collection[Any]) -> None:
    """Raise UnknownOperatorError if ``keys``, those of a user's targets, are none."""
    if not keys:
        raise UnknownOperatorError("the list of operators is empty; pass one operator or more")


def _to_key(target: Any) -> Any:
    if isinstance(target, OpOverload):
        return full_name(target)
    if isinstance(target, OpOverloadPacket):
        return _torch.packet_name(target)
    if isinstance(target, HigherOrderOperator):
        return target
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        return target
    if isinstance(target, str) and target.count("::") == 1 and all(target.split("::")):
        return find_loaded(target) or target if target.startswith(_HIGHER_ORDER) else target
    if isinstance(target, torch.library.CustomOpDef):
        return _torch.packet_name(_torch.overload_of(target).overloadpacket)
    if callable(getattr(target, "run", None)) and hasattr(target, "fn"):  # a Triton kernel
        return target
    meant = _operator_of_function(target)
    if meant is not None:
        raise UnknownOperatorError(
            f"{target!r:.60} is not an operator, but a function that runs one; pass "
            f"torch.ops.{meant}"
        )
    raise UnknownOperatorError(
        f"{target!r:.60} is not an operator; pass torch.ops.<library>.<op>, one of its overloads, "
        "its name as 'library::op', the result of torch.library.custom_op, a higher-order "
        "operator, a Triton kernel, an nn.Module class, or a list of these"
    )


def _operator_of_function(function: Any) -> str | None:
    """Return ``"aten.matmul"`` for ``torch.matmul`` or ``Tensor.matmul``; None for others."""
    name = getattr(function, "__name__", "")
    is_torchs = str(getattr(function, "__module__", "")).split(".")[0] == "torch"
    is_method = getattr(getattr(function, "__objclass__", None), "__name__", "") == "TensorBase"
    # torch.matmul and torch.gelu are functions in C without a module; a class holds the former.
    holder = getattr(function, "__self__", None)
    is_built_in = isinstance(holder, (type, ModuleType)) and "torch" in repr(holder)
    if isinstance(function, type) or not (is_torchs or is_method or is_built_in):
        return None
    return f"aten.{name}" if getattr(torch.ops.aten, name, None) is not None else None


def find_loaded(name: str) -> OpOverload | OpOverloadPacket | None:
    """Return the operator ``"lib::op"`` or ``"lib::op.overload"``, if its library is loaded."""
    library, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, library), packet, None)
    return getattr(found, overload, None) if overload else found


def lacking(keys: Iterable[Any]) -> set[str]:
    """Return the names of operators that their libraries, which are loaded, do not have."""
    missing = {key for key in keys if isinstance(key, str) and find_loaded(key) is None}
    libraries = {name.partition("::")[0] for name in _torch.all_operator_names()}
    return {name for name in missing if name.partition("::")[0] in libraries}


def overloads_of(key: Any) -> list[OpOverload]:
    """Return the loaded overloads that a key names; none for what is not an operator's name."""
    found = find_loaded(key) if isinstance(key, str) else None
    if isinstance(found, OpOverloadPacket):
        return _torch.overloads_of(found)
    return [found] if isinstance(found, OpOverload) else []


def candidate_keys(op: Any) -> list[Any]:
    """Return every key under which an operator's rule may be registered, most exact first.

    ``aten.add_`` is found under ``aten.add`` too: an in-place operator costs as much.
    """
    if not isinstance(op, (OpOverload, OpOverloadPacket)):
        return [op]
    overload = [full_name(op)] if isinstance(op, OpOverload) else []
    name = _torch.packet_name(op.overloadpacket if isinstance(op, OpOverload) else op)
    is_in_place = name.endswith("_") and not name.endswith("__")
    return [*overload, name, *([name[:-1]] if is_in_place else [])]


def find(registered: Mapping[Any, T], op: Any) -> T | None:
    """Return what is registered for an operator under its most exact key, or None."""
    return next((registered[key] for key in candidate_keys(op) if key in registered), None)


def full_name(op: OpOverload) -> str:
    """Return ``"lib::op.overload"``, with ``.default`` for the default overload."""
    return f"{_torch.packet_name(op.overloadpacket)}.{_torch.overload_name(op)}"


def schema_of(op: OpOverload | OpOverloadPacket) -> torch.FunctionSchema:
    """Return the schema of an overload, or of a packet's first overload."""
    overload = op if isinstance(op, OpOverload) else getattr(op, op.overloads()[0])
    return _torch.schema_of(overload)
