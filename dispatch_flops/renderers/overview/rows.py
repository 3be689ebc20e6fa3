"""Rows of the module tree: one per module, or two for a run of identical siblings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dispatch_flops.analysis.figures import Figures, Key, inclusive
from dispatch_flops.analysis.folding import runs_of_siblings
from dispatch_flops.profile import ModuleNode, sum_known
from dispatch_flops.renderers.run_facts import shape_text


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the tree.

    level: 0 for the model. label: the name below its parent; the class for the model.
    class_name: "12 x BertLayer" for a run of siblings.
    node: the module, or the first one of a run.
    figures: of the module or of the whole run. Below a run they are of one member, whose
        latency is the mean of all members.
    is_run: whether the row stands for several siblings.
    fqns: of all modules that the row stands for, in all of its equal ``copies`` in the tree.
    """

    level: int
    label: str
    class_name: str
    node: ModuleNode
    figures: Figures
    is_run: bool = False
    fqns: tuple[str, ...] = ()
    copies: int = 1

    @property
    def calls(self) -> int:
        """Calls of the module, or of the whole run."""
        return self.node.calls * self.figures.modules


def output_text(row: Row) -> str:
    """Return the shape of the first output, and how many more tensors there are."""
    shapes = row.node.output_shapes
    if not shapes or row.is_run:
        return ""
    more = f" +{len(shapes) - 1}" if len(shapes) > 1 else ""
    return f"{shape_text(shapes[0])}{more}"


@dataclass(frozen=True, slots=True)
class _Group:
    """Modules of equal cost that one row stands for; the tree has ``copies`` such groups."""

    nodes: tuple[ModuleNode, ...]
    copies: int
    level: int
    label: str

    @property
    def first(self) -> ModuleNode:
        return self.nodes[0]

    @property
    def size(self) -> int:
        return len(self.nodes) // self.copies


def module_rows(
    root: ModuleNode, *, depth: int | None = None, sort: Key | None = None, fold: bool = True
) -> Iterator[Row]:
    """Yield the rows of a tree, parents first.

    A run of identical numbered siblings has a row with the sum, and below it a row "each" with
    the figures of one, which the rows of its children follow. A container that is never called
    and holds a single run shares its row: "layer.0-11".

    depth: deepest level of rows; None for all. sort: the figure that siblings are sorted by, the
        largest first; None keeps the model's order. fold: whether siblings share rows.
    """
    tree = _Tree(root, fold=fold)
    stack = [_Group((root,), 1, 0, root.class_name)]
    while stack:
        group = stack.pop()
        yield tree.row(group)
        if depth is None or group.level < depth:
            below = list(tree.below(group))
            if sort is not None and group.size == 1:
                below.sort(key=lambda part: tree.figures(part).value(sort) or 0, reverse=True)
            stack.extend(reversed(below))


class _Tree:
    def __init__(self, root: ModuleNode, *, fold: bool) -> None:
        self._figures = inclusive(root)
        self._most_params = {
            c.fqn: node.total_params for node in root.walk() for c in node.children
        }
        self._runs = runs_of_siblings(root) if fold else {}

    def row(self, group: _Group) -> Row:
        is_run = group.size > 1
        kind = group.first.class_name
        return Row(
            level=group.level,
            label=group.label,
            class_name=f"{group.size} x {kind}" if is_run else kind,
            node=group.first,
            figures=self.figures(group),
            is_run=is_run,
            fqns=tuple(node.fqn for node in group.nodes),
            copies=group.copies,
        )

    def figures(self, group: _Group) -> Figures:
        """Return the figures of one run out of the equal ones; its latency is their mean.

        Parameters that the modules of the run share count once: they are at most the parent's.
        """
        whole = self._figures[group.first.fqn]
        params = whole.params * group.size
        latency_s = sum_known(self._figures[node.fqn].latency_s for node in group.nodes)
        return Figures(
            modules=group.size,
            params=min(params, self._most_params.get(group.first.fqn, params)),
            cost=whole.cost * group.size,
            latency_s=None if latency_s is None else latency_s / group.copies,
            lower_bound=whole.lower_bound,
        )

    def below(self, group: _Group) -> Iterator[_Group]:
        """Yield what is one level below: one member of a run, or a module's children."""
        if group.size > 1:
            yield _Group(group.nodes, len(group.nodes), group.level + 1, "each")
            return
        start = 0
        for run in self._runs_below(group.first):
            members = range(start, start + len(run))
            nodes = tuple(node.children[i] for node in group.nodes for i in members)
            yield self._joined(_Group(nodes, group.copies, group.level + 1, _name_of(run)))
            start += len(run)

    def _runs_below(self, node: ModuleNode) -> Sequence[Sequence[ModuleNode]]:
        return self._runs.get(node.fqn) or [(child,) for child in node.children]

    def _joined(self, group: _Group) -> _Group:
        """Return a container that only holds one run of modules, and that run, as one group."""
        node = group.first
        runs = self._runs_below(node)
        if group.size > 1 or node.calls or node.ops or node.own_params or len(runs) != 1:
            return group
        nodes = tuple(child for holder in group.nodes for child in holder.children)
        label = f"{group.label}.{_name_of(runs[0])}"
        return self._joined(_Group(nodes, group.copies, group.level, label))


def _name_of(run: Sequence[ModuleNode]) -> str:
    first, last = (node.name or node.fqn or node.class_name for node in (run[0], run[-1]))
    return first if len(run) == 1 else f"{first}-{last}"
