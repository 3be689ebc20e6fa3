"""Figures of modules: parameters, cost and latency, by module, depth, class and rank.

*Inclusive* figures are of a module and all below it, *exclusive* ones of the module alone. The
exclusive figures of all modules add up to the total.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import ModuleNode, Profile, sum_known
from dispatch_flops.profile.cost import ZERO, OpCost, Phase
from dispatch_flops.profile.tree import cost_in, own_cost_in
from dispatch_flops.units import ratio

Key = Literal["params", "macs", "flops", "bytes", "latency"]
"""Name of a figure of a module; "latency" is in seconds."""

COSTS: tuple[Key, ...] = ("macs", "flops", "bytes")  # what an operator without a cost leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Parameters, cost and latency of a module, or of several; figures add.

    modules: number of modules that the figures are of.
    latency_s: seconds in the phase that was asked for, in forward where no phase was; None
        where not measured.
    lower_bound: True if an operator of theirs has no known cost.

    Example::

        layers = inclusive(profile.root)
        pair = layers["0"] + layers["2"]
        print(pair.modules, pair.params, pair.cost.macs, pair.value("latency"))
    """

    modules: int = 1
    params: int = 0
    cost: OpCost = ZERO
    latency_s: float | None = None
    lower_bound: bool = False

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            modules=self.modules + other.modules,
            params=self.params + other.params,
            cost=self.cost + other.cost,
            latency_s=sum_known((self.latency_s, other.latency_s)),
            lower_bound=self.lower_bound or other.lower_bound,
        )

    def value(self, key: Key) -> int | float | None:
        """Return the figure named ``key``; raises ConfigError on an unknown name."""
        match key:
            case "params":
                return self.params
            case "macs":
                return self.cost.macs
            case "flops":
                return self.cost.flops
            case "bytes":
                return self.cost.bytes_total
            case "latency":
                return self.latency_s
            case _:
                keys = ", ".join(map(repr, get_args(Key)))
                raise ConfigError(f"{key!r:.60} is not a figure of a module; choose one of {keys}")

    @property
    def flops_per_s(self) -> float | None:
        """FLOPs over latency; meaningful where both are of the same phase."""
        return ratio(self.cost.flops, self.latency_s)


def walk_with_depth(root: ModuleNode) -> Iterator[tuple[ModuleNode, int]]:
    """Yield every node with its depth (0 for the root), parents first, without recursion.

    Example::

        for node, depth in walk_with_depth(profile.root):
            print("  " * depth + node.class_name, node.total_params)
    """
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        stack.extend((child, depth + 1) for child in reversed(node.children))


def inclusive(root: ModuleNode, phase: Phase | None = None) -> dict[str, Figures]:
    """Return ``{fqn: figures}`` of each module and all below it, parents first.

    Where a module's latency was not measured, as for a container that is never called, it is
    the sum of its children's.

    Example::

        for fqn, figures in inclusive(profile.root, "backward").items():
            print(fqn or "model", figures.cost.flops)
    """
    root.total(phase)
    return tree_figures(root, phase)


def tree_figures(root: ModuleNode, phase: Phase | None) -> dict[str, Figures]:
    """Return what ``inclusive`` does, for a phase that may occur in other trees only."""
    # A printout asks several times, and a tree is frozen: it keeps what was computed.
    kept: dict[Phase | None, dict[str, Figures]] = vars(root).setdefault("_figures", {})
    if phase not in kept:
        kept[phase] = _tree_figures(root, phase)
    return kept[phase].copy()


def _tree_figures(root: ModuleNode, phase: Phase | None) -> dict[str, Figures]:
    root.total()  # computes the totals of all nodes below in one walk
    nodes = list(root.walk())
    found: dict[str, Figures] = {}
    for node in reversed(nodes):
        below = [found[child.fqn] for child in node.children]
        latency_s = node.seconds.get(phase or "forward")
        found[node.fqn] = Figures(
            params=node.total_params,
            cost=cost_in(node, phase),
            latency_s=sum_known(f.latency_s for f in below) if latency_s is None else latency_s,
            lower_bound=_lacks_cost(node, phase) or any(f.lower_bound for f in below),
        )
    return {node.fqn: found[node.fqn] for node in nodes}


def exclusive(root: ModuleNode, phase: Phase | None = None) -> dict[str, Figures]:
    """Return ``{fqn: figures}`` of each module without what is below it, parents first.

    The exclusive latency is the module's less its children's, and at least 0.

    Example::

        own = exclusive(profile.root, "forward")
        added = sum(figures.cost.macs for figures in own.values())
        print(added == profile.root.total("forward").macs)  # prints True
    """
    root.total(phase)
    return own_tree_figures(root, phase)


def own_tree_figures(root: ModuleNode, phase: Phase | None) -> dict[str, Figures]:
    """Return what ``exclusive`` does, for a phase that may occur in other trees only."""
    whole = tree_figures(root, phase)
    return {
        node.fqn: Figures(
            params=node.own_params,
            cost=own_cost_in(node, phase),
            latency_s=_exclusive_s(
                node.seconds.get(phase or "forward"),
                (whole[child.fqn].latency_s for child in node.children),
            ),
            lower_bound=_lacks_cost(node, phase),
        )
        for node in root.walk()
    }


def total_figures(profile: Profile, phase: Phase | None = None) -> Figures:
    """Return the figures of everything that ran, model and outside.

    Example::

        step = total_figures(profile)
        print(step.params, step.cost.flops, step.cost.bytes_total, step.lower_bound)
    """
    root, outside = profile.root, profile.outside
    profile.total(phase)  # raises for what is not a phase
    return tree_figures(root, phase)[root.fqn] + tree_figures(outside, phase)[outside.fqn]


def by_depth(root: ModuleNode, phase: Phase | None = None) -> list[dict[str, Figures]]:
    """Return for each depth ``{class name: inclusive figures of its modules there}``.

    Classes are in the order of the tree; the first level is the root's. A parameter that several
    modules hold counts in each, but the sum is at most that of all modules.

    Example::

        for depth, classes in enumerate(by_depth(profile.root)):
            for name, figures in classes.items():
                print(depth, name, figures.modules, figures.cost.macs)
    """
    whole = inclusive(root, phase)
    levels: list[dict[str, Figures]] = []
    for node, depth in walk_with_depth(root):
        if depth == len(levels):
            levels.append({})
        _add_to(levels[depth], node.class_name, whole[node.fqn])
    return [
        {name: replace(f, params=min(f.params, root.total_params)) for name, f in classes.items()}
        for classes in levels
    ]


def by_type(profile: Profile, phase: Phase | None = None) -> dict[str, Figures]:
    """Return ``{class name: exclusive figures of its modules}``, most FLOPs first.

    The costs add up to the model's total. A parameter that several modules hold counts in each.

    Example::

        linear = by_type(profile)["Linear"]
        print(f"{linear.cost.flops / profile.root.total().flops:.0%} of the FLOPs in linear layers")
    """
    found: dict[str, Figures] = {}
    profile.total(phase)  # raises for what is not a phase
    own = own_tree_figures(profile.root, phase)
    for node in profile.root.walk():
        _add_to(found, node.class_name, own[node.fqn])
    return dict(top(found, "flops", len(found)))


def top(figures: dict[str, Figures], key: Key, k: int) -> list[tuple[str, Figures]]:
    """Return the ``k`` items with the most of ``key``, equal ones in their order, unknown last.

    Raises ConfigError for another ``key``, and for a ``k`` that is not an int.

    Example::

        [(class_name, figures)] = top(by_type(profile), "params", 1)
        print(class_name, figures.params)
    """

    try:
        most = max(operator.index(k), 0)
    except TypeError:
        raise ConfigError(f"k={k!r:.60}: pass how many to return, an int") from None

    def rank(item: tuple[str, Figures]) -> float:
        value = item[1].value(key)
        return -1 if value is None else value

    return sorted(figures.items(), key=rank, reverse=True)[:most]


def top_modules(
    profile: Profile, key: Key = "flops", k: int = 10, phase: Phase | None = None
) -> list[tuple[ModuleNode, Figures]]:
    """Return the ``k`` modules with the most of ``key`` of their own, without their children.

    Modules that have none of it are omitted.

    Example::

        for node, figures in top_modules(profile, "macs", 3):
            print(node.fqn, figures.cost.macs)
    """
    nodes = {node.fqn: node for node in profile.root.walk()}
    profile.total(phase)  # raises for what is not a phase
    ranked = top(own_tree_figures(profile.root, phase), key, k)
    return [(nodes[fqn], figures) for fqn, figures in ranked if figures.value(key)]


def _add_to(groups: dict[str, Figures], name: str, figures: Figures) -> None:
    groups[name] = groups[name] + figures if name in groups else figures


def _lacks_cost(node: ModuleNode, phase: Phase | None) -> bool:
    return any(op.uncounted for op in node.ops if phase is None or op.phase == phase)


def _exclusive_s(inclusive_s: float | None, children_s: Iterable[float | None]) -> float | None:
    return None if inclusive_s is None else max(0.0, inclusive_s - (sum_known(children_s) or 0.0))
