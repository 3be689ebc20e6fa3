"""One operator at a time: what each counter reads, beside the truth.

    DS_BUILD_OPS=0 pip install -c tests/constraints.txt '.[test,peers]'
    python benchmarks/probes.py [--markdown] [--only TEXT]

Truths are products, written in tests/one_op. Counters that are not installed are left out.
Exits with 1 if ours differs from a truth anywhere.
"""

from __future__ import annotations

import counters  # noqa: F401  # puts tests/ on the path
import side_by_side

from tests.probes import GROUPS

LEGEND = """\
Reading / truth, in MACs; **1** is exact to the integer. Where the truth is 0 the reading itself
stands. torch's FLOPs are halved; a backward row is forward and backward together. `sdpa` is
`scaled_dot_product_attention`.

- `0`: the peer knows no such operator or call, and says nothing of it (fvcore warns). The
  products run all the same: whoever counts them is right.
- `0 (FLOPs/2: r)`: DeepSpeed reports no MACs; half its FLOPs are r times the truth.
- `crash: E`: a valid program raises E when profiled, and runs without.
- `n/a`: the counter does not measure a backward pass. calflops does not either: it takes three
  times the forward.
- The custom operator's formula is given to those who take one, torch and us. DeepSpeed sees the
  `torch.mm` inside. Without a formula we count nothing either, but list the operator and mark
  every total above it as a lower bound.
- Anything else is explained in its row."""


def main() -> int:
    groups = {g: [p for p in probes if p.needs()] for g, probes in GROUPS.items()}
    return side_by_side.main("One-operator probes", "python benchmarks/probes.py", LEGEND, groups)


if __name__ == "__main__":
    raise SystemExit(main())
