"""Kernels of torch's operators that were seen to allocate memory, and have no registered workspace.

The allocators of the CPU and of CUDA report the first call of each signature. Most kernels allocate
nothing but their results. An operator whose kernel does gets a rule by which later calls are
reported, too. On the CPU, most such kernels cast operands: TensorIterator copies each whose dtype
is not the common one (TensorIteratorBase::compute_types, aten/src/ATen/TensorIterator.cpp). Those
of CUDA cast single elements. They allocate where they reduce in several blocks, sort, or copy an
argument with gaps. On other devices, what is noted here counts as 0.

Of operators that torch does not ship, and of its libraries for oneDNN and MKL, every call is
reported: nothing is known of their kernels. So are higher-order operators, which run others, unless
all of these are followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dispatch_flops._torch import HigherOrderOperator, OpOverload
from dispatch_flops.counting.higher_order import HANDLERS
from dispatch_flops.operators.composites import is_of_extension
from dispatch_flops.operators.workspaces import Condition, WorkspaceRule, always

# Libraries of torch's own besides those that ``is_of_extension`` tells. FSDP's operators run
# others, whose results, such as gathered parameters, do not belong to a workspace.
_OTHERS_OF_TORCH = frozenset(
    """
    c10d fsdp symm_mem static_runtime profiler quantization debugprims inductor_prims rngprims onnx
    streams bucketing debug_mode_ops _native
    """.split()
)
# Their handlers follow the functions that they call alone. They stack the results themselves.
_STACKING = frozenset(("scan", "map_impl", "while_loop_stack_output"))
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_FEW = 32  # bytes of the numbers that a kernel makes tensors of
_found: dict[OpOverload, WorkspaceRule] = {}


def _is_mixed(args: tuple[Any, ...]) -> bool:
    """Return True if tensors have several dtypes, gaps or whole numbers, or a number is complex.

    Sparse tensors have gaps. Those in compressed layouts raise if they are asked.
    """
    return _differ_in_dtype(args) or any(
        tensor.layout is not torch.strided
        or not tensor.is_contiguous()
        or not (tensor.is_floating_point() or tensor.is_complex())
        for tensor in _tensors_in(args)
    )


def _differ_in_dtype(args: tuple[Any, ...]) -> bool:
    first = None
    for tensor in _tensors_in(args):
        if first is None:
            first = tensor.dtype
        elif tensor.dtype is not first and tensor.dim():
            return True
    return first is not None and not first.is_complex and complex in map(type, args)


def _tensors_in(args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for arg in args:
        cls = arg.__class__
        if cls in _PLAIN:
            yield arg
        elif cls is list and arg and arg[0].__class__ is not int:
            yield from (part for part in arg if part.__class__ in _PLAIN)


def _is_reported(args: tuple[Any, ...]) -> bool:
    return all(tensor.is_cpu or tensor.is_cuda for tensor in _tensors_in(args))


def _is_on_cpu(args: tuple[Any, ...]) -> bool:
    return all(tensor.is_cpu for tensor in _tensors_in(args))


def _rule(condition: Condition) -> WorkspaceRule:
    def workspace(*args: Any, **_: Any) -> int | None:
        return None if condition(args) and _is_reported(args) else 0

    return WorkspaceRule(workspace, condition, is_steady=True, reads_result=False)


_OF_ALL_CALLS, _OF_MIXED_CALLS = _rule(always), _rule(_is_mixed)
OF_EACH_CALL = WorkspaceRule(lambda *_, **__: None, reads_result=False)


def found_workspace_of(func: Any) -> WorkspaceRule | None:
    """Return the rule of an operator whose kernel was seen to allocate, or is not torch's."""
    if isinstance(func, HigherOrderOperator):
        is_followed = func.name() in HANDLERS and func.name() not in _STACKING
        return None if is_followed else OF_EACH_CALL
    is_operator = isinstance(func, OpOverload)
    if is_operator and is_of_extension(func) and func.namespace not in _OTHERS_OF_TORCH:
        return OF_EACH_CALL
    return _found.get(func)


def is_to_be_found(func: Any, rule: WorkspaceRule | None, args: tuple[Any, ...]) -> bool:
    """Return True if the kernel of a new call may allocate what the operator's rule leaves out."""
    if not isinstance(func, OpOverload) or is_of_extension(func):
        return False
    return rule is None or (rule is _OF_MIXED_CALLS and not rule.may_be_unknown(args))


def note_workspace(func: OpOverload, args: tuple[Any, ...], size: int | None) -> bool:
    """Note what the kernel of a new call allocated for itself; return True if it did.

    size: None where the allocator was not asked. Element-wise kernels are known to cast then.
    """
    if size is None:
        casts = torch.Tag.pointwise in func.tags and _differ_in_dtype(args) and _is_on_cpu(args)
    else:
        casts = size > _FEW
    if casts:
        is_of_all = func in _found or not _is_mixed(args)
        _found[func] = _OF_ALL_CALLS if is_of_all else _OF_MIXED_CALLS
    return casts
