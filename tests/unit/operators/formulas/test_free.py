"""Free operators: no FLOPs, and only the bytes that really move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispatch_flops import OpCost
from dispatch_flops.operators.registry import lookup, rules
from tests.helpers.profiling import profile_of

BYTES = 4 * 3 * 5 * 7


def cost(fn: Any) -> OpCost:
    return profile_of(fn, torch.ones(3, 5, 7), strict=True).total()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.view(-1),
        lambda x: x.transpose(0, 1).unsqueeze(0)[0, 1:, ::2],
        lambda x: x.detach(),
        lambda x: x.expand(2, 3, 5, 7),
        lambda x: x.split(1),
        lambda x: torch.ops.aten._unsafe_view(x, [105]),
        lambda x: torch.empty(3, 5, 7),
        lambda x: torch.empty_like(x),
        lambda x: x.new_empty(3),
    ],
)
def test_views_and_allocations_move_nothing(fn: Any) -> None:
    assert cost(fn) == OpCost()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.zeros(3, 5, 7),
        lambda x: torch.zeros_like(x),
        lambda x: torch.full((3, 5, 7), 2.0),
        lambda x: x.new_ones(3, 5, 7),
        lambda x: x.fill_(2.0),
        lambda x: x.zero_(),
    ],
)
def test_fills_only_write(fn: Any) -> None:
    assert cost(fn) == OpCost(bytes_written=BYTES)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.clone(),
        lambda x: x.transpose(0, 1).contiguous(),
        lambda x: x.flip(0),
        lambda x: torch.empty(3, 5, 7).copy_(x),
        lambda x: torch.cat([x[:1], x[1:]]),
    ],
)
def test_copies_read_and_write(fn: Any) -> None:
    assert cost(fn) == OpCost(bytes_read=BYTES, bytes_written=BYTES)


def test_cast_writes_in_the_new_size() -> None:
    assert cost(lambda x: x.to(torch.float64)) == OpCost(bytes_read=BYTES, bytes_written=2 * BYTES)


def test_copy_with_broadcasting_reads_its_source_once() -> None:
    assert cost(lambda x: torch.empty(2, 3, 5, 7).copy_(x)) == OpCost(
        bytes_read=BYTES, bytes_written=2 * BYTES
    )


def test_every_free_rule_has_a_reason() -> None:
    free = {name: rule for name, rule in rules().items() if rule.kind == "free" and rule.builtin}
    assert len(free) > 200
    assert [name for name, rule in free.items() if not rule.note] == []


def test_every_view_of_torch_has_a_rule() -> None:
    """Views are found by their schemas; each has a rule or is decomposed."""
    views, bare = 0, []
    for name in torch._C._dispatch_get_all_op_names():
        library, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if library == "aten" and op is not None and op.is_view:
            views += 1
            if lookup(op) is None and not op._can_decompose():
                bare.append(name)
    assert views > 50
    assert bare == []
