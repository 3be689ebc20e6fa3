"""The third of DeepSpeed's three parts: the module tree with each module's own numbers."""

from __future__ import annotations

from collections.abc import Iterator

from dispatch_flops.analysis.figures import Figures, inclusive
from dispatch_flops.analysis.folding import fold
from dispatch_flops.analysis.latency import inexact_latencies
from dispatch_flops.profile import ModuleNode, Profile
from dispatch_flops.renderers.deepspeed.units import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    params_to_string,
)
from dispatch_flops.renderers.text import about, at_least, one_line
from dispatch_flops.renderers.view import View
from dispatch_flops.units import NOT_AVAILABLE, Number, ratio

_LEGEND = (
    "Each module profile is listed after its name in the following order: \n"
    "params, percentage of total params, MACs, percentage of total MACs, fwd latency, "
    "percentage of total fwd latency, fwd FLOPS\n"
    "\n"
    "Note: 1. A module can have torch.nn.module or torch.nn.functional to compute logits "
    "(e.g. CrossEntropyLoss). They are not counted as submodules, thus not to be printed out. "
    "However they make up the difference between a parent's MACs (or latency) and the sum of "
    "its submodules'.\n"
    "2. Number of floating-point operations is a theoretical estimation, thus FLOPS computed "
    "using that could be larger than the maximum system throughput.\n"
    "3. The fwd latency listed in the top module's profile is directly captured at the module "
    "forward function in PyTorch, thus it's less than the fwd latency shown above which is "
    "captured in DeepSpeed.\n"
)


def render(profile: Profile, view: View | None = None) -> str:
    """Return the module tree with the numbers of the forward pass.

    Every module shows its numbers and its ``extra_repr``, even if it has a ``__repr__`` of its own.

    view: ``depth`` and ``fold``.
    """
    view = view or View()
    root = fold(profile.root) if view.fold else profile.root
    inexact = inexact_latencies(root, profile.timing)
    return "\n".join((_LEGEND, *_tree(root, view.depth, inexact)))


def _tree(root: ModuleNode, max_depth: int | None, inexact: frozenset[str]) -> Iterator[str]:
    figures = inclusive(root, "forward")
    whole = figures[root.fqn]
    stack: list[tuple[ModuleNode | None, int]] = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        indent = "  " * depth
        if node is None:
            yield f"{indent})"
            continue
        numbers = ", ".join(_numbers(node, figures[node.fqn], whole, node.fqn in inexact))
        name = f"({one_line(node.name)}): " if depth else ""
        opening = f"{indent}{name}{one_line(node.class_name)}("
        if not node.children:
            yield f"{opening}{numbers})"
        elif depth == max_depth:
            yield f"{opening}{numbers}, ...)"
        else:
            yield opening
            yield f"{indent}  {numbers}"
            stack.append((None, depth))
            stack.extend((child, depth + 1) for child in reversed(node.children))


def _numbers(node: ModuleNode, own: Figures, whole: Figures, inexact: bool) -> Iterator[str]:
    params = params_to_string(own.params)
    macs = at_least(macs_to_string(own.cost.macs), own.lower_bound)
    yield f"{params} = {_percent(own.params, whole.params)} Params"
    yield f"{macs} = {_percent(own.cost.macs, whole.cost.macs)} MACs"
    latency = about(duration_to_string(own.latency_s), inexact)
    yield f"{latency} = {_percent(own.latency_s, whole.latency_s)} latency"
    yield at_least(flops_to_string(own.flops_per_s), own.lower_bound)
    extra = one_line(node.extra_repr)
    if extra:
        yield extra


def _percent(part: Number | None, whole: Number | None) -> str:
    share = ratio(part, whole)
    return NOT_AVAILABLE if share is None else f"{round(100 * share, 2):g}%"
