"""Other products: complex, integer, quantised, sparse, grouped, bilinear, custom operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.probes.probe import Inputs, Probe, layer, of, op, without_gradients

ONE_EACH = "a complex MAC is 4 real ones, (a+bi)(c+di): the peer counts it as 1"


def _sparse(layout: torch.layout) -> Inputs:
    """[11,5] with 7 elements stored, and [5,3]."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        dense = torch.zeros(55)
        dense[:7] = 1
        return dense.view(11, 5).to_sparse(layout=layout), torch.ones(5, 3)

    return make


def _grouped() -> tuple[torch.Tensor, ...]:
    ends = torch.tensor([8, 24], dtype=torch.int32)
    weights = torch.ones(2, 48, 16, dtype=torch.bfloat16).transpose(1, 2)
    return torch.ones(24, 16, dtype=torch.bfloat16), weights, ends


def _eight_bits() -> tuple[torch.Tensor, ...]:
    a, b = torch.ones(16, 32), torch.ones(48, 32)
    return a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones(())


def _dynamically_quantised(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def quantised() -> nn.Module:
        model = nn.Sequential(make()).eval()
        kinds = {type(model[0])}
        return torch.ao.quantization.quantize_dynamic(model, kinds, dtype=torch.qint8)

    return quantised


def _static(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    weight = torch.quantize_per_tensor(w, 0.1, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    small = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    return torch.ops.quantized.linear(small, packed, 0.1, 0).dequantize()


def _int8_weights() -> tuple[torch.Tensor, ...]:
    return (
        torch.ones(3, 32, dtype=torch.bfloat16),
        torch.ones(48, 32, dtype=torch.int8),
        torch.ones(48, dtype=torch.bfloat16),
    )


def _own_operator() -> Any:
    """``one_op::matched(a[3,5], b[5,7])``, opaque to a counter without a formula for it."""
    if not hasattr(torch.ops.one_op, "matched"):

        @torch.library.custom_op("one_op::matched", mutates_args=())
        def matched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.mm(a, b)

    return torch.ops.one_op.matched


def _own_macs() -> dict[Any, Callable[..., int]]:
    return {_own_operator(): lambda a, b: a.numel() * b.shape[1]}


def _traced() -> nn.Module:
    return nn.Sequential(torch.jit.trace(nn.Linear(5, 7, bias=False), torch.ones(3, 5)))


def _scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(5, 7, bias=False)))


PROBES: tuple[Probe, ...] = (
    op(
        "complex a @ b",
        lambda a, b: a @ b,
        of((3, 5), (5, 7), dtype=torch.complex64),
        (4, 3, 5, 7),
        note=ONE_EACH,
    ),
    op("int64 a @ b", lambda a, b: a @ b, of((3, 5), (5, 7), dtype=torch.int64), (3, 5, 7)),
    op(
        "torch._int_mm",
        lambda a, b: torch._int_mm(a, b),
        of((17, 8), (8, 24), dtype=torch.int8),
        (17, 8, 24),
    ),
    op(
        "torch._scaled_mm (float8)",
        lambda a, b, s: torch._scaled_mm(a, b.t(), s, s),
        _eight_bits,
        (16, 32, 48),
    ),
    op(
        "F.grouped_mm",
        lambda x, w, ends: F.grouped_mm(x, w, offs=ends),
        _grouped,
        (24, 16, 48),
        needs=lambda: hasattr(F, "grouped_mm"),
    ),
    op(
        "aten._weight_int8pack_mm",
        lambda x, w, s: torch.ops.aten._weight_int8pack_mm(x, w, s),
        _int8_weights,
        (3, 32, 48),
    ),
    layer(
        "nn.Linear, dynamically quantised",
        _dynamically_quantised(lambda: nn.Linear(5, 7)),
        of((3, 5)),
        (3, 5, 7),
    ),
    op("quantized.linear", _static, of((3, 5), (7, 5)), (3, 5, 7)),
    op(
        "torch.sparse.mm, COO",
        lambda a, b: torch.sparse.mm(a, b),
        _sparse(torch.sparse_coo),
        (7, 3),
    ),
    op(
        "sparse a @ b, CSR",
        lambda a, b: a @ b,
        _sparse(torch.sparse_csr),
        (7, 3),
        note="7 elements are stored: 7·3; the peer takes all of [11,5] for stored",
    ),
    op(
        "torch.sparse.sampled_addmm",
        lambda s, a, b: torch.sparse.sampled_addmm(s, a, b),
        lambda: (_sparse(torch.sparse_csr)()[0], torch.ones(11, 3), torch.ones(3, 5)),
        (7, 3),
    ),
    op(
        "F.bilinear",
        lambda x, y, w: F.bilinear(x, y, w),
        of((2, 3), (2, 5), (7, 3, 5)),
        (2, 7, 3, 5),
        (2, 7, 5),
    ),
    op(
        "torch.cdist by matrix product",
        lambda a, b: torch.cdist(a, b),
        of((29, 5), (31, 5)),
        (29, 31, 5 + 2),
    ),
    op("torch.cdist, p=1", lambda a, b: torch.cdist(a, b, p=1.0), of((3, 5), (7, 5))),
    op("torch.cov", lambda a: torch.cov(a), of((3, 5)), (3, 3, 5)),
    op(
        "custom operator, formula given to those who take one",
        lambda a, b: _own_operator()(a, b),
        of((3, 5), (5, 7)),
        (3, 5, 7),
        own_macs=_own_macs,
    ),
    layer("torch.jit.trace", _traced, of((3, 5)), (3, 5, 7)),
    layer("torch.jit.script", _scripted, of((3, 5)), (3, 5, 7)),
    op(
        "F.linear on meta",
        lambda x, w, b: F.linear(x, w, b),
        lambda: tuple(torch.ones(s, device="meta") for s in ((3, 5), (7, 5), (7,))),
        (3, 5, 7),
        device="meta",
        note="the bias is not a MAC; DeepSpeed counts F.linear, and torch.mm in what meta "
        "decomposes it to",
    ),
    op(
        "adaptive_avg_pool2d(output_size=), F.linear",
        lambda x, w: F.linear(F.adaptive_avg_pool2d(x, output_size=1).flatten(1), w),
        of((3, 5, 8, 9), (7, 5)),
        (3, 5, 7),
        note="pooling contracts nothing: its sums are FLOPs, no MACs",
    ),
    layer(
        "nn.LayerNorm after nn.Linear",
        lambda: without_gradients(nn.Sequential(nn.Linear(5, 7, bias=False), nn.LayerNorm(7))),
        of((3, 5)),
        (3, 5, 7),
        note="normalisation is not a MAC: it has FLOPs of its own",
    ),
)
