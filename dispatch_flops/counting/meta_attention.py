"""Scaled dot product attention on tensors without data, by the kernel that a device would choose.

torch chooses a fused kernel by device. The meta device has none: there attention would consist of
the operators of the math path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispatch_flops import _torch
from dispatch_flops._torch import FakeTensor
from dispatch_flops.counting.autograd_kernels import Kernels, counters_in_force
from dispatch_flops.operators.conventions import Target
from dispatch_flops.operators.tensors import has_no_data

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
_HALF = (torch.float16, torch.bfloat16)
_TYPES = frozenset((Tensor, torch.nn.Parameter, FakeTensor))
# Alignment that flash pads heads to, and efficient pads masks to.
_FLASH_HEADS, _EFFICIENT_MASK = 8, 16


def _by_torch(*args: Any, **kwargs: Any) -> Tensor:
    """Run attention as torch takes it apart by itself."""
    out: Tensor = _torch.run_taken_apart(ATTENTION, *args, **kwargs)
    return out


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of ``scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def is_plain(self) -> bool:
        """Return True if a kernel may be chosen; otherwise torch answers, perhaps by an error."""
        given = (*self.operands(), *(() if self.attn_mask is None else (self.attn_mask,)))
        return (
            all(type(t) in _TYPES and has_no_data(t) and not t.is_nested for t in given)
            and self.query.device.type in ("meta", "cpu")  # torch knows other devices' rules
            and len({t.device for t in given}) == 1
            and len({t.dtype for t in self.operands()}) == 1
            and min(t.dim() for t in given) >= 2
            and not (self.is_causal and self.attn_mask is not None)
        )

    def additive_mask(self) -> Tensor | None:
        """Return the mask to add to the scores, made from a boolean one as torch makes it."""
        mask = self.attn_mask
        if mask is None or mask.dtype is not torch.bool:
            return mask
        kept, hidden = (
            torch.scalar_tensor(value, dtype=self.query.dtype, device=mask.device)
            for value in (0.0, float("-inf"))
        )
        return torch.where(mask, kept, hidden)

    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.operands())


def attend(target: Target, *args: Any, **kwargs: Any) -> Tensor:
    """Run ``scaled_dot_product_attention`` by the kernel that ``target`` would choose."""
    call = _Call(*args, **kwargs)
    if not call.is_plain():
        return _by_torch(*args, **kwargs)
    kernel = _cuda_kernel(call) if target == "cuda" else _cpu_kernel(call)
    return (kernel or _math)(call)


def _math(call: _Call) -> Tensor:
    out, _ = _torch.math_attention(
        *call.operands(),
        call.additive_mask(),
        call.dropout_p,
        call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )
    return out


# -- CPU -----------------------------------------------------------------------------------


def _cpu_kernel(call: _Call) -> Callable[[_Call], Tensor] | None:
    is_flash = _torch.is_flash_chosen_on_cpu(
        *call.operands(),
        call.attn_mask,
        call.dropout_p,
        call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )
    return _cpu_flash if is_flash else None


def _cpu_flash(call: _Call) -> Tensor:
    out: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        *call.operands(),
        call.dropout_p,
        call.is_causal,
        attn_mask=call.additive_mask(),
        scale=call.scale,
    )[0]
    return out


# -- CUDA, compute capability 8.0 and later ------------------------------------------------
# Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, and attention.cpp for the padding.


def _cuda_kernel(call: _Call) -> Callable[[_Call], Tensor] | None:
    if not _has_dense_shapes(call):
        return None
    if torch.backends.cuda.flash_sdp_enabled() and _can_flash(call):
        return _cuda_flash
    if torch.backends.cuda.mem_efficient_sdp_enabled() and _can_be_efficient(call):
        return _cuda_efficient
    if torch.backends.cuda.cudnn_sdp_enabled() and _is_left_to_cudnn(call):
        return _cuda_cudnn
    return None


def _has_dense_shapes(call: _Call) -> bool:
    """Return True for four dimensions, one batch size, no empty sequence, adjacent elements."""
    operands = call.operands()
    masks = () if call.attn_mask is None else (call.attn_mask,)
    return (
        all(t.dim() == 4 for t in operands)
        and len({t.shape[0] for t in operands}) == 1
        and all(t.shape[2] for t in operands)
        and all(t.stride(-1) == 1 for t in (*operands, *masks))
    )


def _have_equal_heads(call: _Call) -> bool:
    return len({t.shape[1] for t in call.operands()}) == 1


def _can_flash(call: _Call) -> bool:
    q, k, v = call.operands()
    are_grouped = call.enable_gqa and k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0
    return (
        call.attn_mask is None
        and q.dtype in _HALF
        and q.shape[3] == k.shape[3] == v.shape[3] <= 256
        and (are_grouped or _have_equal_heads(call))
        and not (call.is_causal and q.shape[2] != k.shape[2])
    )


def _can_be_efficient(call: _Call) -> bool:
    q, k, v = call.operands()
    alignment = 8 if q.dtype in _HALF else 4  # 16 bytes, what the tensor cores load at once
    return (
        q.dtype in (*_HALF, torch.float32)
        and not call.enable_gqa
        and _have_equal_heads(call)
        and q.shape[3] == k.shape[3]
        and all(size > 0 and size % alignment == 0 for size in (q.shape[3], v.shape[3]))
    )


def _is_left_to_cudnn(call: _Call) -> bool:
    """Return True if cuDNN may run the call, and the math path, which goes first, is not permitted.

    Hopper prefers cuDNN to flash attention. Their costs are the same.
    """
    q, k, v = call.operands()
    sizes = (q.shape[3], v.shape[3])
    return (
        not torch.backends.cuda.math_sdp_enabled()
        and q.dtype in _HALF
        and q.shape[3] == k.shape[3]
        and all(0 < size <= 256 and size % 8 == 0 for size in sizes)
        and (call.enable_gqa or _have_equal_heads(call))
    )


def _cuda_flash(call: _Call) -> Tensor:
    size = call.query.shape[3]
    out: Tensor = aten._scaled_dot_product_flash_attention(
        *(_padded(t, _FLASH_HEADS) for t in call.operands()),
        call.dropout_p,
        call.is_causal,
        False,
        scale=size**-0.5 if call.scale is None else call.scale,
    )[0]
    return out[..., :size] if out.shape[3] != size else out


def _cuda_efficient(call: _Call) -> Tensor:
    mask = call.additive_mask()
    if mask is not None:
        (batch, heads, queries, _), keys = call.query.shape, call.key.shape[2]
        if mask.shape[-1] % _EFFICIENT_MASK:
            mask = _padded(mask, _EFFICIENT_MASK)[..., :keys]
        mask = mask.expand(batch, heads, queries, keys)
    return _with_mask(aten._scaled_dot_product_efficient_attention, call, mask)


def _cuda_cudnn(call: _Call) -> Tensor:
    return _with_mask(aten._scaled_dot_product_cudnn_attention, call, call.additive_mask())


def _with_mask(kernel: Callable[..., Any], call: _Call, mask: Tensor | None) -> Tensor:
    needs_grad, scale = call.needs_grad(), call.scale
    out: Tensor = kernel(
        *call.operands(), mask, needs_grad, call.dropout_p, call.is_causal, scale=scale
    )[0]
    return out


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


# -- where attention comes from ------------------------------------------------------------


def kernels(target: Target) -> Kernels:
    """Return the kernels of attention that choose by ``target`` where tensors have no data.

    Outside inference mode autograd takes attention apart before a dispatch mode sees it. These are
    for the autograd keys of devices without data, and come first; other devices pay nothing.
    """
    # AutogradOther is for meta tensors in function transforms, AutogradCPU for fake tensors.
    keys = ("AutogradMeta", "AutogradOther", *(("AutogradCPU",) if target == "cuda" else ()))
    return {ATTENTION: dict.fromkeys(keys, _run)}


def _run(_keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
    active = counters_in_force()
    if not active:
        return _by_torch(*args, **kwargs)
    return attend(active[0].conventions.target, *args, **kwargs)
