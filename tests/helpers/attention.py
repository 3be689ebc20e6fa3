"""Sizes, answers of formulas and closed forms for attention."""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.registry import lookup
from dispatch_flops.profile.cost import OpCost, Split

Tensor = torch.Tensor

B, H, KV, SQ, SK, D = 2, 6, 3, 5, 7, 8
PAIRS = B * H * SQ * SK


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


LSE = meta(B, H, SQ)


def operands(kv_heads: int = H, sk: int = SK, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.ones(B, H, SQ, D, **options),
        torch.ones(B, kv_heads, sk, D, **options),
        torch.ones(B, kv_heads, sk, D, **options),
    )


def formula(op: Any, *args: Any, **kwargs: Any) -> OpCost | Split:
    """Return what the formula of ``op`` answers for these arguments."""
    rule = lookup(getattr(op, "default", op))
    assert rule is not None
    answer = rule.answer(op, args, kwargs, None)
    assert not isinstance(answer, int)
    return answer


def forward_flops(
    *, mask: bool = False, dropout: bool = False, pairs: int = PAIRS, d: int = D, dv: int = D
) -> int:
    """FLOPs: q and k scaled, mask, _safe_softmax (6 per score less 2 per row), dropout."""
    scaling = B * H * (SQ + SK) * d
    softmax = 6 * pairs - 2 * B * H * SQ
    return 2 * pairs * (d + dv) + scaling + pairs * mask + softmax + 2 * pairs * dropout
