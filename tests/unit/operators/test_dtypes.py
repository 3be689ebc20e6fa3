"""What operators compute in: torch's promotion of what goes into them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.helpers.profiling import profile_of

F32, BF16, F64 = torch.ones(3), torch.ones(3, dtype=torch.bfloat16), torch.ones(3).double()
INT, MASK = torch.arange(3), torch.tensor([True, False, True])
C64 = torch.ones(3, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda: F32 + BF16, "float32"),
        (lambda: BF16 + F32, "float32"),
        (lambda: BF16.clone().add_(F32), "float32"),
        (lambda: F32[0] * BF16, "bfloat16"),
        (lambda: F64[0] * F32, "float32"),
        (lambda: F64[0] * INT, "float64"),
        (lambda: F64[0] * F32[0], "float64"),
        (lambda: C64[0] * F64, "complex128"),
        (lambda: C64 * F64[0], "complex64"),
        (lambda: INT * F32, "float32"),
        (lambda: INT / 2, "float32"),
        (lambda: INT + INT, "int64"),
        (lambda: torch.addcmul(BF16, F32, BF16), "float32"),
        (lambda: F32 > F64, "float64"),
        (lambda: F32 * 2.0, "float32"),
    ],
)
def test_operands_meet_in_the_promoted_dtype(call: Callable[[], object], dtype: str) -> None:
    ops = list(profile_of(call).op_totals())
    (op,) = [op for op in ops if op.kind == "pointwise" or op.dtype == "int64"]
    assert op.dtype == dtype
