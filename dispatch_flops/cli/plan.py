"""The command ``plan``: does a step fit, how long does it take at least, what MFU can it reach."""

from __future__ import annotations

import functools
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from dispatch_flops.analysis.planned import Plan
from dispatch_flops.analysis.planned_generation import GenerationPlan
from dispatch_flops.cli.arguments import (
    OPTIMIZERS,
    TARGET_HELP,
    Commands,
    add_causal_option,
    add_command,
    add_machine_option,
    add_set_option,
    add_table_options,
    machine_named,
    parse_assignments,
)
from dispatch_flops.cli.clusters import parse_mesh
from dispatch_flops.cli.exit_codes import OK
from dispatch_flops.cli.formats import table_style
from dispatch_flops.cli.output import emit, print_progress
from dispatch_flops.cli.plan_generation import add_generation_options, plan_generation
from dispatch_flops.cli.run import hint_for
from dispatch_flops.cli.sweep import parse_values
from dispatch_flops.errors import DispatchFlopsError, TargetError
from dispatch_flops.renderers import plan_page, plan_table

if TYPE_CHECKING:
    from dispatch_flops.cli.targets import Inputs

_EPILOG = f"""\
{TARGET_HELP}
The step runs on tensors without data, so that neither a GPU nor memory for the model is needed.
Every combination of the values of --set is a column. "batch" is the micro-batch, of which the
largest that fits is searched. hf: targets accept batch and seq; a language model computes its loss.

With --mesh the step is of one rank of each kind. dp shards each layer and the root by FSDP2, tp
shards by the tensor-parallel plan that the model states, as models of transformers do. With other
dimensions, such as pp, TARGET is a job: a function with a parameter mesh, a DeviceMesh, and the
names of --set; it builds and shards its model and returns a function that runs one step.

With --generate, a prompt and the tokens that follow it are planned apart, with a cache of keys and
values. prompt and new are tokens of each sequence; draft is how many tokens another model proposes
for each step of speculative decoding.

--output plan.html writes a page that shows the choices side by side. --output plan.json writes all
figures for a dashboard: bytes and counts are integers, times are seconds, a range is a list of two,
and an unknown figure is null. Where is_lower_bound is true, the figures beside it are at least so.

examples:
  dispatch-flops plan hf:config.json:AutoModelForCausalLM --machine H100 \\
      --set batch=1,2,4 seq=8192 --dtype bf16 --optimizer adamw --checkpoint
  dispatch-flops plan model.py:Net --input-shape batch,3,224,224 --set batch=8,64 --machine my.json
  dispatch-flops plan hf:config.json:AutoModelForCausalLM --machine H100 --mesh dp=64,tp=8 \\
      --set batch=1,2,4 seq=8192 --dtype bf16 --optimizer adamw --checkpoint
  dispatch-flops plan job.py:job --mesh pp=2,dp=64,tp=8 --machine H100 --set batch=1
  dispatch-flops plan hf:config.json:AutoModelForCausalLM --machine H100 --dtype bf16 \\
      --generate --set batch=1,8,64 prompt=2048 new=256 --output plan.html
  dispatch-flops plan hf:config.json:AutoModelForCausalLM --machine H100 --dtype bf16 \\
      --generate --sequences 12x1@1024+512@0 5@1024
"""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_plan(commands: Commands) -> None:
    parser = add_command(
        commands, "plan", "plan a training step: memory, least time and MFU on a machine", _EPILOG
    )
    parser.add_argument("target", metavar="TARGET", help="the model or the job to plan (see below)")
    add_machine_option(
        parser,
        "the device: a name such as H100 or 'NVIDIA A100-SXM4-80GB', or the path of a JSON file "
        "that describes it (required)",
    )
    add_set_option(parser, "values to choose from: batch=1,2,4 seq=8192")
    parser.add_argument(
        "--mesh",
        metavar="NAME=SIZE,...",
        help="plan ranks of a device mesh, outermost dimension first, such as dp=64,tp=8",
    )
    _add_step_options(parser)
    add_generation_options(parser)
    add_table_options(parser, "table", "markdown", "json", "html")
    parser.set_defaults(run=run_plan)


def _add_step_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("step")
    group.add_argument(
        "--input-shape",
        action="append",
        default=[],
        metavar="SHAPE",
        help="as for profile: batch,3,224,224; a size may be a name of --set",
    )
    group.add_argument("--inputs", metavar="FACTORY", help="as for profile")
    group.add_argument(
        "--dtype", help="of the model and its inputs, such as bf16 (default: its own)"
    )
    group.add_argument(
        "--optimizer",
        choices=(*OPTIMIZERS, "none"),
        help="none plans a forward pass without gradients (default: adamw; a job has its own)",
    )
    group.add_argument(
        "--checkpoint",
        action="store_true",
        help="recompute every layer of the model's stacks in backward",
    )
    group.add_argument(
        "--mixed-precision",
        action="store_true",
        help="with dp: keep float32 parameters, gradients and state, and compute in --dtype",
    )
    add_causal_option(group)
    group.add_argument(
        "--host-cost",
        action="store_true",
        help="measure what this host takes for an operator, and add it to the range",
    )
    group.add_argument("--no-search", action="store_true",
                       help="do not search the largest batch that fits")  # fmt: skip


def run_plan(options: Namespace) -> int:
    if options.machine is None:
        raise TargetError("--machine is missing; name a device, such as --machine H100")
    machine = machine_named(options.machine, "cpu")
    assert machine is not None
    sizes = {
        name: parse_values(name, text) for name, text in parse_assignments(options.set).items()
    }
    mesh = None if options.mesh is None else parse_mesh(options.mesh)
    if options.sequences and not options.generate:
        raise TargetError("--sequences needs --generate; add it")
    print_progress(f"planning {options.target} on {machine.name}")

    from dispatch_flops.cli.targets import raise_target_error
    from dispatch_flops.planning.host_cost import measure_host_s_per_operator
    from dispatch_flops.planning.planner import plan

    inputs: list[Inputs] = []  # of the models that were built
    notify = functools.cache(print_progress)  # models of other sizes have the same to say
    try:
        with redirect_stdout(sys.stderr):
            host_s = measure_host_s_per_operator() if options.host_cost else None
            if options.generate:
                dtype = _name_of_dtype(options)
                planned: Plan | GenerationPlan = plan_generation(
                    options, machine, sizes, dtype, host_s
                )
            else:
                planned = plan(
                    _job(options, sizes) or functools.partial(_build, options, inputs, notify),
                    machine,
                    sizes=sizes,
                    optimizer=None if options.optimizer == "none" else options.optimizer or "adamw",
                    dtype=None if mesh is None else _dtype(options),
                    checkpoint=options.checkpoint,
                    causal=options.causal,
                    host_s_per_operator=host_s,
                    search_batch=not options.no_search,
                    mesh=mesh,
                    mixed_precision=options.mixed_precision,
                )
    except DispatchFlopsError:
        raise
    except (Exception, SystemExit) as error:
        hint = hint_for(error, options, inputs[-1]) if inputs else ""
        raise_target_error(f"planning {options.target}", error, hint)
    emit(_text(planned, options), options.output)
    return OK


def _dtype(options: Namespace) -> Any:
    """Return the torch.dtype that --dtype names; None without it."""
    from dispatch_flops.cli.targets.inputs import parse_dtype

    return parse_dtype(_name_of_dtype(options)) if options.dtype is not None else None


def _name_of_dtype(options: Namespace) -> Any:
    return _DTYPES.get(options.dtype, options.dtype)


def _job(options: Namespace, sizes: dict[str, Any]) -> Callable[..., Any] | None:
    """Return the job that TARGET names; None where it names a model."""
    from dispatch_flops.cli.targets.objects import Factory
    from dispatch_flops.cli.targets.preparation import find_source
    from dispatch_flops.planning.meshes import is_job

    found = find_source(options.target)
    if not isinstance(found, Factory) or not is_job(found.found) or "mesh" in sizes:
        return None
    if options.mesh is None:
        raise TargetError(f"{options.target} is a job: it has a parameter mesh; add --mesh")
    if options.optimizer is not None:
        raise TargetError("--optimizer is for a model; a job has an optimizer of its own")
    if options.input_shape or options.inputs:
        raise TargetError(
            "--input-shape and --inputs are for a model; a job makes its inputs itself; omit them"
        )
    unused = sorted(sizes.keys() - found.variables) if found.variables is not None else []
    if unused:
        raise TargetError(f"--set {unused[0]} is not used: {options.target} has no such parameter")
    job: Callable[..., Any] = found.found
    return job


def _text(planned: Plan | GenerationPlan, options: Namespace) -> str:
    """Return the plan in the format that is asked for, or that the suffix of --output names."""
    match options.format:
        case "json":
            return planned.to_json(indent=2)
        case "html":
            return plan_page.render(planned)
        case name:
            return plan_table.render(planned, table_style(name))


def _build(
    options: Namespace, built: list[Inputs], notify: Callable[[str], None], **sizes: Any
) -> tuple[Any, dict[str, Any] | tuple[Any, ...]]:
    """Return the model and its inputs on the meta device; a language model gets labels.

    built: the inputs are added to it. notify: receives progress messages.
    """
    from dispatch_flops.cli.targets import parse_shape, prepare

    if sizes:
        print_progress(f"  {', '.join(f'{name}={value}' for name, value in sizes.items())}")
    prepared = prepare(
        options.target,
        shapes=[parse_shape(text) for text in options.input_shape],
        inputs=options.inputs,
        dtype=_name_of_dtype(options) if options.mesh is None else None,
        device="meta",
        variables=sizes,
        notify=notify,
    )
    model, inputs = prepared.model, prepared.inputs
    built.append(inputs)
    if inputs.args and inputs.kwargs:
        raise TargetError("plan takes positional inputs or named ones; --inputs returned both")
    if inputs.args:
        return model, inputs.args
    kwargs = dict(inputs.kwargs)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a training step keeps no keys and values
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")) and "input_ids" in kwargs:
        kwargs.setdefault("labels", kwargs["input_ids"])
    return model, kwargs
