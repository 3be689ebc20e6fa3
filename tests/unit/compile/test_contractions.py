"""Contractions that inductor computes as a product and a sum keep their MACs.

Inductor traces the graphs, and an interpreter runs them: generating code takes too long. Truth is
the eager counter on the same program, and a product of sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from dispatch_flops import _torch
from dispatch_flops.compile import counting_backend
from tests.helpers.profiling import profile_of

A, B, C = 3, 5, 7


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_part(part: fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        run = fx.Interpreter(part).boxed_run
        boxed = lambda inputs: run(inputs)  # noqa: E731
        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    monkeypatch.setattr(_torch, "compile_part", compile_part)


def ones(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*sizes, dtype=dtype, requires_grad=True)


CASES = [
    ("bmm of vectors", torch.bmm, ((A, 1, B), (A, B, 1)), A * B),
    ("outer bmm", torch.bmm, ((A, B, 1), (A, 1, C)), A * B * C),
    ("linear of batch 1", nn.functional.linear, ((1, B), (C, B), (C,)), B * C),
    ("mm of vectors", torch.mm, ((1, B), (B, 1)), B),
    ("outer mm", torch.mm, ((A, 1), (1, B)), A * B),
    ("mv", torch.mv, ((A, B), (B,)), A * B),
    ("dot", torch.dot, ((B,), (B,)), B),
    ("mm", torch.mm, ((A, B), (B, C)), A * B * C),
]


@pytest.mark.parametrize(
    ("function", "sizes", "macs"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_contraction_that_inductor_takes_apart_counts_as_it_was(
    function: Callable[..., Tensor], sizes: tuple[tuple[int, ...], ...], macs: int
) -> None:
    def train(function: Callable[..., Tensor]) -> None:
        function(*(ones(*size) for size in sizes)).backward(torch.ones(()).expand(shape))

    shape = function(*(ones(*size) for size in sizes)).shape
    eager = profile_of(train, function)
    backend = counting_backend("inductor", strict=True)
    train(torch.compile(function, backend=backend))
    profile = backend.profile()
    assert profile.total("forward").macs == eager.total("forward").macs == macs
    for phase in ("forward", "backward"):
        assert profile.total(phase).macs == eager.total(phase).macs
        assert profile.total(phase).flops == eager.total(phase).flops


def test_scaling_of_a_contraction_that_is_taken_apart_is_not_one() -> None:
    """Inductor multiplies the sum of a product by ``alpha``, and the bias by ``beta``."""
    backend = counting_backend("inductor", strict=True)
    compiled = torch.compile(partial(torch.addmm, alpha=2, beta=3), backend=backend)
    with torch.no_grad():
        compiled(ones(1, C), ones(1, B), ones(B, C))
    assert backend.total().macs == B * C


def test_contraction_taken_apart_counts_as_it_was_under_compiled_autograd() -> None:
    backend = counting_backend("inductor", strict=True)
    x, weight = ones(1, B), ones(C, B)
    compiled = torch.compile(
        lambda x, weight: checkpoint(nn.functional.linear, x, weight, use_reentrant=False).sin(),
        backend=backend,
    )
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        compiled(x, weight).sum().backward()
    costs = backend.step().costs
    assert costs["forward"].macs == costs["recompute"].macs == B * C
    assert costs["backward"].macs == 2 * B * C


def test_contraction_taken_apart_moves_the_bytes_of_the_operator_that_it_was() -> None:
    backend = counting_backend("inductor", strict=True)
    with torch.no_grad():
        torch.compile(torch.bmm, backend=backend)(ones(A, 1, B), ones(A, B, 1))
    total = backend.total()
    assert (total.bytes_read, total.bytes_written) == (4 * 2 * A * B, 4 * A)


@pytest.mark.parametrize("batch", [2, 5])
def test_contraction_taken_apart_counts_for_every_dynamic_size(batch: int) -> None:
    backend = counting_backend("inductor", strict=True)
    compiled = torch.compile(torch.bmm, backend=backend, dynamic=True)
    with torch.no_grad():
        compiled(ones(batch, 1, B), ones(batch, B, 1))
    assert backend.total().macs == batch * B


def test_product_and_sum_of_the_program_are_not_a_contraction() -> None:
    backend = counting_backend("inductor", strict=True)
    compiled = torch.compile(lambda a, b: (a * b).sum(), backend=backend)
    with torch.no_grad():
        compiled(ones(A, B), ones(A, B))
    total = backend.total()
    assert (total.macs, total.flops) == (0, A * B + A * B - 1)
