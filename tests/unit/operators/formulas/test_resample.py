"""Interpolation: against torch's own decompositions, and against counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._decomp import decomposition_table

from dispatch_flops.operators.formulas.resample import taps
from tests.helpers.profiling import profile_of

aten = torch.ops.aten
N, C = 2, 3
LINE, PLANE, SPACE = (torch.rand(N, C, *size) for size in ((7,), (5, 7), (4, 5, 7)))
ONE_CHANNEL, GRID = torch.rand(N, 1, 5, 7), torch.rand(N, 3, 4, 2)


def flops_of(fn: Any, *args: Any) -> int:
    return profile_of(fn, *args).total().flops


DECOMPOSED = [
    (aten.upsample_nearest1d.default, (LINE, [11])),
    (aten.upsample_nearest2d.default, (PLANE, [11, 13])),
    (aten._upsample_nearest_exact2d.default, (PLANE, [11, 13])),
    (aten.upsample_nearest3d.default, (SPACE, [3, 11, 13])),
    *(
        (op, (x, size, corners))
        for op, x, size in (
            (aten.upsample_linear1d.default, LINE, [11]),
            (aten.upsample_bilinear2d.default, PLANE, [11, 3]),
            (aten.upsample_trilinear3d.default, SPACE, [3, 11, 13]),
            (aten.upsample_bicubic2d.default, PLANE, [11, 13]),
        )
        for corners in (True, False)
    ),
    # The decomposition computes the positions per channel; with one channel it agrees.
    *(
        (aten.grid_sampler_2d.default, (ONE_CHANNEL, GRID, mode, padding, False))
        for mode in (0, 1, 2)
        for padding in (0, 1, 2)
        if (mode, padding) != (2, 1)
    ),
]


@pytest.mark.parametrize(
    ("op", "args"), DECOMPOSED, ids=[f"{op}-{n}" for n, (op, _) in enumerate(DECOMPOSED)]
)
def test_resampling_costs_its_decomposition(op: Any, args: Any) -> None:
    assert flops_of(op, *args) == flops_of(decomposition_table[op], *args)


def test_upsampling_blends_per_output_element() -> None:
    """3 (2^d - 1) per element, and 7 for each coordinate."""
    out = N * C * 11 * 13
    counted = flops_of(
        lambda: torch.nn.functional.interpolate(PLANE, size=(11, 13), mode="bilinear")
    )
    assert counted == out * 3 * 3 + (11 + 13) * 7
    total = profile_of(
        lambda: torch.nn.functional.interpolate(PLANE, size=(11, 13), mode="bicubic")
    ).total()
    assert (total.macs, total.flops) == (0, out * 5 * 7 + (11 + 13) * (3 + 4 + 25))


def backward_flops(x: torch.Tensor, **options: Any) -> int:
    x = x.detach().requires_grad_()
    out = torch.nn.functional.interpolate(x, **options)
    return flops_of(out.backward, torch.ones_like(out))


def test_upsampling_backward_spreads_each_gradient() -> None:
    out = N * C * 11 * 13
    assert backward_flops(PLANE, size=(11, 13), mode="nearest") == out - N * C * 5 * 7
    assert backward_flops(PLANE, size=(11, 13), mode="bilinear") == out * 4 * 3 + (11 + 13) * 8
    assert backward_flops(PLANE, size=(11, 13), mode="bicubic") == (
        out * 16 * 3 + (11 + 13) * (3 + 4 + 25)
    )
    assert backward_flops(PLANE, size=(3, 2), mode="nearest") == 0
    assert backward_flops(PLANE, size=(3, 13), mode="nearest") == N * C * 3 * (13 - 7)


@pytest.mark.parametrize(("mode", "interior", "half"), [("bilinear", 4, 1.0), ("bicubic", 8, 2.0)])
def test_antialiased_halving_counts_taps_inside_the_line(
    mode: str, interior: int, half: float
) -> None:
    """16 elements to 8: filters of 4 (8) elements, cut off where they leave the line."""
    reach = interior // 2
    spans = [range(max(2 * i + 1 - reach, 0), min(2 * i + 1 + reach, 16)) for i in range(8)]
    total = sum(map(len, spans))
    assert taps(16, 8, False, None, half) == total
    x = torch.rand(N, C, 5, 16)
    counted = flops_of(
        lambda: torch.nn.functional.interpolate(x, size=(5, 8), mode=mode, antialias=True)
    )
    same = taps(5, 5, False, None, half)
    assert counted == N * C * (5 * (2 * total - 8) + 8 * (2 * same - 5))
    assert backward_flops(x, size=(5, 8), mode=mode, antialias=True) == 3 * N * C * same * total


@pytest.mark.parametrize(("size_in", "size_out"), [(16, 8), (7, 3), (5, 5), (5, 11)])
def test_antialiased_taps_match_the_kernel(size_in: int, size_out: int) -> None:
    """Elements outside a filter have no influence, and filters are not wider than needed: only an
    element on each edge of a filter may have weight 0."""
    x = torch.rand(1, 1, 1, size_in, dtype=torch.float64)

    def line(x: torch.Tensor) -> torch.Tensor:
        return aten._upsample_bilinear2d_aa(x, [1, size_out], False).flatten()

    influences = torch.autograd.functional.jacobian(line, x).flatten(1) != 0
    counted = taps(size_in, size_out, False, None, 1.0)
    assert influences.sum() <= counted <= influences.sum() + 2 * size_out


def test_grid_sample_channels_share_the_points() -> None:
    one = flops_of(aten.grid_sampler_2d, ONE_CHANNEL, GRID, 0, 0, False)
    many = flops_of(aten.grid_sampler_2d, ONE_CHANNEL.expand(N, C, 5, 7), GRID, 0, 0, False)
    assert many - one == N * 3 * 4 * (C - 1) * (4 + 3)


def test_grid_sample_backward_counts_input_and_points() -> None:
    """Per point and channel: input 4·2, points 4·2·3; per point: weights, and 2 at the end."""
    grad = torch.ones(N, C, 3, 4)
    args = (grad, PLANE, GRID, 0, 0, False)
    points = N * 3 * 4
    both = flops_of(aten.grid_sampler_2d_backward, *args, [True, True])
    input_alone = flops_of(aten.grid_sampler_2d_backward, *args, [True, False])
    assert both - input_alone == points * (C * 4 * 2 * 3 + 2)
    weights = 2 * (2 + 2) + 4 * (3 + 4)
    assert input_alone == points * (weights + C * 4 * 2)


def test_affine_grid_is_a_matrix_product() -> None:
    theta = torch.rand(N, 2, 3)
    grid = torch.nn.functional.affine_grid
    assert (
        profile_of(lambda: grid(theta, [N, C, 5, 7], align_corners=False)).total().macs
        == N * 5 * 7 * 2 * 3
    )


def test_padding_backward_sums_the_copies() -> None:
    x = LINE.detach().requires_grad_()
    for mode in ("reflect", "replicate"):
        out = torch.nn.functional.pad(x, (2, 3), mode=mode)
        assert flops_of(out.backward, torch.ones_like(out)) == N * C * (2 + 3)
        x.grad = None


def test_fold_adds_every_window() -> None:
    windows = torch.rand(N, C * 2 * 2, 4 * 5)
    assert flops_of(lambda: torch.nn.functional.fold(windows, (5, 6), 2)) == windows.numel()


def test_resampling_on_meta_counts_as_on_cpu() -> None:
    x = PLANE.to("meta")
    assert flops_of(aten.upsample_bilinear2d, x, [11, 13], False) == flops_of(
        aten.upsample_bilinear2d, PLANE, [11, 13], False
    )
