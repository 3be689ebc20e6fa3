"""``plan --generate``: prefill and decode planned apart."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.planned_generation import GenerationPlan
from dispatch_flops.cli.output import print_progress
from dispatch_flops.errors import TargetError


def add_generation_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--generate",
        action="store_true",
        help="plan generation in place of a training step: the sizes of --set are batch, prompt, "
        "new and draft",
    )
    group.add_argument(
        "--sequences",
        action="extend",
        nargs="+",
        default=[],
        metavar="STEP",
        help="with --generate, a step of a continuous batch, such as 12x1@1024+512@0: 12 sequences "
        "with 1 new token after 1024 cached ones, and a prompt of 512",
    )


def plan_generation(
    options: Namespace,
    machine: Machine,
    sizes: Mapping[str, Any],
    dtype: str | None,
    host_s_per_operator: float | None,
) -> GenerationPlan:
    """Return the plan that the options ask for; raises TargetError for unsuitable ones."""
    from dispatch_flops.cli.targets import prepare
    from dispatch_flops.planning.generation import plan_generate

    for name, given in (
        ("--input-shape", options.input_shape),
        ("--inputs", options.inputs),
        ("--checkpoint", options.checkpoint),
        ("--optimizer", options.optimizer),
        ("--mesh", options.mesh),
        ("--mixed-precision", options.mixed_precision),
    ):
        if given:
            raise TargetError(f"{name} is not available with --generate; omit one of them")

    def build(**others: Any) -> Any:
        print_progress(f"  building {options.target}")
        return prepare(
            options.target, dtype=dtype, device="meta", variables=others, notify=print_progress
        ).model

    return plan_generate(
        build,
        machine,
        sizes=sizes,
        sequences=options.sequences,
        causal=options.causal,
        host_s_per_operator=host_s_per_operator,
        search_batch=not options.no_search,
    )
