"""Arguments that torch computes results in, where no dispatch mode is on.

Under a dispatch mode, torch treats every tensor as a subclass, and then computes out of place.
Sources: can_accumulate_inplace, torch/csrc/autograd/input_buffer.cpp; areAnyTensorSubclassLike
in torch/csrc/autograd/FunctionsManual.cpp and aten/src/ATen/TensorSubclassLikeUtils.h; linear in
aten/src/ATen/native/Linear.cpp.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import FakeTensor, OpOverload

_forward_mode = torch.autograd.forward_ad

_ALONE = 2  # references to a storage: of its only tensor, and of its Python object
# References to a tensor: of what holds it in C++, of its Python object, and two of the call.
_HELD_ONCE = 4
_PLAIN = (torch.Tensor, FakeTensor)
_WITH_BIAS = (*_PLAIN, torch.nn.Parameter)
ACCUMULATION = "aten::add.Tensor"
_INTO_ZEROS = frozenset((
    "aten::index_add", "aten::index_put", "aten::masked_scatter", "aten::put", "aten::scatter.src",
    "aten::scatter_add",
))  # fmt: skip


def may_reuse(name: str) -> bool:
    """Return True for the name of an operator that torch may compute in its first argument."""
    return name == ACCUMULATION or name in _INTO_ZEROS


def reused_storage(
    func: OpOverload,
    args: Any,
    kwargs: Any,
    out: torch.Tensor,
    is_latest: Callable[[torch.UntypedStorage], bool],
) -> torch.UntypedStorage | None:
    """Return the storage that would hold ``out``; None if torch allocates one in any case.

    Called by a dispatch mode, of an operator in a backward pass for which ``may_reuse`` is true.
    The first argument alone may hold it: zeros that a node has just made, or the sum so far.

    is_latest: tells whether a storage was allocated last, before this operator ran.
    """
    if kwargs or torch.is_grad_enabled() or not _is_called_by_engine():
        return None
    if _python_references(args) != _FEWEST_REFERENCES or not _can_hold(args[0], out):
        return None
    storage: torch.UntypedStorage = args[0].untyped_storage()
    if func.name() == ACCUMULATION:
        may_hold = _may_take(args[0], args[1]) and not _is_summed_by_node()
    else:
        may_hold = is_latest(storage)
    return storage if may_hold else None


def storage_of_product(
    args: Any,
    kwargs: Any,
    out: torch.Tensor,
    is_latest: Callable[[torch.UntypedStorage], bool],
) -> torch.UntypedStorage | None:
    """Return the storage of a product that ``linear`` would add its bias to in place, else None.

    It does so where the product and the bias are not one operator, as with an input that has gaps.

    args, kwargs: of an operator that may be that sum. is_latest: as in ``reused_storage``.
    """
    if kwargs or _python_references(args) != _FEWEST_REFERENCES:
        return None
    product, bias = args
    if bias.__class__ not in _WITH_BIAS or bias.dim() != 1 or not _can_hold(product, out):
        return None
    # In TorchScript, and in the transforms of torch.func, other references hold a product.
    if _torch.tensor_use_count(product) != _HELD_ONCE or _forward_mode._current_level >= 0:
        return None
    storage: torch.UntypedStorage = product.untyped_storage()
    return storage if is_latest(storage) else None


def _python_references(args: Any) -> int:
    """Return the number of references to the Python object of the first argument."""
    return sys.getrefcount(args[0])


def _fewest_references() -> int:
    """Return how many there are where only C++ and the tuple of arguments hold the tensor.

    What the program holds, such as a gradient that a hook kept, torch does not compute in.
    """
    with _torch.modes_disabled(), torch.inference_mode(False):
        view = torch.empty(1, device="meta")[:]  # holds the tensor that it is a view of, in C++
        return _python_references((view._base,))


_FEWEST_REFERENCES = _fewest_references()


def _can_hold(tensor: Any, out: torch.Tensor) -> bool:
    """Return True for a tensor like ``out`` that fills its storage and shares it with no other."""
    if not _is_plain(tensor) or tensor.shape != out.shape:
        return False
    storage = tensor.untyped_storage()
    return (
        tensor.dtype is out.dtype
        and tensor.nbytes == storage.nbytes()
        and _torch.storage_use_count(storage._cdata) == _ALONE
    )


def _may_take(total: torch.Tensor, term: Any) -> bool:
    """Return True if a term is added to a sum in place.

    Another sum may begin with the same tensor: a node hands one gradient to several others.
    """
    return _torch.tensor_use_count(total) == _HELD_ONCE and _is_plain(term)


def _is_plain(tensor: Any) -> bool:
    """Return True for a tensor that is dense, and no subclass; a fake one stands for such."""
    return tensor.__class__ in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def _is_called_by_engine() -> bool:
    """Return True if autograd's engine or one of its C++ nodes runs the operator."""
    caller = _caller()
    return caller is None or caller.f_code is _torch.ENGINE_CODE


def _is_summed_by_node() -> bool:
    """Return True if a C++ node adds, for itself, what it computed.

    The engine adds up results of a node after it has released what the node saved. Where it keeps
    that, or was not called in this thread, a sum is taken for the engine's.
    """
    engine = _caller()
    is_released = engine is not None and not _torch.keeps_graph(engine)
    return is_released and _torch.holds_saved_tensors(_torch.current_node())


def _caller() -> FrameType | None:
    """Return the innermost frame that is not of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_of_this_package(frame):
        frame = frame.f_back
    return frame


def _is_of_this_package(frame: FrameType) -> bool:
    # A script has the package None.
    return (frame.f_globals.get("__package__") or "").startswith(__package__)
