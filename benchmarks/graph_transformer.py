"""The graph transformer at full size: 7,170 nodes, 10 of 11 layers run, 32 heads of 256.

    python benchmarks/graph_transformer.py

Needs torch_geometric and about 4 GB of memory. Most of the time goes into 412 G
multiply-accumulates. Exits with 1 if a count differs from its closed form.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dispatch_flops import FlopCounterMode
from tests.models.graph import FULL_SIZE, GraphTransformer


def main() -> int:
    """Run the model once under the counter and compare the counts with their closed forms."""
    model = GraphTransformer(FULL_SIZE).eval()
    inputs = model.inputs()
    start = time.perf_counter()
    with torch.no_grad(), FlopCounterMode(model, display=False) as counter:
        model(*inputs)
    seconds = time.perf_counter() - start
    profile = counter.profile
    expected = FULL_SIZE.module_macs()
    found = {fqn: cost.macs for fqn, cost in profile.by_module("forward").items()}
    wrong = {fqn: (n, found[fqn]) for fqn, n in expected.items() if found[fqn] != n}
    print(f"parameters  {profile.total_params:>20,}  expected {FULL_SIZE.params():,}")
    print(f"MACs        {found['']:>20,}  expected {expected['']:,}")
    print(f"seconds     {seconds:>20.1f}\n")
    for name, total in profile.by_operator("forward").items():
        cost = total.cost
        counted = f"{cost.macs:>20,} {cost.flops:>20,}" if cost else f"{'unknown':>20}"
        print(f"{name:<44} {total.calls:>5} {counted}")
    for fqn, (closed_form, counted_macs) in wrong.items():
        print(f"WRONG {fqn}: {counted_macs:,}, by closed form {closed_form:,}")
    return 1 if wrong or profile.total_params != FULL_SIZE.params() else 0


if __name__ == "__main__":
    raise SystemExit(main())
