"""Mamba in plain torch, its selective scan in torch operators or as one fused operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dispatch_flops import OpCost


@dataclass(frozen=True, kw_only=True)
class MambaShape:
    """Sizes of the 130M model."""

    layers: int = 24
    hidden: int = 768
    inner: int = 1536
    state: int = 16
    kernel: int = 4
    rank: int = 48
    vocab: int = 50280

    @property
    def layer_weights(self) -> int:
        """Elements of a layer's four projections."""
        into = self.hidden * 2 * self.inner
        selecting = self.inner * (self.rank + 2 * self.state) + self.rank * self.inner
        return into + selecting + self.inner * self.hidden

    @property
    def params(self) -> int:
        """All parameters; the head shares the embedding's matrix."""
        other = self.inner * (self.kernel + 1) + self.inner  # convolution, step's bias
        own = self.inner * self.state + self.inner + self.hidden  # A, D and the norm
        return self.layers * (self.layer_weights + other + own) + (self.vocab + 1) * self.hidden

    def product_macs(self, batch: int, steps: int) -> int:
        """Return the MACs of projections, causal convolution (padded by kernel - 1) and head."""
        convolution = steps * self.inner * self.kernel
        layer = steps * self.layer_weights + convolution
        return batch * (self.layers * layer + steps * self.hidden * self.vocab)

    def scan_macs(self, batch: int, steps: int) -> int:
        """Return the MACs of reading the state at every step: (inner x state) times a vector."""
        return batch * self.layers * steps * self.inner * self.state


@torch.library.custom_op("dispatch_flops_mamba::selective_scan", mutates_args=())
def selective_scan(
    x: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    """Fused kernel: x, step[B,L,inner], a[inner,state], b, c[B,L,state] -> [B,L,inner]."""
    return scan_by_steps(x, step, a, b, c)


@selective_scan.register_fake
def _(
    x: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(x)


def selective_scan_cost(
    x: torch.Tensor, step: torch.Tensor, a: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any
) -> OpCost:
    """MACs: one per step and element of the state. FLOPs: per step and element, exp(step·a), its
    product with the state, the input's product, their sum, and the MAC; per channel step·x."""
    elements = x.numel() * a.shape[1]
    # step*a, exp, *state, b*(step*x), sum: 5; the read-out 2
    return OpCost(macs=elements, flops=7 * elements + x.numel())


def scan_by_steps(
    x: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    """Run the scan in torch operators, one step after the other."""
    state = x.new_zeros(x.shape[0], *a.shape)
    outs = []
    for t in range(x.shape[1]):
        decay = torch.exp(step[:, t, :, None] * a)
        entering = (step[:, t] * x[:, t])[:, :, None] * b[:, t, None, :]
        state = decay * state + entering
        outs.append(torch.matmul(state, c[:, t, :, None]).squeeze(-1))
    return torch.stack(outs, 1)


class MambaLayer(nn.Module):
    def __init__(self, shape: MambaShape, *, fused: bool) -> None:
        super().__init__()
        inner = shape.inner
        self.shape = shape
        self.fused = fused
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.in_proj = nn.Linear(shape.hidden, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, shape.kernel, groups=inner)
        self.x_proj = nn.Linear(inner, shape.rank + 2 * shape.state, bias=False)
        self.dt_proj = nn.Linear(shape.rank, inner)
        self.out_proj = nn.Linear(inner, shape.hidden, bias=False)
        self.a_log = nn.Parameter(torch.zeros(inner, shape.state))
        self.d = nn.Parameter(torch.ones(inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        main, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        main = F.silu(self.conv(F.pad(main.mT, (shape.kernel - 1, 0))).mT)
        rank, b, c = self.x_proj(main).split((shape.rank, shape.state, shape.state), -1)
        step = F.softplus(self.dt_proj(rank))
        scan = selective_scan if self.fused else scan_by_steps
        y = scan(main, step, -torch.exp(self.a_log), b, c) + main * self.d
        out: torch.Tensor = x + self.out_proj(y * F.silu(gate))
        return out


class Mamba(nn.Module):
    """From token ids to logits."""

    def __init__(self, shape: MambaShape, *, fused: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.Sequential(*(MambaLayer(shape, fused=fused) for _ in range(shape.layers)))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.layers(self.embed(input_ids)))
        return F.linear(hidden, self.embed.weight)
