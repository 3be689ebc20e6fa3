"""Collapsed stacks for flame-graph tools: one ``frame;frame;frame value`` per line."""

from __future__ import annotations

from collections.abc import Iterator

from dispatch_flops.analysis.figures import Figures, Key, own_tree_figures
from dispatch_flops.profile import ModuleNode, OpTotal, Profile
from dispatch_flops.renderers.text import one_line
from dispatch_flops.renderers.view import View

__all__ = ["render"]

_NANOSECONDS = 1_000_000_000


def render(profile: Profile, view: View | None = None) -> str:
    """Return the stacks of modules, weighted by exclusive figures; zero weights are omitted.

    view: ``phase`` and ``by`` (default "flops"). Stacks by "macs", "flops" and "bytes" end in an
        operator, those by "params" and "latency" (nanoseconds) in a module.

    Example::

        # then: flamegraph.pl stacks.txt > flames.svg, or drop the file on speedscope.app
        Path("stacks.txt").write_text(collapsed.render(profile, View(phase="backward", by="macs")))
    """
    view = view or View()
    by, phase = view.by or "flops", view.phase
    profile.total(phase)  # raises for what is not a phase
    lines = []
    for root in (profile.root, profile.outside):
        figures = own_tree_figures(root, phase)
        for stack, node in _stacks(root):
            value = figures[node.fqn].value(by) or 0
            if by in ("params", "latency"):
                weights = [("", round(value * _NANOSECONDS) if by == "latency" else int(value))]
            else:
                weights = [
                    (f";{_frame(op.op)}", _weight(op, by))
                    for op in node.ops
                    if phase is None or op.phase == phase
                ]
            lines += [f"{stack}{op} {weight}\n" for op, weight in weights if weight]
    return "".join(lines)


def _stacks(root: ModuleNode) -> Iterator[tuple[str, ModuleNode]]:
    pending = [("", root)]
    while pending:
        above, node = pending.pop()
        label = f"{node.name}:{node.class_name}" if above else node.class_name
        stack = f"{above};{_frame(label)}" if above else _frame(label)
        yield stack, node
        pending.extend((stack, child) for child in reversed(node.children))


def _frame(name: str) -> str:
    return one_line(name).replace(";", ",") or "?"


def _weight(op: OpTotal, by: Key) -> int:
    return 0 if op.cost is None else int(Figures(cost=op.cost).value(by) or 0)
