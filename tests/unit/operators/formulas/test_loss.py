"""Losses: closed forms, forward and backward, through real torch calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.profiling import forward_and_backward_flops, profile_of

N = 3 * 5 * 7


def costs(loss: Any, *shape: int) -> tuple[int, int]:
    """FLOPs of the forward and of the backward pass of ``loss(x)``, x in (0, 1)."""
    return forward_and_backward_flops(loss, torch.rand(shape or (3, 5, 7)) * 0.8 + 0.1)


Y = torch.rand(3, 5, 7)


@pytest.mark.parametrize(
    ("loss", "forward", "backward"),
    [
        (F.mse_loss, 2, 3),
        (F.smooth_l1_loss, 7, 7),
        (F.huber_loss, 7, 5),
        (F.soft_margin_loss, 4, 6),
        (F.binary_cross_entropy, 9, 7),
    ],
)
def test_loss_with_mean_matches_closed_form(loss: Any, forward: int, backward: int) -> None:
    """``backward`` per element; the gradient itself, one number, is scaled by the Huber pair."""
    own = {F.smooth_l1_loss: 1, F.huber_loss: 4}.get(loss, 0)
    assert costs(lambda x: loss(x, Y)) == (forward * N + N, backward * N + own)


@pytest.mark.parametrize(
    ("loss", "forward"), [(F.mse_loss, 2), (F.smooth_l1_loss, 7), (F.binary_cross_entropy, 9)]
)
def test_loss_with_sum_or_without_reduction_matches_closed_form(loss: Any, forward: int) -> None:
    assert costs(lambda x: loss(x, Y, reduction="sum"))[0] == forward * N + N - 1
    assert costs(lambda x: loss(x, Y, reduction="none"))[0] == forward * N


def test_l1_loss_is_decomposed() -> None:
    """|x - y|, mean: 2n + n. Backward: gradient / n, times the sign of the difference."""
    forward, _ = costs(lambda x: F.l1_loss(x, Y))
    assert forward == 2 * N + N


def test_cross_entropy_matches_closed_form() -> None:
    """x[11,7]: log-softmax 5n - m; 11 negations, 10 sums, 1 division.

    Backward: the gradient / weight 1, -1 at the targets times it n; log-softmax 4n - m.
    """
    target = torch.arange(11) % 7
    n, m = 11 * 7, 11
    assert costs(lambda x: F.cross_entropy(x, target), 11, 7) == (
        5 * n - m + 11 + 10 + 1,
        1 + n + 4 * n - m,
    )


def test_nll_with_weights_matches_closed_form() -> None:
    """x[11,7]: weighting n, 11 negations, loss and weights summed 2·10, division 1."""
    target, weight = torch.arange(11) % 7, torch.rand(7)
    forward, backward = costs(lambda x: F.nll_loss(x, target, weight), 11, 7)
    assert forward == 11 * 7 + 11 + 2 * 10 + 1
    assert backward == 1 + 7 + 11 * 7


def test_nll_of_images_matches_closed_form() -> None:
    """x[2,5,3,7]: 2·3·7 targets."""
    target = torch.zeros(2, 3, 7, dtype=torch.long)
    t, n = 2 * 3 * 7, 2 * 5 * 3 * 7
    assert costs(lambda x: F.nll_loss(x, target), 2, 5, 3, 7) == (t + t - 1 + 1, 1 + n)


def test_multi_margin_matches_closed_form() -> None:
    """x[11,7]: 11 differences, add, maximum, mean 3n. Backward: 11, 4n."""
    target = torch.arange(11) % 7
    assert costs(lambda x: F.multi_margin_loss(x, target), 11, 7) == (11 + 3 * 77, 11 + 4 * 77)


def test_multilabel_margin_counts_all_labels() -> None:
    """x[3,5], all 5 labels taken: n + 3·n·5 and the sums; backward 2n + 4·n·5."""
    target = torch.tensor([[0, 2, -1, 1, 3]] * 3)
    n = 15
    assert costs(lambda x: F.multilabel_margin_loss(x, target, reduction="sum"), 3, 5) == (
        n + 3 * n * 5 + n * 5 - 1,
        2 * n + 4 * n * 5,
    )


def test_ctc_counts_the_trellis() -> None:
    """T, L = (7, 2), (5, 3): cells 7·5 + 5·7; 13 each forward; 22 each and 6 per class back."""
    target = torch.ones(2, 3, dtype=torch.long)
    log_probs = torch.rand(7, 2, 5).log_softmax(2).requires_grad_()

    def run(lengths: Any) -> Any:
        loss = F.ctc_loss(log_probs, target, *lengths, reduction="none")
        loss.backward(torch.ones_like(loss))

    cells = 7 * (2 * 2 + 1) + 5 * (2 * 3 + 1)
    profile = profile_of(run, ((7, 5), (2, 3)), strict=True)
    assert profile.by_operator("forward")["aten._ctc_loss.default"].cost.flops == 13 * cells
    grads = profile.by_operator("backward")["aten._ctc_loss_backward.default"].cost
    assert grads.flops == 22 * cells + 6 * (7 + 5) * 5
