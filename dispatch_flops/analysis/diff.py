"""Comparison of two profiles: every module by fqn, every operator by overload, and the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from dispatch_flops.analysis.figures import Figures, tree_figures
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import ModuleNode, OpTotal, Profile
from dispatch_flops.profile.cost import ZERO, Phase, check_phase
from dispatch_flops.profile.holders import check_profile

Settings = dict[str, Callable[[Profile], str]]

CONVENTIONS: Settings = {
    "causal attention": lambda profile: profile.run.causal,
    "FLOPs": lambda profile: profile.run.flops,
    "operators of tensor subclasses": lambda profile: profile.run.subclass,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One module or operator in two profiles; None where a profile lacks it.

    calls_before, calls_after: of an operator, or of a module's forward; None for a module in a diff
        of another phase.

    Example::

        for change in diff(before, after).changed_operators():
            print(change.name, change.calls_before, "->", change.calls_after)
    """

    name: str
    before: Figures | None
    after: Figures | None
    calls_before: int | None = 0
    calls_after: int | None = 0

    @property
    def changed(self) -> bool:
        """True if a count differs, or is a lower bound in one profile alone.

        Latencies never repeat exactly and are not compared.
        """
        if self.before is None or self.after is None or self.calls_before != self.calls_after:
            return True
        before, after = (
            (side.params, side.cost, side.lower_bound) for side in (self.before, self.after)
        )
        return before != after


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diff:
    """Two profiles side by side; ``print`` and notebooks show what changed.

    total: everything that ran. modules, operators: those of either profile; what only the
        second one has comes last. differences: a sentence for each convention of counting in which
        the runs differ, so that their counts are not comparable. phase: the one that was compared;
        None for all.

    Example::

        found = diff(before, after)
        if found.has_changed:
            print(found)  # tables of the modules and operators that changed
            print(found.total.after.cost.macs - found.total.before.cost.macs, "more MACs")
    """

    total: Change
    modules: tuple[Change, ...] = field(default=())
    operators: tuple[Change, ...] = field(default=())
    differences: tuple[str, ...] = field(default=())
    phase: Phase | None = None

    @property
    def has_changed(self) -> bool:
        """True if a module or an operator has changed."""
        return bool(self.changed_modules() or self.changed_operators())

    def __repr__(self) -> str:
        before, after = self.total.before, self.total.after
        flops = [0 if side is None else side.cost.flops for side in (before, after)]
        return (
            f"<Diff: {flops[0]} FLOPs, then {flops[1]}; changed modules: "
            f"{len(self.changed_modules())}, operators: {len(self.changed_operators())}>"
        )

    def __str__(self) -> str:
        """Return the conventions that differ, and the tables of what changed."""
        from dispatch_flops.renderers import diff_table  # above this room: imported when shown

        return diff_table.render(self)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows in place of the object."""
        from dispatch_flops.renderers import diff_table  # above this room: imported when shown

        return diff_table.render_html(self)

    def changed_modules(self) -> list[Change]:
        """Return the modules that have changed."""
        return [change for change in self.modules if change.changed]

    def changed_operators(self) -> list[Change]:
        """Return the operators that have changed."""
        return [change for change in self.operators if change.changed]


def diff(
    before: Profile,
    after: Profile,
    phase: Phase | None = None,
    *,
    rename: Mapping[str, str] | None = None,
    strip_prefix: str = "",
) -> Diff:
    """Return what changed from one profile to another, in one phase or in all.

    Modules are matched by fqn, after these changes of names.

    rename: ``{fqn in before: fqn in after}`` of modules that have another name; those below them
        follow.
    strip_prefix: fqn of the module, in either profile, that is the model of the other one, such as
        ``"base_model.model"`` in a model with adapters. Modules above it are part of the root.

    Example::

        for change in diff(before, after).changed_modules():
            print(change.name, change.before, change.after)

    Raises ConfigError for an argument of the wrong type, for a phase that is neither a standard one
    nor in either profile, for a renamed module that ``before`` does not have, and for a new name
    that another of its modules has.
    """
    for name, given in (("before", before), ("after", after)):
        check_profile(name, given)
    check_phase(phase, (*phases_of(before), *phases_of(after)))
    if not isinstance(rename, Mapping | None) or not all(
        isinstance(name, str) for names in (rename or {}).items() for name in names
    ):
        raise ConfigError(f"rename={rename!r:.60}: pass a dict of old and new fqns, or None")
    if not isinstance(strip_prefix, str):
        raise ConfigError(f"strip_prefix={strip_prefix!r:.60}: pass the fqn of a module")
    modules = [_modules(profile, phase) for profile in (before, after)]
    for old in rename or ():
        if not any(_is_within(fqn, old) for fqn in modules[0]):
            raise ConfigError(f"{old!r} is renamed, but is not a module of the earlier profile")
    names = Counter(_rename(fqn, rename or {}) for fqn in modules[0])
    for name, count in names.most_common(1):
        if count > 1:
            raise ConfigError(
                f"rename gives two modules of the earlier profile the name {name!r}; rename the "
                "other one, too"
            )
    modules[0] = _renamed(modules[0], lambda fqn: _rename(fqn, rename or {}))
    strip_prefix = strip_prefix.removesuffix(".")
    if strip_prefix:
        if not any(_is_within(fqn, strip_prefix) for side in modules for fqn in side):
            raise ConfigError(
                f"{strip_prefix!r} is to be left out, but is not a module of either profile"
            )
        modules = [_renamed(side, lambda fqn: _strip(fqn, strip_prefix)) for side in modules]
    return Diff(
        total=_changes(_whole(before, phase), _whole(after, phase))[0],
        modules=_changes(*modules),
        operators=_changes(_operators(before, phase), _operators(after, phase)),
        differences=tuple(differences(before, after, CONVENTIONS)),
        phase=phase,
    )


def differences(before: Profile, after: Profile, settings: Settings) -> Iterator[str]:
    """Yield a sentence for each of the settings in which the runs differ."""
    for setting, value_of in settings.items():
        first, second = value_of(before), value_of(after)
        if first != second:
            yield f"The runs differ in {setting}: {first}, then {second}."


_Side = dict[str, tuple[Figures, int | None]]


def _renamed(side: _Side, new_name: Callable[[str], str]) -> _Side:
    """Return the modules under other names; of several with one name, the outermost remains."""
    renamed: _Side = {}
    for fqn, found in side.items():  # parents come first
        renamed.setdefault(new_name(fqn), found)
    return renamed


def _is_within(fqn: str, module: str) -> bool:
    return f"{fqn}.".startswith(f"{module}.")


def _rename(fqn: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if _is_within(fqn, old):
            return new + fqn[len(old) :]
    return fqn


def _strip(fqn: str, prefix: str) -> str:
    if f"{prefix}.".startswith(f"{fqn}."):
        return ""
    return fqn.removeprefix(f"{prefix}.")


def _changes(before: _Side, after: _Side) -> tuple[Change, ...]:
    nothing = (None, 0)
    changes = []
    for name in dict.fromkeys((*before, *after)):
        (a, calls_a), (b, calls_b) = before.get(name, nothing), after.get(name, nothing)
        changes.append(
            Change(name=name, before=a, after=b, calls_before=calls_a, calls_after=calls_b)
        )
    return tuple(changes)


def _whole(profile: Profile, phase: Phase | None) -> _Side:
    roots = (profile.root, profile.outside)
    model, outside = (tree_figures(root, phase)[root.fqn] for root in roots)
    return {"": (model + outside, _calls(profile.root, phase))}


def _modules(profile: Profile, phase: Phase | None) -> _Side:
    figures = tree_figures(profile.root, phase) | tree_figures(profile.outside, phase)
    return {node.fqn: (figures[node.fqn], _calls(node, phase)) for node in profile.nodes()}


def _calls(node: ModuleNode, phase: Phase | None) -> int | None:
    return node.calls if phase in (None, "forward") else None


def _operators(profile: Profile, phase: Phase | None) -> _Side:
    return {
        name: (
            Figures(
                modules=0,
                cost=op.cost or ZERO,
                latency_s=op.latency_s,
                lower_bound=bool(op.uncounted),
            ),
            op.calls,
        )
        for name, op in _by_operator(profile, phase).items()
    }


def _by_operator(profile: Profile, phase: Phase | None) -> dict[str, OpTotal]:
    is_absent = phase is not None and phase not in phases_of(profile)
    return {} if is_absent else profile.by_operator(phase)
