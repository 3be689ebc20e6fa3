"""A transformer with LoRA and checkpointed blocks: MACs per module and phase, against hand counts.

    python benchmarks/attribution_table.py

The hand counts below follow from which tensors need a gradient; no number comes from the profiler.
Exits with 1 if a count differs.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode, Profile
from dispatch_flops.profile.cost import STEP_PHASES

BLOCKS = 3
BATCH, SEQUENCE, WIDTH, HEADS, HIDDEN, RANK, VOCABULARY = 2, 11, 40, 5, 96, 3, 101
Work = dict[str, dict[str, int]]


class LoRA(nn.Module):
    """A frozen projection plus a trained product of low rank."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.base = frozen(n_in, n_out)
        self.down = nn.Linear(n_in, RANK, bias=False)
        self.up = nn.Linear(RANK, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Attention(nn.Module):
    """Query and value with LoRA, key and output frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.q = LoRA(WIDTH, WIDTH)
        self.k = frozen(WIDTH, WIDTH)
        self.v = LoRA(WIDTH, WIDTH)
        self.o = frozen(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.up = frozen(WIDTH, HIDDEN)
        self.down = frozen(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = frozen(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def frozen(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False).requires_grad_(False)


def by_hand() -> Work:
    """Return the MACs of each module's own operators.

    A frozen layer's backward computes only its input's gradient, and nothing if the input needs
    none: in the first block, the projections' inputs need none. Recomputation runs a block up to
    the last tensor that its backward needs, the weight of ``down``: everything except ``down``.
    The backward of the fused attention takes four products and recomputes the scores.
    """
    rows = BATCH * SEQUENCE
    square, low = rows * WIDTH * WIDTH, rows * WIDTH * RANK
    mlp = rows * WIDTH * HIDDEN
    scores = BATCH * SEQUENCE * SEQUENCE * WIDTH  # all heads together
    head = rows * WIDTH * VOCABULARY
    work: Work = {}
    for i in range(BLOCKS):
        at = f"blocks.{i}"
        wanted = int(i > 0)  # the block's input needs a gradient
        for lora in ("q", "v"):
            name = f"{at}.attention.{lora}"
            work[f"{name}.base"] = phases(square, wanted * square, square)
            work[f"{name}.down"] = phases(low, (1 + wanted) * low, low)
            work[f"{name}.up"] = phases(low, 2 * low, low)
        work[f"{at}.attention.k"] = phases(square, wanted * square, square)
        work[f"{at}.attention"] = phases(2 * scores, 4 * scores, 2 * scores + scores)
        work[f"{at}.attention.o"] = phases(square, square, square)
        work[f"{at}.up"] = phases(mlp, mlp, mlp)
        work[f"{at}.down"] = phases(mlp, mlp, 0)
    work["head"] = phases(head, head, 0)
    return work


def phases(forward: int, backward: int, recompute: int) -> dict[str, int]:
    return {"forward": forward, "backward": backward, "recompute": recompute, "optimizer": 0}


def profiled() -> Profile:
    """Profile one training step: forward, loss, backward, optimizer."""
    model = Transformer()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    with FlopCounterMode(model, display=False) as counter:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    return counter.profile


def measured(profile: Profile) -> Work:
    work = {n.fqn: {p: n.own(p).macs for p in STEP_PHASES} for n in profile.nodes()}
    return {fqn: macs for fqn, macs in work.items() if any(macs.values())}


def main() -> int:
    hand, found = by_hand(), measured(profiled())
    rows = []
    for fqn in sorted({*hand, *found}):
        expected, seen = hand.get(fqn, phases(0, 0, 0)), found.get(fqn, phases(0, 0, 0))
        cells = [f"{seen[p]:,} / {expected[p]:,}" for p in STEP_PHASES[:3]]
        rows.append([fqn, *cells, "same" if seen == expected else "DIFFERENT"])
    sums = [
        " / ".join(f"{sum(work[p] for work in table.values()):,}" for table in (found, hand))
        for p in STEP_PHASES[:3]
    ]
    rows.append(["all", *sums, "same" if found == hand else "DIFFERENT"])
    print(f"torch {torch.__version__}; MACs: profiled / by hand")
    print(tabulate(rows, ["module", *STEP_PHASES[:3], ""], stralign="right", colalign=("left",)))
    return int(found != hand)


if __name__ == "__main__":
    sys.exit(main())
