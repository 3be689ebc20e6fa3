"""Embeddings with packed rows: numbers are dequantised and summed."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.profiling import macs_and_flops

pytestmark = pytest.mark.filterwarnings("ignore")

ops = torch.ops.quantized


def test_quantised_embedding_bag_counts_dequantising_and_sums() -> None:
    rows, width, picked, bags = 11, 8, 6, 2
    packed = ops.embedding_bag_byte_prepack(torch.rand(rows, width))
    indices, offsets = torch.arange(picked), torch.tensor([0, 4])
    counted = macs_and_flops(ops.embedding_bag_byte_rowwise_offsets, packed, indices, offsets)
    assert counted == (0, (2 * picked + picked - bags) * width)
