"""Empty tensors: no formula fails or returns a negative count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.profiling import profile_of


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


CASES: dict[str, Callable[[], Any]] = {
    "softmax of empty rows": lambda: ones(3, 0).softmax(1),
    "log_softmax of empty columns": lambda: ones(0, 5).log_softmax(0),
    "sum": lambda: ones(0, 5).sum(0),
    "mean of no rows": lambda: ones(0, 5).mean(1),
    "norm": lambda: ones(0, 5).norm(dim=0),
    "layer_norm": lambda: F.layer_norm(ones(0, 5), (5,), ones(5), ones(5)),
    "rms_norm": lambda: F.rms_norm(ones(0, 5), (5,), ones(5)),
    "group_norm without samples": lambda: F.group_norm(ones(0, 6, 4), 3, ones(6), ones(6)),
    "group_norm without places": lambda: F.group_norm(ones(2, 6, 0), 3, ones(6), ones(6)),
    "linear": lambda: F.linear(ones(0, 5), ones(7, 5), ones(7)),
    "contraction of nothing": lambda: ones(3, 0) @ ones(0, 7),
    "convolution": lambda: F.conv2d(ones(0, 4, 8, 8), ones(6, 4, 3, 3), ones(6)),
    "pooling": lambda: F.avg_pool2d(ones(0, 4, 8, 8), 2),
    "attention without queries": lambda: F.scaled_dot_product_attention(
        ones(2, 3, 0, 4), ones(2, 3, 5, 4), ones(2, 3, 5, 4)
    ),
    "embedding": lambda: F.embedding(torch.zeros(0, dtype=torch.long), ones(5, 3)),
    "cross entropy": lambda: F.cross_entropy(
        ones(0, 7), torch.zeros(0, dtype=torch.long), reduction="sum"
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_operator_on_empty_tensors_has_a_cost_without_macs(case: str) -> None:
    try:
        CASES[case]()
    except RuntimeError as error:
        pytest.skip(f"this torch refuses it: {error}")
    profile = profile_of(lambda: CASES[case]().sum().backward())
    assert profile.uncounted_ops() == {}
    assert profile.total().macs == 0
