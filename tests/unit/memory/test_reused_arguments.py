"""Peaks of backward passes that torch computes in place, against its allocator's events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode
from dispatch_flops.distributed import simulate
from tests.helpers.allocator import counted_peak_bytes, peak_bytes
from tests.helpers.ranks import peaks

ROWS, COLUMNS = 211, 97
Function = Callable[[torch.Tensor], torch.Tensor]


def residuals(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + x.sin() * x.cos()
    return x


def residuals_with_kept_gradients(x: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    for _ in range(3):
        y = x.sin()
        y.register_hook(kept.append)
        x = x + y * x.cos()
        x.register_hook(kept.append)
    return x


def residual_with_kept_gradient(x: torch.Tensor) -> torch.Tensor:
    """The gradient that a hook keeps is the first term of a sum; the peak comes after that."""
    kept: list[torch.Tensor] = []
    y = x.repeat(4, 1).sin().narrow(0, 0, ROWS)
    y = y + y.abs()
    y.register_hook(kept.append)
    return y * 2


def slices(x: torch.Tensor) -> torch.Tensor:
    return x[:3].sin() + x[5:8]


def slices_with_kept_gradients(x: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    parts = [x.narrow(0, start, 3) * 1 for start in (0, 5)]
    x.register_hook(kept.append)
    return parts[0] + parts[1]


class SumOfRows(torch.autograd.Function):
    """Adds up its gradient in Python, out of place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        first, second = (gradient.expand(ROWS, COLUMNS) * part for part in (0.3, 0.7))
        return first + second


def first_term_in_two_sums(x: torch.Tensor) -> torch.Tensor:
    """The second sum of two hands one gradient to two views; the first adds to one of these."""
    one, two, three = (x.view(ROWS, COLUMNS) for _ in range(3))
    return (one + two).mean() + (one + three).mean()


def recomputed(x: torch.Tensor) -> torch.Tensor:
    def function(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(ROWS, COLUMNS).index_put((torch.arange(3),), torch.ones(COLUMNS))
        return (x * mask).sin()[torch.arange(5)]

    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)


FUNCTIONS: dict[str, Function] = {
    "list of saved tensors": lambda x: x.sin() + x[torch.arange(ROWS).unsqueeze(1)].sum(1),
    "residual connections": residuals,
    "residual connections, gradients kept": residuals_with_kept_gradients,
    "residual connection, gradient kept": residual_with_kept_gradient,
    "four branches": lambda x: x + x.sin() + x.cos() + x.tanh(),
    "slices": slices,
    "slices, gradients kept": slices_with_kept_gradients,
    "gradients added in Python": SumOfRows.apply,
    "index": lambda x: x.sin()[torch.arange(3)],
    "index_select": lambda x: x.sin().index_select(0, torch.arange(3)),
    "gather": lambda x: x.sin().gather(1, torch.zeros(ROWS, 1, dtype=torch.long)),
    "take": lambda x: x.sin().take(torch.arange(3)),
    "first term expanded": lambda x: x.mean() + x.sum(),
    "second term expanded": lambda x: x.sum() + x.mean(),
    "first term in two sums": first_term_in_two_sums,
    "max": lambda x: x.sin().max(1)[0],
    "index, recomputed": recomputed,
}


def truth_and_ours(
    make: Callable[[], tuple[nn.Module | None, list[torch.Tensor], Callable[[], Any]]],
) -> tuple[int, int]:
    """Return the allocator's peak of a run, and the peak of the same run under a counter."""
    _, held, run = make()
    truth = peak_bytes(run, held)
    model, _, run = make()
    return truth, counted_peak_bytes(run, model)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward_pass_that_reuses_arguments_peaks_at_the_allocators_bytes(name: str) -> None:
    def make() -> tuple[None, list[torch.Tensor], Callable[[], Any]]:
        x = torch.randn(ROWS, COLUMNS, requires_grad=True)

        def run() -> None:
            FUNCTIONS[name](x.exp()).sum().backward()

        return None, [x], run

    truth, ours = truth_and_ours(make)
    assert abs(ours - truth) <= 16  # scalars of the profiler's run


@pytest.mark.parametrize("name", FUNCTIONS)
def test_simulated_backward_pass_reuses_the_arguments_that_a_real_one_does(name: str) -> None:
    def make() -> Callable[[], None]:
        x = torch.ones(ROWS, COLUMNS, requires_grad=True)
        return lambda: FUNCTIONS[name](x.exp()).sum().backward()

    run = make()
    with FlopCounterMode(display=False, memory=True) as counter:
        run()
    simulated = simulate(lambda mesh: make(), {"dp": 1}, memory=True).ranks[0]
    assert peaks(simulated) == peaks(counter.profile)


def test_shared_weight_has_its_second_gradient_added_out_of_place() -> None:
    """The first gradient is a transpose of a product, which shares its storage with it."""

    def make() -> tuple[nn.Module, list[torch.Tensor], Callable[[], Any]]:
        model, x = nn.Linear(COLUMNS, COLUMNS), torch.randn(5, COLUMNS)
        return model, [*model.parameters(), x], lambda: model(model(model(x))).sum().backward()

    truth, ours = truth_and_ours(make)
    assert ours == truth


def test_attention_with_a_loss_on_its_weights_peaks_at_the_allocators_bytes() -> None:
    def make() -> tuple[nn.Module, list[torch.Tensor], Callable[[], Any]]:
        model, x = nn.MultiheadAttention(64, 4, batch_first=True), torch.randn(4, 90, 64)

        def run() -> None:
            y, weights = model(x, x, x)
            (y.square().mean() + weights.square().sum()).backward()

        return model, [*model.parameters(), x], run

    truth, ours = truth_and_ours(make)
    assert abs(ours - truth) <= 16


def with_layer_norm_by_hand(x: torch.Tensor) -> torch.Tensor:
    """The engine adds to what the node of the variance has added up for itself."""
    variance, mean = torch.var_mean(x, dim=1, keepdim=True)
    return (x - mean) * variance.rsqrt()


SUMS_OF_NODES: dict[str, Function] = {
    "var_mean": lambda x: torch.stack(torch.var_mean(x)),
    "layer norm": with_layer_norm_by_hand,
    "cholesky": lambda x: torch.linalg.cholesky(x.mT @ x + torch.eye(COLUMNS)),
    "pinv": torch.linalg.pinv,
    "lstsq": lambda x: torch.linalg.lstsq(x, x * 2).solution,
    "atan2": lambda x: torch.atan2(x, x * 2),
}


@pytest.mark.parametrize("name", SUMS_OF_NODES)
def test_sums_within_a_node_are_computed_out_of_place(name: str) -> None:
    def make() -> tuple[None, list[torch.Tensor], Callable[[], Any]]:
        x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
        x.requires_grad_()

        def run() -> None:
            SUMS_OF_NODES[name](x).sum().backward()
            x.grad = None

        return None, [x], run

    truth, ours = truth_and_ours(make)
    assert abs(ours - truth) <= truth / 1000


@pytest.mark.parametrize("name", ["residuals", "slices"])
def test_engine_adds_up_in_place_where_the_graph_is_kept(name: str) -> None:
    def make() -> tuple[None, list[torch.Tensor], Callable[[], Any]]:
        x = torch.randn(ROWS, COLUMNS, requires_grad=True)

        def run() -> None:
            {"residuals": residuals, "slices": slices}[name](x).sum().backward(retain_graph=True)
            x.grad = None

        return None, [x], run

    truth, ours = truth_and_ours(make)
    assert abs(ours - truth) <= 16


def test_scatter_into_another_tensor_than_new_zeros_is_computed_out_of_place() -> None:
    """Backward of the largest of each row scatters into a mask of the rows."""

    def make() -> tuple[None, list[torch.Tensor], Callable[[], Any]]:
        x = torch.randn(ROWS, COLUMNS, requires_grad=True)
        rows = torch.zeros(ROWS, COLUMNS, dtype=torch.long)

        def run() -> None:
            torch.zeros(ROWS, COLUMNS).scatter_reduce(1, rows, x, "amax").sum().backward()

        return None, [x, rows], run

    truth, ours = truth_and_ours(make)
    assert abs(ours - truth) <= 16


@pytest.mark.parametrize("terms", [2, 3])
def test_sparse_gradients_are_added_up_out_of_place(terms: int) -> None:
    def make() -> tuple[None, list[torch.Tensor], Callable[[], Any]]:
        weight = torch.randn(ROWS, COLUMNS, requires_grad=True)
        rows = torch.arange(ROWS // 2)

        def run() -> None:
            found = [embedding(rows, weight, sparse=True).mean() for _ in range(terms)]
            torch.stack(found).sum().backward()

        return None, [weight, rows], run

    truth, ours = truth_and_ours(make)
    assert abs(ours - truth) <= 16


def test_sparse_gradient_is_added_to_a_dense_one_out_of_place() -> None:
    def make() -> tuple[None, list[torch.Tensor], Callable[[], Any]]:
        weight = torch.randn(ROWS, COLUMNS, requires_grad=True)
        rows = torch.arange(ROWS // 2)

        def run() -> None:
            (embedding(rows, weight, sparse=True).mean() + weight.mean()).backward()

        return None, [weight, rows], run

    truth, ours = truth_and_ours(make)
    assert abs(ours - truth) <= 16


def test_gradients_with_a_graph_are_added_out_of_place() -> None:
    def make() -> tuple[None, list[torch.Tensor], Callable[[], Any]]:
        x = torch.randn(ROWS, COLUMNS, requires_grad=True)

        def run() -> None:
            torch.autograd.grad(slices(x * 2).sum(), x, create_graph=True)

        return None, [x], run

    truth, ours = truth_and_ours(make)
    assert abs(ours - truth) <= 16


def test_sum_in_a_scripts_backward_is_computed_out_of_place() -> None:
    """A script's functions run in a module whose package is None."""
    script: dict[str, Any] = {"__name__": "__main__", "__package__": None}
    exec("def add(first, second):\n    return first + second", script)

    def make() -> tuple[None, list[torch.Tensor], Callable[[], Any]]:
        x = torch.randn(ROWS, COLUMNS, requires_grad=True)

        def run() -> None:
            y = x.exp()
            y.register_hook(lambda gradient: script["add"](gradient * 2, gradient * 3))
            y.sum().backward()

        return None, [x], run

    truth, ours = truth_and_ours(make)
    assert abs(ours - truth) <= 16
