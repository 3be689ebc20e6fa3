"""The command ``diff``: what changed between two saved profiles."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

from dispatch_flops.analysis.diff import Settings, diff, differences
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.cli.arguments import (
    DEPTH_HELP,
    Commands,
    add_command,
    add_phase_option,
    add_table_options,
    natural,
)
from dispatch_flops.cli.exit_codes import CHECK_FAILED, OK
from dispatch_flops.cli.formats import table_style
from dispatch_flops.cli.output import emit
from dispatch_flops.cli.show import load_profile
from dispatch_flops.errors import TargetError
from dispatch_flops.profile import Profile
from dispatch_flops.renderers import View, diff_table
from dispatch_flops.renderers.memory_table import marked_bytes
from dispatch_flops.renderers.run_facts import inputs_text, mode_text
from dispatch_flops.units import change_text

_EPILOG = """\
Modules are matched by name, operators by overload. Only those that changed are listed.
A latency is shown if one was measured; a different latency alone is not a change.

examples:
  dispatch-flops diff before.json after.json
  dispatch-flops diff small.json large.json --all --depth 2 --format markdown
  dispatch-flops diff base.json lora.json --strip-prefix base_model.model
  dispatch-flops diff expected.json now.json --exit-code    # exits with 1 if a count changed
"""


def add_diff(commands: Commands) -> None:
    parser = add_command(commands, "diff", "compare two saved profiles", _EPILOG)
    parser.add_argument("before", metavar="BEFORE", help="the earlier profile, saved as JSON")
    parser.add_argument("after", metavar="AFTER", help="the later profile, saved as JSON")
    parser.add_argument(
        "--all", action="store_true", help="also list modules and operators without a change"
    )
    parser.add_argument("--depth", type=natural, metavar="N", help=DEPTH_HELP)
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="match the module OLD of BEFORE, and those below it, with NEW of AFTER; repeatable",
    )
    parser.add_argument(
        "--strip-prefix",
        default="",
        metavar="NAME",
        help="leave out the beginning NAME of module names, such as base_model.model of adapters",
    )
    add_table_options(parser, "table", "markdown")
    parser.add_argument(
        "--exit-code", action="store_true", help="exit with 1 if a count changed, else with 0"
    )
    add_phase_option(parser)
    parser.set_defaults(run=run_diff)


def run_diff(options: Namespace) -> int:
    before, after = load_profile(options.before), load_profile(options.after)
    compared = diff(
        before,
        after,
        options.phase,
        rename=_parse_renames(options.rename),
        strip_prefix=options.strip_prefix,
    )
    style = table_style(options.format)
    parts = [
        *_run_differences(before, after),
        *_memory_change(before, after),
        diff_table.render(compared, View(depth=options.depth, style=style), is_all=options.all),
    ]
    emit("\n\n".join(parts), options.output)
    return CHECK_FAILED if compared.has_changed and options.exit_code else OK


def _parse_renames(texts: Sequence[str]) -> dict[str, str]:
    """Parse ``["encoder=body"]`` as ``{"encoder": "body"}``."""
    renames: dict[str, str] = {}
    for text in texts:
        old, equals, new = text.partition("=")
        if not (old and equals and new):
            raise TargetError(f"--rename {text!r} is not a pair of names; write OLD=NEW")
        if old in renames:
            raise TargetError(f"--rename {old} is given twice; give it once")
        renames[old] = new
    return renames


def _memory_change(before: Profile, after: Profile) -> Iterator[str]:
    """Yield a sentence on the peaks of memory, if both runs followed it."""
    if before.memory is not None and after.memory is not None:
        first, second = before.memory.peak_bytes, after.memory.peak_bytes
        texts = [
            marked_bytes(memory.peak_bytes, memory) for memory in (before.memory, after.memory)
        ]
        change = f", then {texts[1]} ({change_text(first, second)})" if first != second else ""
        yield f"Peak memory: {texts[0]}{change}."


_SETTINGS: Settings = {
    "phases": lambda profile: " + ".join(phases_of(profile)) or "none",
    "device": lambda profile: profile.run.device,
    "target of attention without data": lambda profile: profile.run.target,
}


def _run_differences(before: Profile, after: Profile) -> Iterator[str]:
    """Yield a sentence for each setting in which the runs differ; a Diff says the conventions."""
    yield from differences(before, after, _SETTINGS)
    one, other = before.run, after.run
    if None not in (one.inputs, other.inputs) and one.inputs != other.inputs:
        yield f"The runs differ in inputs: {inputs_text(one)}, then {inputs_text(other)}."
    if None not in (one.grad_mode, other.grad_mode) and mode_text(one) != mode_text(other):
        yield f"The runs differ in mode: {mode_text(one)}, then {mode_text(other)}."
