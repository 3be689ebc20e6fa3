"""What CUDA's kernels allocate for themselves, where a run on the meta device is to be as on CUDA.

The bytes are those that the allocator of an H200 reported (torch 2.11).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from dispatch_flops import FlopCounterMode
from dispatch_flops.operators import workspaces
from dispatch_flops.operators.workspaces import register_workspace, workspace_of
from dispatch_flops.profile import MemoryProfile

aten = torch.ops.aten


def formula(operator: torch._ops.OpOverload, *args: object, **kwargs: object) -> int | None:
    rule = workspace_of(operator, as_on_cuda=True)
    assert rule is not None
    return rule.formula(*args, **kwargs)


def heads_first(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def queries_first(batch: int, heads: int, queries: int, size: int) -> Tensor:
    return heads_first(batch, queries, heads, size).transpose(1, 2)


@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "queries", "keys", "size", "reported"),
    [
        (2, 8, 8, 128, 128, 64, 1_056_768),
        (2, 4, 4, 1000, 1000, 80, 5_738_496),
        (2, 4, 1, 1000, 1000, 80, 8_298_496),
    ],
)
def test_backward_of_flash_allocates_what_the_device_reported(
    batch: int, heads: int, key_heads: int, queries: int, keys: int, size: int, reported: int
) -> None:
    q, k = heads_first(batch, heads, queries, size), heads_first(batch, key_heads, keys, size)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    assert formula(backward, q, q, k, k, q) == reported


def test_backward_of_flash_copies_what_has_heads_before_queries() -> None:
    """16 rows of 16 in heads of 16, as of a small vision model: 143,360 with two copies."""
    backward = aten._scaled_dot_product_flash_attention_backward.default
    first, last = heads_first(2, 4, 16, 16), queries_first(2, 4, 16, 16)
    copy = 2 * 4 * 16 * 16 * 2
    reported = 143_360
    found = [formula(backward, grad, first, first, first, out) for grad in (first, last)
             for out in (first, last)]  # fmt: skip
    assert found == [reported, reported - copy, reported - copy, reported - 2 * copy]


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_backward_of_flash_is_not_known_with_deterministic_algorithms() -> None:
    q = heads_first(2, 8, 128, 64)
    with deterministic():
        assert formula(
            aten._scaled_dot_product_flash_attention_backward.default, q, q, q, q, q
        ) is None  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys", "size", "dropout", "reported"),
    [
        (1, 32, 4096, 4096, 128, 0.0, 0),
        (2, 8, 128, 128, 64, 0.0, 0),  # one block of keys
        (2, 4, 1000, 1000, 80, 0.1, 16),
        (2, 4, 1000, 1000, 80, 0.0, None),  # split among the multiprocessors
        (4, 8, 1, 4000, 128, 0.0, None),
    ],
)
def test_flash_allocates_nothing_unless_it_splits_the_keys(
    batch: int, heads: int, queries: int, keys: int, size: int, dropout: float, reported: int | None
) -> None:
    q, k = heads_first(batch, heads, queries, size), heads_first(batch, heads, keys, size)
    forward = aten._scaled_dot_product_flash_attention.default
    assert formula(forward, q, k, k, dropout) == reported


def test_flash_counts_a_group_of_heads_with_one_query_as_queries() -> None:
    forward = aten._scaled_dot_product_flash_attention.default
    q = heads_first(32, 32, 1, 128)
    assert formula(forward, q, heads_first(32, 32, 700, 128), heads_first(32, 32, 700, 128)) == 0
    k = heads_first(32, 4, 700, 128)
    assert formula(forward, q, k, k) is None


@pytest.mark.parametrize(
    ("dtype", "size", "reported"),
    [
        (torch.bfloat16, 192, 460_800),
        (torch.float16, 256, 614_400),
        (torch.bfloat16, 128, 0),
        (torch.float32, 256, 0),
    ],
)
def test_efficient_attention_allocates_what_the_device_reported(
    dtype: torch.dtype, size: int, reported: int
) -> None:
    q = torch.empty(1, 2, 300, size, dtype=dtype, device="meta")
    forward = aten._scaled_dot_product_efficient_attention.default
    assert formula(forward, q, q, q, None, True) == reported


def test_peak_of_attention_for_cuda_is_no_lower_bound() -> None:
    q = heads_first(2, 8, 1024, 64).requires_grad_()
    with FlopCounterMode(display=False, memory=True, target="cuda") as counter:
        functional.scaled_dot_product_attention(q, q, q).sum().backward()
    memory: MemoryProfile | None = counter.profile.memory
    assert memory is not None and not memory.is_lower_bound
    assert "aten._scaled_dot_product_flash_attention_backward.default" in {
        op.op for op in counter.profile.op_totals()
    }


def test_gradients_of_softmax_are_multiplied_first_on_cuda() -> None:
    backward = aten._softmax_backward_data.default
    scores = torch.empty(2, 4, 1024, 1024, device="meta")
    assert formula(backward, scores, scores, -1, torch.float32) == 33_554_432
    gaps = torch.empty(5, 10, 10, device="meta")[:, :, ::2]
    assert formula(backward, torch.empty(5, 10, 5, device="meta"), gaps, -1, torch.float32) == 2_000


def test_norms_copy_what_has_gaps_on_cuda() -> None:
    x, scale = torch.empty(512, 768, device="meta"), torch.empty(768, device="meta")
    rows = torch.empty(512, 1, device="meta")
    backward, forward = aten.native_layer_norm_backward.default, aten.native_layer_norm.default
    expanded = torch.empty((), device="meta").expand(512, 768)
    rest = ([768], rows, rows, scale, scale, [True, True, True])
    assert formula(backward, expanded, x, *rest) == 1_572_864
    assert formula(backward, x, x, *rest) == 0
    halves = (
        torch.empty(2, 817, 512, dtype=torch.bfloat16, device="meta")[:, :799].mT.contiguous().mT
    )
    small = torch.empty(512, dtype=torch.bfloat16, device="meta")
    assert formula(forward, halves, [512], small, small, 1e-5) == 1_636_352


def test_sums_cast_whole_numbers_but_not_half_precision_on_cuda() -> None:
    """The allocator reported 120 bytes for 15 booleans."""
    add, mean, half = aten.sum.dim_IntList, aten.mean.dim, heads_first(3, 5, 7, 11)
    assert formula(add, torch.empty(3, 5, dtype=torch.bool, device="meta"), [0, 1]) == 120
    assert formula(add, half, [0], dtype=torch.float32) == 0
    assert formula(add, half, [0], dtype=torch.float64) == 3 * 5 * 7 * 11 * 8
    assert formula(mean, half, [-1]) == 0
    singles = torch.empty(3, 5, device="meta")
    assert formula(aten.all.default, singles) == 0
    assert formula(aten.count_nonzero.default, singles) == 3 * 5 * (1 + 8)


def test_products_copy_whole_batches_of_factors_with_gaps_on_cuda() -> None:
    factor = heads_first(3, 4, 5, 14)[..., ::2].flatten(0, 1)  # 12 matrices of 5 x 7
    dense = heads_first(1, 12, 7, 11)[0]
    assert formula(aten.bmm.default, factor, dense) == 12 * 5 * 7 * 2
    assert formula(aten.mm.default, factor[0], dense[0]) == 5 * 7 * 2
    assert formula(aten.mm.default, factor[0].contiguous(), dense[0].mT.contiguous().mT) == 0
    assert formula(aten.mv.default, factor[0], dense[0, :, 0]) == 5 * 7 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_for_cuda_have_exact_peaks(dtype: torch.dtype) -> None:
    """They are on the CPU, whose products and sums in half precision have no formula."""
    with FakeTensorMode(), FlopCounterMode(display=False, memory=True, target="cuda") as counter:
        x = torch.ones(7, 5, dtype=dtype)
        (x @ torch.ones(5, 3, dtype=dtype)).sum([0, 1])
    memory = counter.profile.memory
    assert memory is not None and not memory.is_lower_bound
    assert memory.peak_bytes == (7 * 5 + 5 * 3 + 7 * 3) * dtype.itemsize


def test_wrapped_tensors_without_data_have_the_workspaces_of_cuda() -> None:
    """As results of collectives that plans over a mesh multiply."""
    with FakeTensorMode():
        wrapped = TwoTensor(*(torch.ones(7, 5, dtype=torch.bfloat16) for _ in range(2)))
        assert formula(aten.mm.default, wrapped, torch.ones(5, 3, dtype=torch.bfloat16)) == 0
        assert formula(aten.mean.dim, wrapped, [0]) == 0
    assert formula(aten.mm.default, torch.ones(7, 5), torch.ones(5, 3)) is None


def peak_of_softmax(target: Any, device: str) -> int:
    x = torch.ones(7, 11, device=device, requires_grad=True)
    with FlopCounterMode(display=False, memory=True, target=target) as counter:
        out = x.softmax(-1)
        out.backward(torch.ones_like(out))
    memory = counter.profile.memory
    assert memory is not None and not memory.is_lower_bound
    return memory.peak_bytes


def test_workspaces_of_cuda_are_those_of_runs_for_cuda_alone() -> None:
    tensor = 7 * 11 * 4
    on_cpu = 4 * tensor  # input, result, and the gradients of both
    assert peak_of_softmax("cpu", "meta") == peak_of_softmax("cuda", "cpu") == on_cpu
    assert peak_of_softmax("cuda", "meta") == on_cpu + tensor


def test_workspace_of_the_user_goes_before_that_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "_WORKSPACES", dict(workspaces._WORKSPACES))
    stated = 10_007
    register_workspace(aten._softmax_backward_data, override=True)(lambda *_, **__: stated)
    assert peak_of_softmax("cuda", "meta") == 4 * 7 * 11 * 4 + stated
