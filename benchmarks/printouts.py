"""The printouts of four profilers side by side, of the same models and inputs.

    pip install -c tests/constraints.txt '.[test,peers]'
    python benchmarks/printouts.py > benchmarks/results/side_by_side.md

Each printout is that of the tool's shortest documented call, made in a process of its own. Long
ones are cut, and say by how much. The total that the tool states is compared with a closed form.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from from_transformers import _BERT, _MIXTRAL_CONFIG, mixtral_macs
from tabulate import tabulate
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.models.vision import ResNet

LINES, WIDTH = 36, 118
TOTAL = "TOTAL MACS "


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A model with its input and the true number of MACs of its forward pass."""

    name: str
    macs: int
    make: Callable[[], nn.Module]
    inputs: Callable[[], list[torch.Tensor]]

    @property
    def title(self) -> str:
        return self.name.partition(",")[0].partition(" (")[0]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool: the package, what a user types, and what prints and returns the total MACs."""

    package: str
    typed: str
    call: Callable[[nn.Module, list[torch.Tensor]], int]


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(attn_implementation="sdpa")).eval()


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_MIXTRAL_CONFIG)).eval()


def token_ids() -> list[torch.Tensor]:
    return [torch.arange(128).view(1, 128)]


MODELS = (
    Shown(name="BERT-base, 1 x 128", macs=_BERT, make=bert, inputs=token_ids),
    Shown(
        name="ResNet-50, 1 x 3 x 224 x 224",
        macs=ResNet.bottleneck_macs((3, 4, 6, 3)),
        make=lambda: ResNet((3, 4, 6, 3), 4).eval(),
        inputs=lambda: [torch.ones(1, 3, 224, 224)],
    ),
    Shown(
        name="Mixture of experts (Mixtral, 2 layers, 8 experts), 1 x 128",
        macs=mixtral_macs(128),
        make=mixtral,
        inputs=token_ids,
    ),
)


def ours(model: nn.Module, inputs: list[torch.Tensor]) -> int:
    from dispatch_flops import profile_model

    profile = profile_model(model, args=inputs)
    print(profile)
    return profile.total().macs


def torchinfo(model: nn.Module, inputs: list[torch.Tensor]) -> int:
    from torchinfo import summary

    columns = ("output_size", "num_params", "mult_adds")
    statistics = summary(model, input_data=inputs, col_names=columns, verbose=0)
    print(statistics)
    return int(statistics.total_mult_adds)


def fvcore(model: nn.Module, inputs: list[torch.Tensor]) -> int:
    from fvcore.nn import FlopCountAnalysis, flop_count_table

    analysis = FlopCountAnalysis(model, tuple(inputs))
    print(flop_count_table(analysis))
    return int(analysis.total())


def deepspeed(model: nn.Module, inputs: list[torch.Tensor]) -> int:
    from deepspeed.profiling.flops_profiler import get_model_profile

    return int(get_model_profile(model, args=inputs, as_string=False)[1])


TOOLS = (
    Tool(package="dispatch-flops", typed="print(profile_model(model, args=inputs))", call=ours),
    Tool(
        package="torchinfo",
        typed='summary(model, input_data=inputs, col_names=("output_size", "num_params", '
        '"mult_adds"))',
        call=torchinfo,
    ),
    Tool(
        package="fvcore",
        typed="print(flop_count_table(FlopCountAnalysis(model, inputs)))",
        call=fvcore,
    ),
    Tool(package="deepspeed", typed="get_model_profile(model, args=inputs)", call=deepspeed),
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", nargs=2, type=int, metavar=("MODEL", "TOOL"))
    chosen = parser.parse_args().one
    if chosen:
        return print_one(MODELS[chosen[0]], TOOLS[chosen[1]])
    print(f"# Printouts side by side\n\n{introduction()}\n")
    for number, model in enumerate(MODELS):
        found = [printed(number, tool) for tool in range(len(TOOLS))]
        rows = [row(model, tool, *one) for tool, one in zip(TOOLS, found, strict=True)]
        headers = ["", "lines", "widest line", "MACs stated", "of the truth"]
        print(f"## {model.name}\n\n{model.macs:,} MACs by the closed form.\n")
        print(tabulate(rows, headers, tablefmt="github", disable_numparse=True) + "\n")
        for tool, (text, _) in zip(TOOLS, found, strict=True):
            print(f"### {model.title}: {tool.package}\n")
            print(f"`{tool.typed}`\n\n```text\n{cut(text)}\n```\n")
    return 0


def print_one(model: Shown, tool: Tool) -> int:
    """Print what a tool prints of a model, and the total that it returns."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    macs = tool.call(model.make(), model.inputs())
    print(f"\n{TOTAL}{json.dumps(macs)}")
    return 0


def printed(model: int, tool: int) -> tuple[str, int | None]:
    """Return a tool's printout of a model and its total; None with the error where it fails."""
    command = [sys.executable, __file__, "--one", str(model), str(tool)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    text, _, total = done.stdout.rpartition(TOTAL)
    if done.returncode or not total:
        return done.stderr.strip().splitlines()[-1], None
    lines = [line.rstrip() for line in text.strip().splitlines() if not is_log(line)]
    return "\n".join(lines), int(total)


def is_log(line: str) -> bool:
    """Return whether a line is DeepSpeed's log, which it writes to stdout."""
    return "[INFO]" in line or "[WARNING]" in line


def row(model: Shown, tool: Tool, text: str, macs: int | None) -> list[Any]:
    if macs is None:
        return [tool.package, "", "", "fails", ""]
    lines = text.splitlines()
    share = "exact" if macs == model.macs else f"{macs / model.macs:.4f}"
    return [tool.package, len(lines), max(map(len, lines)), f"{macs:,}", share]


def cut(text: str) -> str:
    """Return the beginning of a printout, saying what is cut."""
    lines = text.splitlines()
    shown = [line if len(line) <= WIDTH else line[: WIDTH - 3] + "..." for line in lines[:LINES]]
    if len(lines) > LINES:
        shown.append(f"[{len(lines) - LINES} more lines]")
    return "\n".join(shown)


def introduction() -> str:
    def known(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "of this checkout"

    names = ("torch", "transformers", *(tool.package for tool in TOOLS))
    versions = ", ".join(f"{name} {known(name)}" for name in names)
    return (
        f"Made by `python benchmarks/printouts.py`. {versions}; CPU.\n\n"
        f"Printouts are cut after {LINES} lines and {WIDTH} columns, which is said where it is "
        "done. MACs are those of the forward pass; fvcore calls one a flop.\n\nWhy totals differ: "
        "torchinfo multiplies the parameters of a layer by the batch, those of a convolution by "
        "its positions too, but not those of a linear layer by the sequence; it adds biases and "
        "normalisation, and leaves out attention's two products, which have no parameters. fvcore "
        "adds normalisation and does not know fused attention. Neither fvcore nor DeepSpeed knows "
        "the grouped product in which the experts run.\n\nThe machine was shared: latencies in "
        "the printouts are not a comparison."
    )


if __name__ == "__main__":
    sys.exit(main())
