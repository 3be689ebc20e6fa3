"""BERT-base under DeepSpeed's profiler and under this one, in one process, number by number.

    DS_BUILD_OPS=0 pip install -c tests/constraints.txt '.[test,peers]'
    python benchmarks/compare_deepspeed.py [--full]

Prints both summaries, then every module class whose numbers differ, and why. ``--full`` prints
both complete profiles too.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from collections import defaultdict
from typing import Any

import torch
from tabulate import tabulate

B, S = 4, 128

RESIDUAL = "the residual additions are written x + y, which no patched function sees: 1 each"
WHY = {
    "Linear": "the bias, which DeepSpeed skips: 1 per output element",
    "BertSelfAttention": "DeepSpeed counts only the two products; scaling q and k is 1 per "
    "element each, the safe softmax 6 per score less 2 per row (max, subtract, exp, sum, divide, "
    "and the comparison that finds rows of -inf)",
    "GELUActivation": "DeepSpeed counts no gelu here; exact gelu is x/2 (1 + erf(x/√2)), as its "
    "reference decomposition writes it",
    "LayerNorm": "DeepSpeed counts 5 per element; mean, variance, normalisation, weight and bias "
    "are 8 per element and a few per row",
    "BertSelfOutput": RESIDUAL,
    "BertOutput": RESIDUAL,
    "BertEmbeddings": "the two sums of embeddings: 1 each",
    "Tanh": "1 per element; DeepSpeed does not patch it",
}


def main() -> int:
    warnings.filterwarnings("ignore")
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(attn_implementation="sdpa")).eval()
    ids = torch.ones(B, S, dtype=torch.long)

    from deepspeed.profiling.flops_profiler import FlopsProfiler
    from deepspeed.profiling.flops_profiler import get_model_profile as deepspeed_profile

    from dispatch_flops import get_model_profile, profile_model

    texts = {}
    for name, profiler in (("DeepSpeed", deepspeed_profile), ("dispatch_flops", get_model_profile)):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            profiler(model, args=[ids], top_modules=3, warm_up=2)
        texts[name] = printed.getvalue().strip()
        print(f"== {name}")
        print(texts[name] if "--full" in sys.argv else _summary(texts[name]))
        print()

    theirs = FlopsProfiler(model)
    theirs.start_profile()
    model(ids)
    theirs.stop_profile()
    ours = profile_model(model, args=[ids], warm_up=0)
    print("== MACs and FLOPs by class of module (own, without children)")
    print(_by_class(model, ours))
    theirs.end_profile()
    return 0


def _summary(text: str) -> str:
    return "\n".join(line for line in text.splitlines()[: text.count("\n")] if _is_total(line))


def _is_total(line: str) -> bool:
    return bool(re.match(r"^(params|fwd)\b.*:\s", line))


def _by_class(model: torch.nn.Module, ours: Any) -> str:
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    nodes = {node.fqn: node for node in ours.root.walk()}
    for fqn, module in model.named_modules():
        row = rows[type(module).__name__]
        row[0] += module.__macs__  # DeepSpeed keeps own numbers here and sums when it prints
        row[2] += module.__flops__
        own = nodes[fqn].own("forward")
        row[1] += own.macs
        row[3] += own.flops
    table = [
        [name, *(f"{number:,}" for number in numbers), WHY.get(name, "")]
        for name, numbers in sorted(rows.items(), key=lambda item: -item[1][3])
        if any(numbers)
    ]
    headers = ["class", "MACs theirs", "MACs ours", "FLOPs theirs", "FLOPs ours", "why"]
    return tabulate(table, headers, maxcolwidths=[None] * 5 + [60], disable_numparse=True)


if __name__ == "__main__":
    raise SystemExit(main())
