"""Operators that torch implements by calling other operators."""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable
from typing import Any

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.operators.operator_keys import find_loaded, overloads_of

_DEVICES = ("CPU", "CUDA")
_AUTOGRAD = ("Autograd", "AutogradCPU", "AutogradCUDA")
_BACKENDS = (*_DEVICES, "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
# Libraries of torch's own whose composite operators consist of others, or compute nothing.
_OF_TORCH = frozenset(
    """
    aten prim prims quantized quantized_decomposed prepacked mkldnn sparse inductor export _test
    c10d_functional _c10d_functional _c10d_functional_autograd _dtensor _native_aot
    """.split()
)

# Further ones: autograd takes none of their operators apart. They are not asked at every start.
# Those whose names a program may give to a library of its own are: profiler and quantization.
_NEVER_TAKEN_APART = frozenset(
    """
    symm_mem static_runtime _quantized onednn debugprims inductor_prims rngprims mkl
    mkldnn_prepacked c10d _native debug_mode_ops
    """.split()
)
# Most operators are of the first.
_NOT_ASKED = tuple(f"{name}::" for name in ("aten", *sorted(_OF_TORCH | _NEVER_TAKEN_APART)))


def is_composite(func: OpOverload) -> bool:
    """Return True if ``func`` decomposes into other operators and has no CPU or CUDA kernel.

    The counter decomposes a composite operator and counts the operators that it calls. An
    operator with a kernel of its own is counted whole, whether it can be decomposed or not.
    """
    if not _torch.is_decomposable(func):
        return False
    return not any(_torch.has_kernel(func.name(), device) for device in _DEVICES)


def is_taken_apart(func: OpOverload) -> bool:
    """Return True if autograd runs all of ``func``, so that no dispatch mode sees it.

    It is composite, as is a C++ extension's ``m.def("op", &function)``, or has only an Autograd
    kernel. Of torch's own operators those are of devices for which torch was not built.
    """
    name = func.name()
    if _torch.has_kernel(name, _torch.COMPOSITE.name):
        return is_composite(func)
    has_autograds = any(_torch.has_kernel(name, key) for key in _AUTOGRAD)
    has_devices = any(_torch.has_kernel(name, key) for key in _BACKENDS)
    return is_of_extension(func) and has_autograds and not has_devices


def may_bypass_device_kernel(func: OpOverload) -> bool:
    """Return True if autograd has a kernel for ``func`` besides those of devices.

    It may call the device's kernel by the dispatcher, so that a dispatch mode sees the operator, or
    compute by itself. What ``torch.library.custom_op`` registers does the first.
    """
    name = func.name()
    return not _torch.is_custom_op(func) and any(
        _torch.has_kernel(name, key) and not _torch.is_fallthrough(name, key) for key in _AUTOGRAD
    )


def is_of_extension(func: OpOverload) -> bool:
    """Return True for an operator of a library that torch does not ship."""
    return func.namespace not in _OF_TORCH


def taken_apart_of(keys: Collection[Any]) -> set[OpOverload]:
    """Return the loaded overloads of registry keys, and in-place forms, that are taken apart."""
    if not keys:
        return set()
    known = _taken_apart_by_key(_torch.libraries_loaded())
    for key in keys:
        if key not in known:
            known[key] = tuple(op for op in _applied_to(key) if is_taken_apart(op))
    return {op for key in keys for op in known[key]}


@functools.lru_cache(maxsize=1)
def _taken_apart_by_key(_loaded: Hashable) -> dict[Any, tuple[OpOverload, ...]]:
    """Return what is known while no library adds operators, to be filled."""
    return {}


def _applied_to(key: Any) -> list[OpOverload]:
    """Return the overloads to which a rule under ``key`` applies."""
    in_place = f"{key}_" if isinstance(key, str) else None
    return [*overloads_of(key), *overloads_of(in_place)]


def operators_of_extensions() -> list[OpOverload]:
    """Return operators of which autograd may run all, and that belong to no library of torch."""
    return _list_extensions(_torch.libraries_loaded())


@functools.lru_cache(maxsize=1)
def _list_extensions(_loaded: Hashable) -> list[OpOverload]:
    names = [name for name in _torch.all_operator_names() if not name.startswith(_NOT_ASKED)]
    found = [find_loaded(name if "." in name else f"{name}.default") for name in names]
    asked = [op for op in found if isinstance(op, OpOverload)]
    return [op for op in asked if is_taken_apart(op) or may_bypass_device_kernel(op)]
