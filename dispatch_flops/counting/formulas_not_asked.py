"""Formulas that are not asked, because what they belong to is counted by its operators instead."""

from __future__ import annotations

import warnings

from dispatch_flops import _torch
from dispatch_flops.errors import UncountedWarning
from dispatch_flops.operators.program_lines import stacklevel_of_program

INLINED = (
    "the call was traced into a graph, as by torch.fx. Register formulas of the operators "
    "that it runs"
)
_IN_VMAP = "the call is on a sample of torch.vmap. Register formulas of the operators that it runs"
_WITH_TANGENTS = (
    "the call is in forward-mode autograd (torch.func.jvp), which computes tangents too"
)


class FormulasNotAsked:
    """Module classes and composite operators whose formula was not asked, with a warning of each.

    problems: ``{name of the class or operator: why}``.
    """

    def __init__(self) -> None:
        self.problems: dict[str, str] = {}

    def add(self, name: str, problem: str) -> None:
        """Note that a formula is not asked; warn once of each name, at the program's own line."""
        if name not in self.problems:
            self.problems[name] = problem
            text = f"the operators of {name} are counted; its formula is not asked: {problem}"
            warnings.warn(text, UncountedWarning, stacklevel=stacklevel_of_program())

    def notes(self) -> list[str]:
        """Return a note for the profile on each."""
        return [note_on(name, problem) for name, problem in self.problems.items()]


def note_on(name: str, problem: str) -> str:
    """Return the note for a profile on a formula that is not asked."""
    return f"{name}: its operators are counted; its formula is not asked: {problem}"


def problem_in(operator: str) -> str:
    """Return why a formula is not asked for a call in a function of a higher-order operator."""
    return f"the call is in {operator}. Register formulas of the operators that it runs"


def problem_of_call() -> str | None:
    """Return why the formula is not asked for a call that starts now; None if it is.

    In vmap it would be given the shapes of one sample. It states no cost of tangents.
    """
    if _torch.is_in_vmap():
        return _IN_VMAP
    return _WITH_TANGENTS if _torch.is_in_forward_mode() else None
