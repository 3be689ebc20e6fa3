"""Costs add, multiply and take their figures from the fields of OpCost."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dispatch_flops
from dispatch_flops.profile.cost import (
    COST_FIELDS,
    PHASES,
    ZERO,
    OpCost,
    Phase,
    Share,
    Split,
    add_costs,
    contraction,
    counts_of,
    in_order,
)
from tests.helpers.interpreters import run_python

PACKAGE = Path(dispatch_flops.__file__).parent
COST = OpCost(macs=2, flops=3, bytes_read=5, bytes_written=7)

counts = st.integers(-(10**20), 10**20)
costs = st.builds(OpCost, **dict.fromkeys(COST_FIELDS, counts))


def test_cost_plus_cost_adds_every_field() -> None:
    other = OpCost(macs=11, flops=13, bytes_read=17, bytes_written=19)
    assert COST + other == OpCost(macs=13, flops=16, bytes_read=22, bytes_written=26)


def test_sum_of_costs_needs_no_start() -> None:
    assert sum([COST, 2 * COST]) == 3 * COST


@pytest.mark.parametrize("other", [3, 0.5, None])
def test_cost_plus_anything_else_is_a_type_error(other: object) -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        COST + other  # type: ignore[operator]
    with pytest.raises(TypeError, match="unsupported operand"):
        other + COST  # type: ignore[operator]


def test_cost_times_int_multiplies_every_field() -> None:
    tripled = OpCost(macs=6, flops=9, bytes_read=15, bytes_written=21)
    assert COST * 3 == 3 * COST == tripled
    assert COST * 1 == COST
    assert COST * 0 == ZERO


def test_cost_without_bytes_has_no_arithmetic_intensity() -> None:
    assert COST.arithmetic_intensity == 3 / (5 + 7)
    assert OpCost(flops=3).arithmetic_intensity is None


@given(st.lists(costs | st.none(), max_size=5))
def test_add_costs_of_known_and_unknown_costs_is_the_sum_of_each_field(
    parts: list[OpCost | None],
) -> None:
    known = [counts_of(part) for part in parts if part is not None]
    expected = [sum(counts[i] for counts in known) for i in range(len(COST_FIELDS))]
    assert counts_of(add_costs(parts)) == tuple(expected)


def test_add_costs_of_nothing_known_is_zero() -> None:
    assert add_costs([]) is add_costs([None]) is add_costs([ZERO, None, OpCost() + OpCost()])
    assert add_costs([]) == ZERO


@given(costs, costs, st.integers(0, 9))
def test_cost_operators_agree_with_add_costs(a: OpCost, b: OpCost, times: int) -> None:
    assert a + b == b + a == add_costs([a, b])
    assert a * times == add_costs([a] * times)


@pytest.mark.parametrize("complex_numbers", [False, True])
def test_contraction_has_two_flops_per_real_mac(complex_numbers: bool) -> None:
    real = 4 * 6 if complex_numbers else 6
    cost = contraction(6, complex_numbers=complex_numbers, extra_flops=5)
    assert cost == OpCost(macs=real, flops=2 * real + 5)


def test_split_total_is_own_plus_shares() -> None:
    assert Split(own=COST, shares=(Share(cost=COST), Share(cost=COST))).total == COST * 3
    assert Split().total == ZERO


def test_in_order_puts_known_phases_first_and_others_as_they_appear() -> None:
    appeared: list[Phase | None] = ["late", "optimizer", None, "setup", "forward", "late"]  # type: ignore[list-item]
    assert in_order(appeared) == ("forward", "optimizer", "setup", "late")
    assert in_order(reversed(PHASES)) == PHASES


# -- one new figure is one new field ------------------------------------------------------------


def test_figures_of_a_cost_are_named_in_one_place() -> None:
    """Only the class, and who fills in or shows bytes as such, names the bytes of a cost."""
    naming = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "bytes_written" in path.read_text(encoding="utf-8")
    }
    formulas = {path for path in naming if path.startswith("operators/formulas/")}
    formulas.add("operators/communication.py")  # the bytes of collectives
    assert naming - formulas == {"profile/cost.py", "operators/costing.py"}


NEW_FIELD = "    comm_bytes: int = 0\n"
CHECK = """
import json
import torch
import dispatch_flops
from dispatch_flops import FlopCounterMode, OpCost, Profile, diff, register_flops
from dispatch_flops.renderers import View, csv

assert dispatch_flops.__file__.startswith({package!r})
library = torch.library.Library("one_field", "DEF")
library.define("send(Tensor x) -> Tensor")
library.impl("send", lambda x: x.clone(), "CPU")

@register_flops(torch.ops.one_field.send)
def send(x, *, out, **_):
    return OpCost(flops=5, comm_bytes=-x.numel() if x.numel() > 100 else x.numel())

class Sender(torch.nn.Module):
    def forward(self, x):
        return torch.ops.one_field.send(torch.ops.one_field.send(x))

model = torch.nn.Sequential(Sender(), Sender())
with FlopCounterMode(model, display=False) as counter:
    model(torch.ones(2, 3))
    model(torch.ones(7))
profile = counter.profile
per_sender = 2 * (2 * 3 + 7)
# recorded and summed
assert profile.total().comm_bytes == 2 * per_sender
assert profile.node("1").total("forward").comm_bytes == per_sender
assert profile.by_operator()["one_field.send.default"].cost.comm_bytes == 2 * per_sender
assert (profile.total() * 3).comm_bytes == 3 * 2 * per_sender
# saved and loaded
again = Profile.from_json(profile.to_json())
assert again == profile and again.total().comm_bytes == 2 * per_sender
assert not diff(profile, again).total.changed
# shown
header, first, *_ = csv.render(profile, View(table="operators")).splitlines()
assert first.split(",")[header.split(",").index('"comm_bytes"')] == str(per_sender)
data = json.loads(profile.to_json())
assert data["root"][1]["ops"][0]["cost"]["comm_bytes"] == per_sender
# validated
data["root"][1]["ops"][0]["cost"]["comm_bytes"] = -1
try:
    Profile.from_dict(data)
except dispatch_flops.errors.ProfileFormatError as error:
    assert "count" in str(error), error
else:
    raise AssertionError("a negative count was loaded")
with FlopCounterMode(display=False) as counter:
    torch.ops.one_field.send(torch.ones(101))
assert "counts are ints" in counter.profile.formula_errors()["one_field.send.default"]
print("done")
"""


@pytest.mark.slow
def test_new_field_of_a_cost_is_recorded_summed_saved_checked_and_shown(tmp_path: Path) -> None:
    """A copy of the package with one line more."""
    copy = tmp_path / "dispatch_flops"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    cost = copy / "profile" / "cost.py"
    source = cost.read_text(encoding="utf-8")
    changed = re.sub(r"(    bytes_written: int = 0\n)", rf"\1{NEW_FIELD}", source)
    assert changed.count(NEW_FIELD) == 1
    cost.write_text(changed, encoding="utf-8")
    done = run_python("-c", CHECK.format(package=str(tmp_path)), cwd=tmp_path)
    assert (done.stdout.strip(), done.returncode) == ("done", 0), done.stderr
