"""Llama 3.1 405B, counted on the meta device: forward, and forward with backward.

    python benchmarks/llama.py [8B|70B|405B] [--sequence 8192]

Prints seconds next to those of torch's counter in the same process, the process's peak memory, and
the counts next to their closed form. Torch's counter counts only the FLOPs of products;
dispatch_flops counts MACs, FLOPs and bytes of all operators, by module and phase.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode as TorchCounter

from dispatch_flops import FlopCounterMode, Profile


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int = 128256

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices: q and o, k and v, gate, up and down."""
        return 2 * self.hidden**2 + 2 * self.hidden * self.kv_size + 3 * self.hidden * self.ffn

    @property
    def params(self) -> int:
        """All parameters; the head does not share the embedding's matrix."""
        layer = self.layer_weights + 2 * self.hidden
        return self.layers * layer + self.hidden + 2 * self.vocab * self.hidden

    def forward_macs(self, batch: int, sequence: int) -> int:
        """Return one MAC per weight and token, plus attention's scores and values in full."""
        weights = self.layers * self.layer_weights + self.vocab * self.hidden
        attention = 2 * self.layers * sequence * sequence * self.hidden
        return batch * (sequence * weights + attention)

    def backward_macs(self, batch: int, sequence: int) -> int:
        """Return two MACs per forward MAC: each product has two gradients, the embedding none."""
        return 2 * self.forward_macs(batch, sequence)


CONFIGS = {
    "8B": LlamaConfig(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8),
    "70B": LlamaConfig(layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8),
    "405B": LlamaConfig(layers=126, hidden=16384, ffn=53248, heads=128, kv_heads=8),
}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to x[batch, heads, sequence, head_size]."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.q_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.ffn = FeedForward(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin)
        out: torch.Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """Llama 3, from token ids to logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        cos, sin = self.positions(tokens.shape[1], tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: torch.Tensor = self.head(self.norm(x))
        return out

    def positions(self, sequence: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.config.head_size
        rates = 500000.0 ** -(torch.arange(0, size, 2, device=device) / size)
        angles = torch.outer(torch.arange(sequence, device=device).float(), rates).repeat(1, 2)
        dtype = self.embed.weight.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)


def on_meta(config: LlamaConfig) -> Llama:
    """Return the model in bfloat16 on the meta device, without memory."""
    with torch.device("meta"):
        return Llama(config).to(torch.bfloat16)


def count(model: Llama, sequence: int, *, backward: bool) -> Profile:
    """Return the profile of one sequence on the meta device."""
    tokens = torch.ones(1, sequence, dtype=torch.long, device="meta")
    with FlopCounterMode(model, display=False) as counter, torch.set_grad_enabled(backward):
        out = model(tokens)
        if backward:
            out.sum().backward()
    return counter.profile


def torch_counter_s(model: Llama, sequence: int, *, backward: bool) -> float:
    """Return the seconds that torch's counter takes for the same run."""
    tokens = torch.ones(1, sequence, dtype=torch.long, device="meta")
    start = time.perf_counter()
    with TorchCounter(display=False), torch.set_grad_enabled(backward):
        out = model(tokens)
        if backward:
            out.sum().backward()
    return time.perf_counter() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("size", nargs="?", default="405B", choices=CONFIGS)
    arguments.add_argument("--sequence", type=int, default=8192)
    chosen = arguments.parse_args()
    config = CONFIGS[chosen.size]
    before = _peak_mib()
    model = on_meta(config)
    print(f"Llama {chosen.size}, {config.params / 1e9:.2f} B parameters, 1 x {chosen.sequence}")
    for backward in (False, True):
        start = time.perf_counter()
        profile = count(model, chosen.sequence, backward=backward)
        seconds = time.perf_counter() - start
        for phase in ("forward", "backward") if backward else ("forward",):
            macs = profile.total(phase).macs
            expected = getattr(config, f"{phase}_macs")(1, chosen.sequence)
            assert macs == expected, (phase, macs, expected)
        assert profile.total_params == config.params
        total = profile.total()
        print(
            f"{'forward + backward' if backward else 'forward':18} {seconds:.2f} s  "
            f"{total.macs:,} MACs (as the closed form)  {total.flops:.4e} FLOPs  "
            f"peak memory {_peak_mib():.0f} MiB ({_peak_mib() - before:.0f} of it for this); "
            f"torch's counter {torch_counter_s(model, chosen.sequence, backward=backward):.2f} s"
        )


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
