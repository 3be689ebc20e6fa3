"""Whatever takes a phase refuses what is not one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from dispatch_flops import analysis, renderers
from dispatch_flops.analysis import figures
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import Profile
from dispatch_flops.renderers import View
from tests.helpers.trees import training_step

TAKING_PHASES: list[Callable[..., Any]] = [
    function
    for name in sorted(analysis.__all__)
    if callable(function := getattr(analysis, name))
    and not isinstance(function, type)
    and "phase" in inspect.signature(function).parameters
]
OF_TREES = (figures.inclusive, figures.exclusive, figures.by_depth)


def test_some_functions_take_phases() -> None:
    assert {"by_type", "operator_rows", "top_modules"} <= {f.__name__ for f in TAKING_PHASES}


@pytest.mark.parametrize(
    "function", dict.fromkeys((*TAKING_PHASES, *OF_TREES)), ids=lambda f: f.__name__
)
def test_misspelt_phase_is_refused(function: Callable[..., Any]) -> None:
    profile = training_step()
    parameters = inspect.signature(function).parameters
    known = {"profile": profile, "before": profile, "after": profile, "machine": None,
             "root": profile.root, "node": profile.root}  # fmt: skip
    given = {name: known[name] for name in parameters if name in known}
    function(**given, phase="forward")
    with pytest.raises(ConfigError, match="'forwrd' is not a phase; choose one of forward, "):
        function(**given, phase="forwrd")


def test_view_of_a_misspelt_phase_is_refused() -> None:
    profile: Profile = training_step()
    with pytest.raises(ConfigError, match="'forwrd' is not a phase"):
        renderers.collapsed.render(profile, View(phase="forwrd"))  # type: ignore[arg-type]
