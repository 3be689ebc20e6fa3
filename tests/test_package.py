"""What importing the package does, each in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dispatch_flops
from dispatch_flops import OpCost, Profile
from dispatch_flops.tree import ModuleNode, OpTotal


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_public_name_is_there() -> None:
    for name in dispatch_flops.__all__:
        assert getattr(dispatch_flops, name) is not None
    assert set(dispatch_flops.__all__) <= set(dir(dispatch_flops))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(dispatch_flops, "FlopCounter")


def test_a_profile_is_read_and_rendered_without_torch() -> None:
    code = """
import sys

import pytest
sys.modules["torch"] = None
from dispatch_flops import Profile, diff
from dispatch_flops.renderers import deepspeed
from dispatch_flops.tree import ModuleNode
profile = Profile.from_json(Profile(root=ModuleNode(fqn="", class_name="Net")).to_json())
print(deepspeed.render(profile).splitlines()[1])
"""
    assert python(code) == "Profile Summary at step 1:"


def _matmuls(macs: int) -> Profile:
    """A model that is one matmul."""
    cost = OpCost(macs=macs, flops=2 * macs)
    op = OpTotal(op="aten.mm.default", phase="forward", calls=1, cost=cost)
    return Profile(root=ModuleNode(fqn="", class_name="Net", calls=1, ops=(op,)))


def test_a_profile_is_asked_what_changed() -> None:
    before, after = _matmuls(3 * 5 * 7), _matmuls(3 * 5 * 11)
    compared = before.diff(after)  # type: ignore[attr-defined]
    assert compared == dispatch_flops.diff(before, after)
    change = compared.total
    assert (change.before.cost.macs, change.after.cost.macs) == (3 * 5 * 7, 3 * 5 * 11)
    backward = before.diff(after, "backward")  # type: ignore[attr-defined]
    assert (backward.total.after.cost.macs, backward.changed_modules()) == (0, [])
    assert dispatch_flops.tree.Profile.diff.__doc__.startswith("What changed")


def test_registering_first_of_all_meets_the_formulas_that_ship() -> None:
    code = """
import torch
from dispatch_flops import register_flops
from dispatch_flops.errors import DuplicateFormulaError
try:
    register_flops(torch.ops.aten.mm)(lambda *a, out, **k: 1)
except DuplicateFormulaError:
    print("refused")
"""
    assert python(code) == "refused"


def test_counting_does_not_import_dynamo() -> None:
    code = """
import sys

import pytest
import torch
from dispatch_flops import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    torch.mm(torch.ones(2, 3), torch.ones(3, 5))
print(counter.get_total_macs(), "torch._dynamo" in sys.modules)
"""
    assert python(code) == f"{2 * 3 * 5} False"


@pytest.mark.parametrize(
    "entrance",
    ["dispatch_flops.compile", "dispatch_flops.counter", "dispatch_flops.profiler"],
)
def test_every_way_in_knows_the_formulas(entrance: str) -> None:
    code = f"import {entrance}; from dispatch_flops import registry; print(len(registry.rules()))"
    assert int(python(code)) > 1000
