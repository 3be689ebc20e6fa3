"""Operators that read values, where tensors have none: on the meta device, or fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.operators.tensors import has_no_data

_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_UNTAGGED = frozenset(("aten::_pack_padded_sequence",))  # its lengths are data
_ITEM = torch.ops.aten._local_scalar_dense.default
_ADVICE = (
    "dispatch_flops: {} reads values, but a tensor on the meta device (or a fake one) has none. "
    "Pass the model what it derives from values, such as a 4-D attention mask; or pass "
    "meta_value=1 to FlopCounterMode as the answer to every value that is read; or run on real "
    "tensors."
)


def reads_data(func: OpOverload) -> bool:
    """Return True if the operator's result, or the result's shape, depends on values."""
    return any(tag in func.tags for tag in _TAGS) or func.name() in _UNTAGGED


def varies_in_shape(func: OpOverload) -> bool:
    """Return True if the shape of a tensor that the operator returns may depend on values."""
    returned = _torch.schema_of(func).returns
    return reads_data(func) and any("Tensor" in str(value.type) for value in returned)


def with_advice(
    call: Callable[..., Any], func: OpOverload, meta_value: float | None
) -> Callable[..., Any]:
    """Return ``call``, which reads values, so that its errors for lack of values say what to do.

    meta_value: the answer of ``.item()`` and the like on tensors without values; None: they raise.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        has_one = len(args) == 1 and not kwargs
        if not any(map(has_no_data, args if has_one else _torch.tree_leaves((args, kwargs)))):
            return call(*args, **kwargs)
        if func is _ITEM and meta_value is not None:
            return _as_scalar(meta_value, args[0].dtype)
        try:
            return call(*args, **kwargs)
        except Exception as error:
            error.add_note(_ADVICE.format(func))
            raise

    return run


def _as_scalar(value: float, dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return bool(value)
    return float(value) if dtype.is_floating_point else int(value)
