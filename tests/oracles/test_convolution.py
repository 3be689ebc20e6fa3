"""Convolutions under the counter cost what their definitions cost, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.comparing import check, examples, flag, tensor
from tests.oracles.convolutions import convolution, transposed_convolution
from tests.oracles.counting import count

CALLS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Setting:
    """One convolution: everything but the data."""

    dims: int
    batch: int | None
    groups: int
    ins: int
    outs: int
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    biased: bool
    need: tuple[bool, bool, bool]

    def tensors(self, *, transposed: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
        batch = () if self.batch is None else (self.batch,)
        x = tensor(*batch, self.ins * self.groups, *self.spatial, grad=self.need[0])
        first, second = self.outs * self.groups, self.ins
        if transposed:
            first, second = self.ins * self.groups, self.outs
        w = tensor(first, second, *self.kernel, grad=self.need[1], seed=1)
        bias = tensor(self.outs * self.groups, grad=self.need[2], seed=2) if self.biased else None
        return x, w, bias


@st.composite
def settings_of(draw: Any, *, dims: int, named_padding: bool) -> Setting:
    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel, dilation = each(1, 3 if dims < 3 else 2), each(1, 2)
    spatial = tuple(
        d * (k - 1) + 1 + draw(st.integers(0, 3)) for k, d in zip(kernel, dilation, strict=True)
    )
    stride, padding = each(1, 3), each(0, 2)
    named = draw(st.sampled_from(["same", "valid"])) if named_padding and draw(flag) else None
    return Setting(
        dims=dims,
        batch=draw(st.sampled_from([None, 1, 2])),
        groups=draw(st.integers(1, 3)),
        ins=draw(st.integers(1, 2)),
        outs=draw(st.integers(1, 3 if dims < 3 else 2)),
        spatial=spatial,
        kernel=kernel,
        stride=(1,) * dims if named else stride,
        padding=named or padding,
        dilation=dilation,
        biased=draw(flag),
        need=(draw(flag), draw(flag), draw(flag)),
    )


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("dims,runs", [(1, 40), (2, 25), (3, 10)])
def test_convolution_costs_its_definition(dims: int, runs: int) -> None:
    @examples(runs)
    @given(settings_of(dims=dims, named_padding=True))
    def run(s: Setting) -> None:
        x, w, bias = s.tensors(transposed=False)
        options: dict[str, Any] = {
            "stride": s.stride,
            "padding": s.padding,
            "dilation": s.dilation,
            "groups": s.groups,
        }
        expected = count(convolution, x, w, bias, **options)
        check(lambda: CALLS[dims](x, w, bias, **options), expected)

    run()


@pytest.mark.parametrize("dims,runs", [(1, 40), (2, 25), (3, 8)])
def test_transposed_convolution_costs_its_definition(dims: int, runs: int) -> None:
    @examples(runs)
    @given(settings_of(dims=dims, named_padding=False), st.integers(0, 2))
    def run(s: Setting, extra: int) -> None:
        x, w, bias = s.tensors(transposed=True)
        padding = [p for p in s.padding if isinstance(p, int)]
        full = [
            (n - 1) * step + d * (k - 1) + 1
            for n, step, k, d in zip(s.spatial, s.stride, s.kernel, s.dilation, strict=True)
        ]
        options: dict[str, Any] = {
            "stride": s.stride,
            "padding": tuple(min(p, (f - 1) // 2) for p, f in zip(padding, full, strict=True)),
            "dilation": s.dilation,
            "groups": s.groups,
            "output_padding": tuple(
                min(extra, max(step, d) - 1) for step, d in zip(s.stride, s.dilation, strict=True)
            ),
        }
        expected = count(transposed_convolution, x, w, bias, **options)
        check(lambda: TRANSPOSED[dims](x, w, bias, **options), expected)

    run()


def test_depthwise_convolution_costs_its_definition() -> None:
    x, w = tensor(1, 4, 8, 8, grad=True), tensor(4, 1, 3, 3, grad=True, seed=1)
    options: dict[str, Any] = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    expected = count(convolution, x, w, **options, groups=4)
    assert (expected.macs, expected.backward_macs) == (4 * 9 * 6 * 6, 2 * 4 * 9 * 6 * 6)
    check(lambda: F.conv2d(x, w, groups=4), expected)
