"""Embeddings whose rows are packed in 8, 4 or 2 bits a number."""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.formulas._quantized import is_packed, quantized
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.profile.cost import OpCost

Tensor = torch.Tensor


@register_flops(quantized("embedding_byte", "embedding_4bit", "embedding_2bit"))
def embedding(packed: Any, indices: Tensor, *_args: Any, out: Tensor, **_: Any) -> OpCost:
    """Rows picked and dequantised with their own scale and offset: 2 per element."""
    read = nbytes(indices) + _rows_read(packed, indices)
    return OpCost(flops=2 * out.numel(), bytes_read=read, bytes_written=nbytes(out))


def _rows_read(weight: Any, indices: Tensor) -> int:
    """Return the bytes of the rows that the indices pick, at most all of the table.

    A packed row is its numbers of 8, 4 or 2 bits, then its scale and offset: two float32 after
    bytes, two float16 after less. Source: qembeddingbag_prepack.cpp.
    """
    if is_packed(weight):
        rows, width = weight.unpack().shape
        bits: int = weight.bit_rate()
        row = width + 8 if bits == 8 else -(-width * bits // 8) + 4
    else:
        rows, row = weight.shape[0], weight.shape[1] * weight.element_size()
    return int(min(indices.numel(), rows) * row)


@register_flops(
    quantized(
        *(
            f"embedding_bag_{bits}{form}"
            for bits in ("byte", "4bit", "2bit")
            for form in ("", "_rowwise_offsets")
        )
    ),
    by_name=True,
)
def embedding_bag(
    *,
    weight: Any,
    indices: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    compressed_indices_mapping: Tensor | None = None,
    out: Tensor,
    **_: Any,
) -> OpCost:
    """Bags of rows, dequantised (2), weighted if there are weights (1), and summed: n - m."""
    picked = indices.numel() * out.shape[-1]
    per_element = 2 + (per_sample_weights is not None)
    count = per_element * picked + max(picked - out.numel(), 0)
    read = nbytes(indices, offsets, per_sample_weights, compressed_indices_mapping)
    read += _rows_read(weight, indices)
    return OpCost(flops=count, bytes_read=read, bytes_written=nbytes(out))
