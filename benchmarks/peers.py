"""Whole programs under every counter, forward and backward, against the truth.

    DS_BUILD_OPS=0 pip install -c tests/constraints.txt '.[test,peers]'
    python benchmarks/peers.py [--markdown] [--only TEXT]

Truths are the closed forms of tests/models, from_transformers.py and special_cases.py. Counters and
libraries that are not installed are skipped. Exits with 1 if dispatch_flops differs from a truth.
"""

from __future__ import annotations

import side_by_side
from from_transformers import preload
from workloads import GROUPS

LEGEND = """\
Each cell is reading / truth in MACs; **1** is exact to the integer. torch's FLOPs are halved. The
truth counts only contractions: no bias, normalisation or softmax; attention is the full rectangle
of scores; recomputation is excluded. `sdpa` is `scaled_dot_product_attention`. Weights are random;
transformers' models run without caches, which tracers cannot return.

- `0`: the peer knows none of the operators or calls, and does not say so (fvcore warns).
- `0 (FLOPs/2: r)`: DeepSpeed reports no MACs; half its FLOPs are r times the truth.
- `crash: E`: a valid program raises E when profiled, and runs otherwise.
- `n/a`: the counter does not measure a backward pass. calflops does not either: it assumes three
  times the forward, which is right only if every operand needs a gradient."""


def main() -> int:
    preload()
    return side_by_side.main("Whole programs", "python benchmarks/peers.py", LEGEND, GROUPS)


if __name__ == "__main__":
    raise SystemExit(main())
