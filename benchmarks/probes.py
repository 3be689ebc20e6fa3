"""One operator at a time: what each counter reads, against the truth.

    DS_BUILD_OPS=0 pip install -c tests/constraints.txt '.[test,peers]'
    python benchmarks/probes.py [--markdown] [--only TEXT]

Truths are products, written in tests/probes. Counters that are not installed are skipped.
Exits with 1 if dispatch_flops differs from a truth.
"""

from __future__ import annotations

import counters  # noqa: F401  # makes tests importable
import side_by_side

from tests.probes import GROUPS

LEGEND = """\
Each cell is reading / truth in MACs; **1** is exact to the integer. If the truth is 0, the cell is
the reading. torch's FLOPs are halved; a backward row is forward and backward together. `sdpa` is
`scaled_dot_product_attention`.

- `0`: the peer does not know the operator or call, and does not say so (fvcore warns). The products
  run nevertheless, so a counter that counts them is right.
- `0 (FLOPs/2: r)`: DeepSpeed reports no MACs; half its FLOPs are r times the truth.
- `crash: E`: a valid program raises E when profiled, and runs otherwise.
- `n/a`: the counter does not measure a backward pass. calflops does not either: it assumes three
  times the forward.
- torch and dispatch_flops accept a formula for the custom operator and get one. DeepSpeed sees the
  `torch.mm` inside. Without a formula, dispatch_flops lists the operator and marks every total
  above it as a lower bound.
- Anything else is explained in its row."""


def main() -> int:
    groups = {g: [p for p in probes if p.needs()] for g, probes in GROUPS.items()}
    return side_by_side.main("One-operator probes", "python benchmarks/probes.py", LEGEND, groups)


if __name__ == "__main__":
    raise SystemExit(main())
