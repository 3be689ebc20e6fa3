"""Plan training steps of Llama-3 on one H100, on 64 and on 1,024, without any of them.

    python -m benchmarks.plan_mesh                   # every plan, each in a process of its own
    python -m benchmarks.plan_mesh 70B --layers 8    # one of them, with fewer layers
    dispatch-flops plan benchmarks/plan_mesh.py:pipelined_405b --machine H100 \\
        --mesh pp=2,dp=64,tp=8

The models are transformers' Llama with the published sizes and random weights; nothing is
downloaded. The pipeline is a job: the stages of ``benchmarks/simulate.py``, with an optimizer. The
parameters and products of each plan are compared with their closed form.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.llama import CONFIGS, LlamaConfig
from benchmarks.simulate import LAYERS, MICROBATCHES, closed_form_macs, llama_405b
from dispatch_flops import plan
from dispatch_flops.analysis.planned import Plan, PlannedStep
from dispatch_flops.renderers import plan_table

SEQUENCE = 8192
H100 = "NVIDIA H100 80GB HBM3"
# Each plan: the model, the mesh (None: one device), and whether parameters stay in float32.
PLANS: dict[str, tuple[str, dict[str, int] | None, bool]] = {
    "8B": ("8B", None, False),
    "70B": ("70B", {"dp": 8, "tp": 8}, True),
    "405B": ("405B", {"dp": 128, "tp": 8}, True),
}
PIPELINE, PIPELINE_MESH = "405B pipeline", {"pp": 2, "dp": 64, "tp": 8}


def builder(config: LlamaConfig) -> Callable[..., Any]:
    """Return what builds the model of transformers, with labels, for a batch and a sequence."""

    def build(batch: int, seq: int) -> Any:
        import transformers

        settings = transformers.LlamaConfig(
            hidden_size=config.hidden, intermediate_size=config.ffn, vocab_size=config.vocab,
            num_hidden_layers=config.layers, num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads, max_position_embeddings=SEQUENCE,
            tie_word_embeddings=False, use_cache=False,
        )  # fmt: skip
        ids = torch.ones(batch, seq, dtype=torch.long)
        return transformers.LlamaForCausalLM(settings), {"input_ids": ids, "labels": ids}

    return build


def pipelined_405b(mesh: DeviceMesh, n_layers: int = LAYERS) -> tuple[Any, Callable[[], None]]:
    """Return a stage of the pipeline and a training step of it: 1F1B in bfloat16, with AdamW."""
    model, run = llama_405b(mesh, n_layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        run()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def planned(name: str, layers: int | None) -> Plan:
    """Return the plan of that name; layers: in place of those of the published model."""
    if name == PIPELINE:
        job = pipelined_405b
        sizes = {} if layers is None else {"n_layers": layers}
        return plan(job, H100, sizes=sizes, mesh=PIPELINE_MESH, search_batch=False)
    model, mesh, is_mixed = PLANS[name]
    return plan(
        builder(_config(model, layers)),
        H100,
        sizes={"batch": 1, "seq": SEQUENCE},
        dtype=torch.bfloat16,
        checkpoint=True,
        mesh=mesh,
        mixed_precision=is_mixed,
        search_batch=mesh is None,
    )


def _config(model: str, layers: int | None) -> LlamaConfig:
    config = CONFIGS[model]
    if layers is None:
        return config
    return LlamaConfig(
        layers=layers, hidden=config.hidden, ffn=config.ffn, heads=config.heads,
        kv_heads=config.kv_heads,
    )  # fmt: skip


def check(name: str, step: PlannedStep, layers: int | None) -> str:
    """Return the closed forms that the plan agrees with; raises AssertionError if it does not."""
    cluster = step.cluster
    if name == PIPELINE:
        assert cluster is not None
        n_layers = layers or LAYERS
        stages, tp = PIPELINE_MESH["pp"], PIPELINE_MESH["tp"]
        macs = 0
        for stage in range(stages):
            own = n_layers * (stage + 1) // stages - n_layers * stage // stages
            macs += closed_form_macs(own, tp, has_head=stage == stages - 1)
        truth = macs * PIPELINE_MESH["dp"] * tp
        found, params = cluster.cost.macs, cluster.parameters
        config = _config("405B", n_layers)
    else:
        config = _config(PLANS[name][0], layers)
        truth = 3 * config.forward_macs(step.samples or 0, SEQUENCE)
        costs = step.profile.model_total() if cluster is None else cluster.model_cost
        found = costs.macs
        params = step.profile.total_params if cluster is None else cluster.parameters
    assert found == truth, (name, found, truth)
    assert params == config.params, (name, params, config.params)
    kind = "of all phases" if name == PIPELINE else "of forward and backward"
    return f"{params:,} parameters and {found:,} MACs {kind}, as the closed forms"


def run_one(name: str, layers: int | None) -> dict[str, Any]:
    """Return the table of a plan, and what planning took."""
    start = time.perf_counter()
    found = planned(name, layers)
    seconds = time.perf_counter() - start
    (step,) = found.steps
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {
        "text": plan_table.render(found),
        "checked": check(name, step, layers),
        "took": f"{seconds:.0f} s, {time.process_time():.0f} s of CPU, peak memory {peak} MiB",
    }


def report(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Plans of Llama-3",
        "",
        "Made by `python -m benchmarks.plan_mesh` on 2 cores of an AMD EPYC that other programs "
        f"used at the same time, torch {torch.__version__}; no GPU. Sequences have {SEQUENCE:,} "
        "tokens, a micro-batch is one sequence of a rank of dp, causal attention is counted in "
        f"full. The pipeline runs {MICROBATCHES} micro-batches, without checkpointing and in "
        "bfloat16 throughout. Times are lower bounds: the largest is the time with nothing hidden.",
    ]
    for name, result in results.items():
        lines += [
            "", f"## {name}", "", f"Planning took {result['took']}. {result['checked']}.", "",
            "```text", result["text"], "```",
        ]  # fmt: skip
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="PLAN", help=", ".join([*PLANS, PIPELINE]))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true", help="run one plan here, and print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.json:
        print(json.dumps(run_one(options.names[0], options.layers)))
        return
    results = {}
    for name in options.names or [*PLANS, PIPELINE]:
        command = [sys.executable, "-m", "benchmarks.plan_mesh", name, "--json"]
        if options.layers is not None:
            command += ["--layers", str(options.layers)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
    text = report(results)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
