"""What is shown of a profile, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dispatch_flops.analysis.figures import Key
from dispatch_flops.analysis.machines import Machine, check_machine, is_finite
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.tree import check_depth, is_int_of
from dispatch_flops.renderers.text import Style

Table = Literal["modules", "operators", "uncounted", "communication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How much of a profile is shown, and how; each ``render`` names the fields that it reads.

        table.render(profile, View(depth=2, style="markdown"))

    depth: deepest level of modules; the model is level 0, and None shows all levels.
    top: number of entries of a list: classes per level in DeepSpeed's aggregated list (default 1),
        operators in the overview (default 5), changes in a diff (default all).
    detailed: whether the module tree is shown.
    fold: whether a run of identical numbered modules is one entry, with their sums; None leaves
        the choice to the format.
    table: what the rows are.
    style: of tables.
    phase: the only phase shown; None adds up all phases.
    by: the figure that sizes are proportional to; None leaves the choice to the format.
    step: the step that the heading names; None takes ``profile.run.step``.
    recompute_fwd_factor: forward passes that DeepSpeed's estimate of the backward pass adds to 2.
    machine: whose peaks the run is compared with; None takes the profile's device, if its peaks
        are known.
    title: the title of the page; None takes the model's class.
    sort: the figure that siblings are sorted by; None keeps the model's order.
    columns: names of the columns of modules; None takes those that hold something.
    width: characters of a line; None for no limit.
    is_colored: whether text has the colours of a terminal, as ANSI escape sequences.

    Raises ConfigError for a value of the wrong type, for a width below 1, and for a depth or a
    number of entries below 0.
    """

    depth: int | None = None
    top: int | None = None
    detailed: bool = True
    fold: bool | None = None
    table: Table = "modules"
    style: Style = "plain"
    phase: Phase | None = None
    by: Key | None = None
    step: int | None = None
    recompute_fwd_factor: float = 0.0
    machine: Machine | None = None
    title: str | None = None
    sort: Key | None = None
    columns: tuple[str, ...] | None = None
    width: int | None = 100
    is_colored: bool = False

    def __post_init__(self) -> None:
        check_depth(self.depth)
        if self.top is not None and not is_int_of(0, self.top):
            raise ConfigError(f"top={self.top!r:.60}: pass an int of at least 0, or None")
        if self.width is not None and (type(self.width) is not int or self.width < 1):
            raise ConfigError(f"width={self.width!r:.60}: pass an int of at least 1, or None")
        if not isinstance(self.title, str | None):
            raise ConfigError(f"title={self.title!r:.60}: pass a text, or None")
        if self.columns is not None and not isinstance(self.columns, list | tuple):
            raise ConfigError(f"columns={self.columns!r:.60}: pass a tuple of names, or None")
        if self.table not in get_args(Table):
            raise ConfigError(f"table={self.table!r:.60}: choose one of {_listed(Table)}")
        for name, figure in (("by", self.by), ("sort", self.sort)):
            if figure not in (None, *get_args(Key)):
                raise ConfigError(f"{name}={figure!r:.60}: choose one of {_listed(Key)}, or None")
        if not isinstance(self.phase, str | None):
            raise ConfigError(f"phase={self.phase!r:.60}: pass a phase, such as 'forward', or None")
        if self.step is not None and not is_int_of(0, self.step):
            raise ConfigError(f"step={self.step!r:.60}: pass an int of at least 0, or None")
        if self.style not in get_args(Style):
            raise ConfigError(f'style={self.style!r:.60}: choose "plain" or "markdown"')
        factor = self.recompute_fwd_factor
        if not is_finite(factor) or factor < 0:
            raise ConfigError(f"recompute_fwd_factor={factor!r:.60}: pass a number of at least 0")
        check_machine(self.machine)


def _listed(choices: object) -> str:
    return ", ".join(map(repr, get_args(choices)))
