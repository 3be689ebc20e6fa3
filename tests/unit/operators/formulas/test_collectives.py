"""Collectives: free by declaration, with their bytes counted, and none unknown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from dispatch_flops.operators.registry import lookup
from dispatch_flops.profile.cost import OpCost
from tests.helpers.profiling import profile_of

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


def test_collectives_are_free_and_counted(group: None) -> None:
    def program() -> None:
        x = torch.ones(5, 7)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather([torch.ones(5, 7)], x)
        dist.barrier()
        functional.all_reduce(x, "sum", dist.group.WORLD).add(1)

    profile = profile_of(program)
    assert profile.uncounted_ops() == {}
    assert profile.total().flops == 5 * 7  # only the last sum
    reduced = profile.by_operator()["_c10d_functional.all_reduce.default"]
    assert reduced.kind == "free"
    assert reduced.cost is not None and reduced.cost.bytes_read == 4 * 5 * 7


def test_waiting_for_a_collective_moves_no_bytes(group: None) -> None:
    x = torch.ones(5, 7, requires_grad=True)
    profile = profile_of(lambda: functional.all_reduce(x, "sum", dist.group.WORLD).add(1))
    moved = {name: op.cost and op.cost.bytes_total for name, op in profile.by_operator().items()}
    assert moved.pop("_c10d_functional.wait_tensor.default") == 0
    assert moved.pop("_c10d_functional._wrap_tensor_autograd.default", 0) == 0
    assert moved["_c10d_functional.all_reduce.default"] == 2 * 4 * 5 * 7


RANKS, M, K, N, OTHER_N = 2, 3, 5, 7, 11
ROWS = torch.empty(RANKS * M, K, device="meta")


@pytest.mark.parametrize(
    ("name", "args", "out", "macs"),
    [
        ("_async_input_mm", (ROWS, ROWS.new_empty(K, N)), None, RANKS * M * N * K),
        (
            "fused_all_gather_matmul",
            (ROWS[:M], [ROWS.new_empty(K, N), ROWS.new_empty(K, OTHER_N)], 0, "group"),
            (ROWS, [ROWS.new_empty(RANKS * M, N), ROWS.new_empty(RANKS * M, OTHER_N)]),
            RANKS * M * (N + OTHER_N) * K,
        ),
        (
            "fused_all_gather_matmul",  # along the dimension that is contracted
            (ROWS[:M], [ROWS.new_empty(RANKS * K, N)], 1, "group"),
            (None, [ROWS.new_empty(M, N)]),
            M * N * RANKS * K,
        ),
        (
            "fused_matmul_reduce_scatter",
            (ROWS, ROWS.new_empty(K, N), "sum", 0, "group"),
            ROWS.new_empty(M, N),
            RANKS * M * N * K,
        ),
    ],
)
def test_product_that_overlaps_with_a_collective_counts_as_the_product(
    name: str, args: Any, out: Any, macs: int
) -> None:
    import torch.distributed._symmetric_memory

    op = getattr(torch.ops.symm_mem, name).default
    rule = lookup(op)
    assert rule is not None
    cost = rule.answer(op, args, {}, out)
    assert isinstance(cost, OpCost)
    assert (cost.macs, cost.flops) == (macs, 2 * macs)


def test_every_collective_of_torch_is_declared() -> None:
    """A torch with a new collective fails here. Some libraries are loaded late."""
    import torch.distributed._symmetric_memory

    libraries = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    missing = [
        name
        for name in sorted(names)
        for library, _, op in [name.partition("::")]
        if library in libraries and lookup(getattr(getattr(torch.ops, library), op).default) is None
    ]
    assert missing == []
