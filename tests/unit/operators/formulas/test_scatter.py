"""Gathering, scattering, embeddings: their additions and their bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dispatch_flops import OpCost
from tests.helpers.profiling import profile_of

aten = torch.ops.aten
FLOAT, LONG = 4, 8


def cost(fn: Any, *args: Any) -> OpCost:
    return profile_of(fn, *args, strict=True).total()


TABLE = torch.rand(1000, 7)
PICKS = torch.arange(11)
PICKED = 11 * 7 * FLOAT


@pytest.mark.parametrize(
    "fn",
    [
        lambda: TABLE.index_select(0, PICKS),
        lambda: TABLE[PICKS],
        lambda: F.embedding(PICKS, TABLE),
    ],
)
def test_picking_reads_what_it_picks(fn: Any) -> None:
    assert cost(fn) == OpCost(bytes_read=11 * LONG + PICKED, bytes_written=PICKED)


def test_gather_and_take_read_what_they_pick() -> None:
    index = PICKS.view(11, 1).expand(11, 3)  # 11 elements in memory
    read = 11 * LONG + 11 * 3 * FLOAT
    expected = OpCost(bytes_read=read, bytes_written=11 * 3 * FLOAT)
    assert cost(lambda: TABLE.gather(0, index)) == expected
    assert cost(lambda: TABLE.take(index)) == expected


INDEX = torch.zeros(3, 5, dtype=torch.long)
SOURCE = torch.rand(3, 5)


def target() -> torch.Tensor:
    return torch.rand(100, 5)


def test_scatter_add_adds_once_per_index() -> None:
    assert cost(lambda x: x.scatter_add(0, INDEX, SOURCE), target()) == OpCost(
        flops=3 * 5,
        bytes_read=100 * 5 * FLOAT + 3 * 5 * (LONG + FLOAT),
        bytes_written=100 * 5 * FLOAT,
    )


def test_scatter_in_place_touches_what_it_addresses() -> None:
    assert cost(lambda x: x.scatter_add_(0, INDEX, SOURCE), target()) == OpCost(
        flops=3 * 5, bytes_read=3 * 5 * (LONG + 2 * FLOAT), bytes_written=3 * 5 * FLOAT
    )
    assert cost(lambda x: x.scatter_(0, INDEX, SOURCE), target()) == OpCost(
        bytes_read=3 * 5 * (LONG + FLOAT), bytes_written=3 * 5 * FLOAT
    )


ROWS = torch.arange(3)


@pytest.mark.parametrize(
    ("norm_type", "norm"), [(1.0, 2 * 7 - 1), (2.0, 2 * 7), (3.0, 3 * 7), (float("inf"), 2 * 7 - 1)]
)
def test_renormalised_rows_count_the_norm_that_is_asked_for(norm_type: float, norm: int) -> None:
    """3 rows of 7: the norm, a comparison, a sum, a quotient, 7 products."""
    table = TABLE.clone()
    found = cost(lambda: F.embedding(ROWS, table, max_norm=1.0, norm_type=norm_type))
    assert found.flops == 3 * (norm + 3 + 7)


def reduced(x: torch.Tensor, how: str) -> torch.Tensor:
    return x.scatter_reduce(0, INDEX, SOURCE.to(x.dtype), how)


@pytest.mark.parametrize(
    ("fn", "flops"),
    [
        (lambda x: x.scatter(0, INDEX, SOURCE), 0),
        (lambda x: x.scatter(0, INDEX, SOURCE, reduce="add"), 15),
        (lambda x: x.scatter(0, INDEX, 2.0, reduce="multiply"), 15),
        (lambda x: x.scatter_reduce(0, INDEX, SOURCE, "amax"), 15),
        (lambda x: x.scatter_reduce(0, INDEX, SOURCE, "mean"), 15 + 500),
        (lambda x: x.long().scatter_reduce(0, INDEX, SOURCE.long(), "mean"), 0),
        (lambda x: x.index_add(0, ROWS, SOURCE), 15),
        (lambda x: x.index_add(0, ROWS, SOURCE, alpha=2), 30),
        (lambda x: x.index_copy(0, ROWS, SOURCE), 0),
        (lambda x: x.index_fill(0, ROWS, 1.0), 0),
        (lambda x: x.index_reduce(0, ROWS, SOURCE, "prod"), 15),
        (lambda x: x.index_put((ROWS,), SOURCE), 0),
        (lambda x: x.index_put((ROWS,), SOURCE, accumulate=True), 15),
        (lambda x: x.index_put((ROWS,), torch.tensor(1.0), accumulate=True), 15),
        (lambda x: x.index_put((ROWS, ROWS), SOURCE[0, :3], accumulate=True), 3),
        (lambda x: x.put(ROWS, SOURCE[0, :3], accumulate=True), 3),
        (lambda x: x.long().scatter_add(0, INDEX, SOURCE.long()), 0),
        (lambda x: torch.complex(x, x).index_add(0, ROWS, torch.complex(SOURCE, SOURCE)), 2 * 15),
        (lambda x: reduced(torch.complex(x, x), "sum"), 2 * 15),
        (lambda x: reduced(torch.complex(x, x), "prod"), 6 * 15),
        (lambda x: reduced(torch.complex(x, x), "mean"), 2 * 15 + 2 * 500),
        (lambda x: torch.complex(x, x).index_reduce(0, ROWS, SOURCE.cfloat(), "prod"), 6 * 15),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(deprecated|in beta)")
def test_scatter_or_index_operator_matches_closed_form(fn: Any, flops: int) -> None:
    assert cost(fn, target()).flops == flops


NO_ROWS = torch.empty(0, dtype=torch.long)
NO_INDEX = NO_ROWS.view(0, 1).expand(0, 5)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[NO_ROWS],
        lambda x: x.index_select(0, NO_ROWS),
        lambda x: x.gather(0, NO_INDEX),
        lambda x: F.embedding(NO_ROWS, x),
        lambda x: x.index_add_(0, NO_ROWS, torch.rand(0, 5)),
        lambda x: x.index_copy_(0, NO_ROWS, torch.rand(0, 5)),
        lambda x: x.index_fill_(0, NO_ROWS, 1.0),
        lambda x: x.index_put_((NO_ROWS,), torch.rand(0, 5)),
        lambda x: x.index_reduce_(0, NO_ROWS, torch.rand(0, 5), "amax"),
        lambda x: x.scatter_(0, NO_INDEX, torch.rand(0, 5)),
        lambda x: x.scatter_add_(0, NO_INDEX, torch.rand(0, 5)),
        lambda x: x.scatter_reduce_(0, NO_INDEX, torch.rand(0, 5), "sum"),
        lambda x: x.put_(NO_ROWS, torch.rand(0)),
        lambda x: x.new_ones(0),
        lambda x: x[:5].tril_(5),
    ],
)
@pytest.mark.filterwarnings("ignore:.*in beta")
def test_call_that_addresses_nothing_moves_nothing(fn: Any) -> None:
    """As for an expert that no token is routed to."""
    assert cost(fn, target()) == OpCost()


def test_index_put_with_skipped_dimensions_counts_whole_slices() -> None:
    """x[3,5,7] at [:, rows[2], cols[2]]: 3 x 2 elements; at [rows[2]]: 2 x 35."""
    x, two = torch.rand(3, 5, 7), torch.arange(2)

    def add(indices: Any, *shape: int) -> int:
        return cost(lambda: aten.index_put_(x.clone(), indices, torch.ones(shape), True)).flops

    assert add([torch.tensor(0), two, two], 2) == 2
    assert add([None, two, two], 3, 2) == 3 * 2
    assert add([two], 2, 5, 7) == 2 * 5 * 7


def test_index_put_with_a_mask_is_bounded_by_its_size() -> None:
    """How many elements a mask picks is data: x[3,5,7] under a mask[3,5] is 15·7 at most."""
    x, mask = torch.rand(3, 5, 7), torch.zeros(3, 5, dtype=torch.bool)
    added = cost(lambda: aten.index_put_(x, [mask], torch.tensor(1.0), True))
    assert added.flops == 15 * 7


def test_index_put_with_a_mask_takes_the_count_from_the_values() -> None:
    """x[3,5,7] at a mask of two rows, at a mask of three places in x[:, rows, cols], ..."""
    x = torch.rand(3, 5, 7)
    two_of_three = torch.tensor([True, False, True])
    three_places = torch.zeros(5, 7, dtype=torch.bool).view(-1)
    three_places[[1, 8, 30]] = True
    mask = three_places.view(5, 7)
    rows, one = torch.tensor([0, 4]), torch.tensor([3])

    def add(indices: Any, *shape: int) -> int:
        return cost(lambda: aten.index_put_(x.clone(), indices, torch.ones(shape), True)).flops

    assert add([two_of_three], 2, 5, 7) == 2 * 5 * 7
    assert add([two_of_three], 2, 1, 1) == 2 * 5 * 7
    assert add([None, mask], 3, 3) == 3 * 3
    assert add([two_of_three, None, one], 2, 5) == 2 * 5
    assert add([two_of_three, rows], 2, 7) == 2 * 7
    assert add([two_of_three, rows]) == 2 * 7  # the index tensor next to the mask tells
    assert add([two_of_three, one], 1, 7) == 3 * 7  # nothing says it: a bound
    assert add([two_of_three, None, rows], 2, 5) == 2 * 5


def test_picking_by_a_mask_backward_adds() -> None:
    """The loss is a sum of 2·7 picked numbers; its gradient is added into them."""
    x = torch.rand(3, 7, requires_grad=True)
    mask, rows = torch.tensor([True, False, True]), torch.tensor([0, 2])
    for picked, added in ((mask, 2 * 7), ((mask, rows), 2)):
        profile = profile_of(lambda: torch.autograd.grad(x[picked].sum(), x))  # noqa: B023
        assert profile.total("backward").flops == added
        assert not profile.uncounted_ops()


def test_picking_backward_adds() -> None:
    """The loss is a sum: 11·7 - 1. Its gradient is added into the rows: 11·7."""
    for pick in (
        lambda table: F.embedding(PICKS, table),
        lambda table: table[PICKS],
        lambda table: table.index_select(0, PICKS),
    ):
        table = TABLE.clone().requires_grad_()
        profile = profile_of(lambda p=pick, t=table: p(t).sum().backward(), strict=True)
        assert profile.total("forward").flops == 11 * 7 - 1
        assert profile.total("backward").flops == 11 * 7


@pytest.mark.parametrize(
    ("mode", "forward", "backward"),
    [("sum", (11 - 2) * 7, 11 * 7), ("mean", 11 * 7, 2 * 11 * 7), ("max", (11 - 2) * 7, 2 * 7)],
)
def test_embedding_bag_forward_and_backward_match_closed_form(
    mode: str, forward: int, backward: int
) -> None:
    """11 rows of 7 in 2 bags; a mean divides 2·7 sums, and its gradient again per row."""
    table, offsets = TABLE.clone().requires_grad_(), torch.tensor([0, 4])

    def run() -> None:
        F.embedding_bag(PICKS, table, offsets, mode=mode).backward(torch.ones(2, 7))

    profile = profile_of(run, strict=True)
    assert profile.total("forward").flops == forward
    assert profile.total("backward").flops == backward


def test_embedding_bag_with_weights_adds_products() -> None:
    """Weights: a product per element. Their gradient: a dot product of 7 per row."""
    table, offsets = TABLE.clone().requires_grad_(), torch.tensor([0, 4])
    weights = torch.rand(11, requires_grad=True)

    def run() -> None:
        bags = F.embedding_bag(PICKS, table, offsets, mode="sum", per_sample_weights=weights)
        bags.backward(torch.ones(2, 7))

    profile = profile_of(run, strict=True)
    assert profile.total("forward").flops == (11 - 2) * 7 + 11 * 7
    assert profile.total("backward").macs == 11 * 7
    assert profile.total("backward").flops == 2 * 11 * 7 + 2 * 11 * 7


def test_histogram_matches_closed_form() -> None:
    """histc: 6 per number, 2 more for the bounds; histogram with 5 edges: 2 + ⌈log2 6⌉ + 1."""
    x = torch.rand(105)
    assert cost(lambda: torch.histc(x, 4, 0.0, 1.0)).flops == 6 * 105
    assert cost(lambda: torch.histc(x, 4)).flops == 6 * 105 + 2 * 104
    assert cost(lambda: torch.histogram(x, torch.linspace(0, 1, 5))).flops == 105 * 6 + 5 * 5
    assert cost(lambda: torch.bincount(x.long())).flops == 0
    assert cost(lambda: torch.bincount(x.long(), x)).flops == 105


def test_histogram_in_two_dimensions_matches_closed_form() -> None:
    """x[11,2] in 4 x 6 bins: 2·2·10 for the ranges, edges 5·5 and 5·7; a point finds 7 and 7,
    and adds 1.
    """
    x = torch.rand(11, 2)
    expected = 2 * 2 * 10 + 5 * 5 + 5 * 7 + 11 * (7 + 7 + 1)
    assert cost(lambda: torch.histogramdd(x, [4, 6])).flops == expected


def test_segment_reduce_matches_closed_form() -> None:
    """x[11,7] in 2 segments: (11-2)·7 sums; a mean divides 2·7."""
    x, lengths = torch.rand(11, 7), torch.tensor([4, 7])
    assert cost(lambda: torch.segment_reduce(x, "sum", lengths=lengths)).flops == 9 * 7
    assert cost(lambda: torch.segment_reduce(x, "mean", lengths=lengths)).flops == 11 * 7


@pytest.mark.parametrize(("reduce", "each"), [("sum", 0), ("mean", 1), ("max", 2), ("prod", 2)])
def test_segment_reduce_backward_matches_closed_form(reduce: str, each: int) -> None:
    x = torch.rand(11, 7, requires_grad=True)
    out = torch.segment_reduce(x, reduce, lengths=torch.tensor([4, 7]))
    assert cost(out.backward, torch.ones(2, 7)).flops == each * 11 * 7
