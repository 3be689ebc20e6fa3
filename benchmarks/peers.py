"""Whole programs under every counter, forward and backward, beside the truth.

    DS_BUILD_OPS=0 pip install -c tests/constraints.txt '.[test,peers]'
    python benchmarks/peers.py [--markdown] [--only TEXT]

Truths are the closed forms of tests/zoo, from_transformers.py and in_particular.py. Counters and
libraries that are not installed are left out. Exits with 1 if ours differs from a truth anywhere.
"""

from __future__ import annotations

import side_by_side
from from_transformers import preload
from workloads import GROUPS

LEGEND = """\
Reading / truth, in MACs; **1** is exact to the integer. torch's FLOPs are halved. The truth is
of contractions alone: no bias, normalisation, softmax; attention is the full rectangle of
scores; recomputation is no part of it. `sdpa` is `scaled_dot_product_attention`. Random weights,
no downloads; transformers' models run without caches, which tracers cannot return.

- `0`: the peer knows none of the operators or calls, and says nothing of it (fvcore warns).
- `0 (FLOPs/2: r)`: DeepSpeed reports no MACs; half its FLOPs are r times the truth.
- `crash: E`: a valid program raises E when profiled, and runs without.
- `n/a`: the counter does not measure a backward pass. calflops does not either: it takes three
  times the forward, which is right only where every operand needs a gradient."""


def main() -> int:
    preload()
    return side_by_side.main("Whole programs", "python benchmarks/peers.py", LEGEND, GROUPS)


if __name__ == "__main__":
    raise SystemExit(main())
