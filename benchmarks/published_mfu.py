"""MFU and HFU that others published, next to those of our counts at the publisher's throughput.

    python -m benchmarks.published_mfu [--publisher llm-foundry] [--model mpt-7b] [--output FILE]

Each model is built on the meta device in plain torch, every layer checkpointed, and one sequence
is counted. Counts of parameters and MACs are checked against closed forms, and parameters against
the publisher's where there are any. A column for each definition shows why two papers differ.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.published_models import (
    DTYPE,
    Config,
    GptConfig,
    LlamaRun,
    checkpoint_layers,
    config_of,
)
from dispatch_flops import FlopCounterMode, Profile
from dispatch_flops.analysis import MACHINES, Machine, hfu, mfu
from dispatch_flops.profile import ModuleNode

DATA = Path(__file__).with_suffix(".csv")
CLOSED_FORMS = (
    "6N", "6N without embedding", "6N+12LdT", "6N+12LdT without embedding",
    "6N+6LdT", "6N+6LdT without embedding",
)  # fmt: skip
TOLERANCE = 0.3  # points

_FOUNDRY = "https://github.com/mosaicml/llm-foundry/blob/8c2dd48f72168c5d51e2f7b151595892a8fba43d"
_TITAN = "https://github.com/pytorch/torchtitan/blob"
SOURCES = {
    "llm-foundry": f"{_FOUNDRY}/scripts/train/benchmarking/README.md; the models: "
    f"{_FOUNDRY}/scripts/train/yamls/pretrain. All rows in bfloat16.",
    "torchtitan": f"{_TITAN}/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md",
    "torchtitan 2024-12": f"{_TITAN}/31a17bfdb70bab6f62a13d21816a5339b911d6e3/benchmarks/"
    "llama3_h100_202412_torchtitan.md, tables 1 and 3. It states that the four runs without Float8 "
    "have 33% to 39% MFU: the lowest is on 128 devices, the highest on 8",
    "arXiv 2205.05198": "https://arxiv.org/abs/2205.05198, table 5; throughput is batch x sequence "
    "over the seconds of a step",
    "arXiv 2104.04473": "https://arxiv.org/abs/2104.04473, table 1. It states TFLOP/s by its "
    "equation 3; the throughput is derived from these, so the row compares counts alone",
    "arXiv 2201.11990": "https://arxiv.org/abs/2201.11990, section 2.4: seconds of a step of 1920 "
    "sequences, and TFLOP/s; HFU is that over 312",
    "arXiv 2204.02311": "https://arxiv.org/abs/2204.02311, section 4.1 and appendix B",
}
# What each publisher divides by the peak.
DEFINITION = {
    "llm-foundry": "6N+12LdT",
    "torchtitan": "6N+12LdT",
    "torchtitan 2024-12": "6N+12LdT without embedding",
    "arXiv 2205.05198": "contractions",
    "arXiv 2104.04473": "contractions",
    "arXiv 2201.11990": "contractions",
    "arXiv 2204.02311": "6N+12LdT",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published measurement; MFU and HFU in per cent, None where not published.

    mfu_unit: of the last digit of the published MFU, such as 0.1 points.
    """

    publisher: str
    model: str
    sequence: int
    gpus: int
    machine: str
    mfu: float | None
    hfu: float | None
    tokens_per_s: float
    checkpointing: str
    params: int | None
    mfu_unit: float = 0.0

    @property
    def seconds_per_sequence(self) -> float:
        """Seconds that one device takes for one sequence."""
        return self.sequence * self.gpus / self.tokens_per_s

    @property
    def peak(self) -> Machine:
        return MACHINES[self.machine]


def read_rows() -> Iterator[Row]:
    """Yield the rows of ``published_mfu.csv``."""
    with DATA.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield Row(
                publisher=row["publisher"],
                model=row["model"],
                sequence=int(row["sequence"]),
                gpus=int(row["gpus"]),
                machine=row["machine"],
                mfu=float(row["mfu"]) if row["mfu"] else None,
                hfu=float(row["hfu"]) if row["hfu"] else None,
                tokens_per_s=float(row["tokens_per_s"]),
                checkpointing=row["checkpointing"],
                params=int(row["params"]) if row["params"] else None,
                mfu_unit=10.0 ** -len(row["mfu"].partition(".")[2]),
            )


@dataclass(frozen=True, kw_only=True)
class Counted:
    """One sequence of a model with every layer checkpointed, and with causal attention halved."""

    full: Profile
    half: Profile
    lookup_params: int


@cache
def count(model: str, sequence: int) -> Counted:
    """Count a published model; raises AssertionError if a closed form disagrees."""
    config = config_of(model, sequence)
    full, half = (_profile(config, causal) for causal in ("full", "half"))
    assert full.total_params == config.params, (model, full.total_params, config.params)
    assert full.total("forward").macs == config.forward_macs(), model
    assert full.total("backward").macs == 2 * config.forward_macs(), model
    return Counted(full=full, half=half, lookup_params=config.lookup_params)


def _profile(config: Config, causal: str) -> Profile:
    with torch.device("meta"):
        model = config.build().to(DTYPE)
        tokens = torch.ones(1, config.sequence, dtype=torch.long)
    checkpoint_layers(model)
    with FlopCounterMode(model, display=False, causal=causal, target="cuda") as counter:
        model(tokens).sum().backward()
    return counter.profile


def without_recomputation(profile: Profile, *, of_kernels_alone: bool) -> Profile:
    """Return the profile without recomputed operators.

    of_kernels_alone: leave out only the scores that a fused kernel's backward pass recomputes.
    """

    def change(node: ModuleNode) -> ModuleNode:
        kept = tuple(
            op
            for op in node.ops
            if op.phase != "recompute" or (of_kernels_alone and "_backward" not in op.op)
        )
        return ModuleNode(
            fqn=node.fqn, class_name=node.class_name, name=node.name, ops=kept,
            children=node.children,
        )  # fmt: skip

    return profile.map_nodes(change)


def figures(row: Row) -> dict[str, float]:
    """Return MFU by each definition, HFU, and the points that look-ups in N account for."""
    counted, config = count(row.model, row.sequence), config_of(row.model, row.sequence)
    seconds, peak = row.seconds_per_sequence, row.peak
    inner = config.config if isinstance(config, LlamaRun) else config
    sizes = {
        "layers": inner.layers,
        "width": _attention_width(config),
        "embedding_params": config.lookup_params,
    }
    found: dict[str, float | None] = {
        "all": mfu(counted.full, peak, seconds),
        "all, causal half": mfu(counted.half, peak, seconds),
        "contractions": mfu(counted.full, peak, seconds, definition="contractions"),
        "contractions, causal half": mfu(counted.half, peak, seconds, definition="contractions"),
    }
    for definition in CLOSED_FORMS:
        found[definition] = mfu(counted.full, peak, seconds, definition=definition, **sizes)
    if row.checkpointing == "full":
        found["HFU"] = hfu(counted.full, peak, seconds)
        own = without_recomputation(counted.full, of_kernels_alone=True)
        found["HFU without kernels"] = hfu(own, peak, seconds)
    for name, params in (
        ("look-ups", 6 * config.lookup_params),
        ("head again", 2 * config.head_params),
    ):
        found[name] = params * row.sequence / (peak.flops_per_s["bfloat16"] * seconds)
    return {name: 100 * share for name, share in found.items() if share is not None}


def _attention_width(config: Config) -> int:
    if isinstance(config, LlamaRun):
        return config.config.hidden
    return config.width if isinstance(config, GptConfig) else config.attention_width


def cells(row: Row) -> list[str]:
    """Return the row of the table."""
    ours = figures(row)
    by_publisher = ours[DEFINITION[row.publisher]]
    return [
        row.publisher, row.model, str(row.sequence), str(row.gpus),
        row.machine.removeprefix("NVIDIA "), row.checkpointing,
        _number(row.mfu), _number(by_publisher), *map(_number, (
            ours.get("all"), ours.get("all, causal half"),
            ours["contractions"], ours["contractions, causal half"],
            *(ours[definition] for definition in CLOSED_FORMS), ours["look-ups"],
        )),
        _number(row.hfu), _number(ours.get("HFU without kernels")), _number(ours.get("HFU")),
        why_it_differs(row, ours),
    ]  # fmt: skip


def why_it_differs(row: Row, ours: dict[str, float]) -> str:
    """Return why our count differs from what is published; "" within the tolerance."""
    found = []
    # The norms of PaLM compute in float32, for which a TPU has no published peak.
    model, contractions = ours.get("all", ours["contractions"]), ours["contractions"]
    if row.mfu is not None and abs(row.mfu - model) > TOLERANCE:
        # A closed form has the look-ups, and no FLOPs but those of products.
        if abs(row.mfu - contractions - ours["look-ups"]) <= TOLERANCE:
            found.append("MFU: N has look-ups")
        else:
            found.append("MFU: not explained")
    own = ours.get("HFU without kernels")
    if row.hfu is not None and own is not None and abs(row.hfu - own) > TOLERANCE:
        # 4/3 of a closed form recomputes all of N: the head and the look-ups as well.
        products = own - (model - contractions) * 4 / 3
        if row.hfu == round(row.hfu) and abs(row.hfu - own) <= 0.5 + TOLERANCE:
            found.append("HFU: published in whole per cent")
        elif abs(row.hfu - products - ours["head again"] - ours["look-ups"] * 4 / 3) <= TOLERANCE:
            found.append("HFU: 4/3 of MFU recomputes the head and the look-ups")
        else:
            found.append("HFU: not explained")
    return "; ".join(found)


def beyond_rounding(row: Row) -> float:
    """Return the points between the published MFU and that of its definition, less rounding.

    Rounding is half a unit of the last digit of the published MFU.
    """
    assert row.mfu is not None
    by_publisher = figures(row)[DEFINITION[row.publisher]]
    return max(abs(row.mfu - by_publisher) - row.mfu_unit / 2, 0.0)


def agreement(rows: Iterable[Row]) -> str:
    """Return how far published MFU is from the publisher's own definition, in words."""
    stated = [row for row in rows if row.mfu is not None]
    if not stated:
        return "No row states MFU."
    beyond = {id(row): beyond_rounding(row) for row in stated}
    worst = max(stated, key=lambda row: beyond[id(row)])
    exact = sum(points < 0.01 for points in beyond.values())
    return (
        f"Of {len(stated)} rows that state MFU, the publisher's own definition gives it in "
        f"{exact}, to the rounding of its last digit and 0.01 points. The largest difference "
        f"beyond rounding is {beyond[id(worst)]:.2f} points ({worst.publisher}, {worst.model}), "
        "for throughput is rounded, too."
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


HEADER = [
    "publisher", "model", "sequence", "GPUs", "GPU", "checkpointing", "published MFU",
    "its definition", "all", "all, causal half", "contractions", "contractions, causal half",
    *CLOSED_FORMS, "look-ups in N", "published HFU", "HFU", "HFU with kernels' own",
    "why it differs",
]  # fmt: skip


def report(rows: Iterable[Row]) -> str:
    """Return the table with its sources, in Markdown."""
    rows = list(rows)
    table = []
    for index, row in enumerate(rows):
        print(f"{index + 1}/{len(rows)} {row.model} {row.sequence}", file=sys.stderr)
        table.append(cells(row))
    for row in rows:
        given = row.params
        assert given in (None, config_of(row.model, row.sequence).params), (row, given)
    close = sum(not line[-1] for line in table)
    sources = [f"- {name}: {SOURCES[name]}" for name in dict.fromkeys(r.publisher for r in rows)]
    return "\n".join(
        [
            "# Published MFU and HFU, and those of our counts",
            "",
            f"Of {len(rows)} rows, {close} are within {TOLERANCE} points of our own definition "
            '("all"), HFU included. The others have the reason in the last column. The throughput '
            "is the publisher's; every column divides other FLOPs by the same peak, in per cent.",
            "",
            agreement(rows),
            "",
            '- "its definition": the closed form or count that the publisher states.',
            '- "look-ups in N": points that 6N counts for parameters that no product uses: learned '
            "positions, and an embedding that the head does not share.",
            '- "HFU": layers are recomputed in backward, as checkpointing does, the head is not. '
            '"HFU with kernels\' own" adds the scores that a fused attention kernel recomputes in '
            "its backward pass. No HFU is computed where the recomputed part is not published.",
            "- Attention is counted in full, unless a column says otherwise.",
            "",
            "Sources:",
            "",
            *sources,
            "",
            f"Written by `python -m benchmarks.published_mfu`, torch {torch.__version__}.",
            "",
            tabulate(table, HEADER, tablefmt="github", disable_numparse=True),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--publisher", choices=SOURCES)
    parser.add_argument("--model")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    chosen = [
        row
        for row in read_rows()
        if options.publisher in (None, row.publisher) and options.model in (None, row.model)
    ]
    text = report(chosen)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
