"""Importing the counter loads what every run needs, and looks up no operator for its formula."""

from __future__ import annotations

import json
from typing import Any

from tests.helpers.interpreters import run_python

_SCRIPT = """
import json, sys, torch
before = set(vars(torch.ops.aten))
from dispatch_flops import FlopCounterMode
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("dispatch_flops.")}
print(json.dumps({"rooms": sorted(rooms), "operators": len(set(vars(torch.ops.aten)) - before)}))
"""


def imported() -> dict[str, Any]:
    done = run_python("-c", _SCRIPT)
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_rooms_that_few_runs_need_are_imported_when_they_are_used() -> None:
    unneeded = {"memory", "renderers", "compile", "distributed", "planning", "integrations", "cli"}
    assert unneeded.isdisjoint(imported()["rooms"])


def test_counting_without_a_printout_takes_no_tables_along() -> None:
    script = """
import sys, torch
from dispatch_flops import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    torch.ones(3) * 2
assert counter.get_total_flops() == 3
assert "tabulate" not in sys.modules
"""
    assert run_python("-c", script).stderr == ""


def test_formulas_are_registered_by_the_names_of_their_operators() -> None:
    # Hundreds of formulas ship: each look-up of a packet takes longer than registering its rule.
    assert imported()["operators"] < 10
