"""FLOPs of operators without contractions, against counting every scalar operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given

from tests.helpers.profiling import profile_of
from tests.oracles import elementwise as define
from tests.oracles.comparing import examples, size, tensor
from tests.oracles.counting import OperationCounts, numbers

Row = list[Any]

# torch's call on (rows, n), and the definition of one row
ROWS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Row], Any]]] = {
    "softmax": (lambda x: torch.softmax(x, -1), define.softmax),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), define.log_softmax),
    "sum": (lambda x: x.sum(-1), define.total),
    "mean": (lambda x: x.mean(-1), define.mean),
    "amax": (lambda x: x.amax(-1), define.largest),
    "layer_norm": (
        lambda x: F.layer_norm(x, x.shape[1:], x[0], x[0]),
        lambda row: define.layer_norm(row, row, row, eps=1e-5),
    ),
    "layer_norm, plain": (
        lambda x: F.layer_norm(x, x.shape[1:]),
        lambda row: define.layer_norm(row, None, None, eps=1e-5),
    ),
    "rms_norm": (
        lambda x: F.rms_norm(x, x.shape[1:], x[0], 1e-5),
        lambda row: define.rms_norm(row, row, eps=1e-5),
    ),
    "silu": (F.silu, lambda row: [define.silu(x) for x in row]),
    "gelu, tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda row: [define.gelu_tanh(x) for x in row],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_flops_of_operator_match_its_definition(name: str) -> None:
    call, definition = ROWS[name]

    @examples(10)
    @given(size, size)
    def run(rows: int, n: int) -> None:
        n += 1
        x = tensor(rows, n)
        counts = OperationCounts()
        for row in numbers(x, counts):
            definition(list(row))
        profile = profile_of(call, x)
        assert profile.uncounted_ops() == {}
        assert profile.total("forward").macs == 0
        assert profile.total("forward").flops == counts.flops

    run()
