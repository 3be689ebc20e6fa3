"""What importing the package does, each in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import dispatch_flops


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
sys.modules["torch"] = None
from dispatch_flops import Profile, diff
from dispatch_flops.renderers import deepspeed
from dispatch_flops.tree import ModuleNode
profile = Profile.from_json(Profile(root=ModuleNode(fqn="", class_name="Net")).to_json())
print(deepspeed.render(profile).splitlines()[1])
"""
    assert python(code) == "Profile Summary at step 1:"


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
import torch
from dispatch_flops import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    torch.mm(torch.ones(2, 3), torch.ones(3, 5))
print(counter.get_total_macs(), "torch._dynamo" in sys.modules)
"""
    assert python(code) == f"{2 * 3 * 5} False"
