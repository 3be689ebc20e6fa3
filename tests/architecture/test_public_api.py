"""What importing the package does, each in an interpreter of its own."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

import dispatch_flops
from dispatch_flops import distributed
from tests.helpers.interpreters import run_python


def python(code: str) -> str:
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PUBLIC = """
    CommGroup CommTotal DispatchFlopsError FlopCounterMode FlopMeter FlopsProfiler Machine
    ModuleNode OpCost OpTotal Profile Share Split StepProfiler UncountedOpsError UncountedWarning
    __version__ analysis attention_cost compile conventions counting_backend diff distributed
    errors get_model_profile integrations matmul_cost measure_machine overridden plan profile_model
    register_flops register_workspace renderers unregister_flops
""".split()


def test_public_names_are_these_alone() -> None:
    assert sorted(PUBLIC) == sorted(dispatch_flops.__all__)
    assert sorted(PUBLIC) == dir(dispatch_flops)


@pytest.mark.parametrize("module", [dispatch_flops, distributed])
def test_type_checkers_tell_a_misspelt_name(module: ModuleType) -> None:
    """They would take any name for one that a ``__getattr__`` of the module finds."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    assert "__getattr__" in vars(module)
    assert "__getattr__" not in {getattr(node, "name", "") for node in tree.body}
    blocks = {ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If)}
    assert blocks == {"TYPE_CHECKING", "not TYPE_CHECKING"}


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_public_object_shows_its_public_path(name: str) -> None:
    found = getattr(dispatch_flops, name)
    if isinstance(found, ModuleType):
        assert found.__name__ == f"dispatch_flops.{name}"
    else:
        assert found.__module__ == "dispatch_flops"


ANALYSIS = """
    Change Diff Exponent Figures Headline Key MACHINES Machine OperatorRow Roofline by_depth by_type
    compute_s cost_by_dtype diff exclusive exponent exponents fold headline hfu hfu_is_lower_bound
    inclusive inexact_latencies inexact_phases latency_of machine_of measured_seconds mfu
    mfu_is_lower_bound node_roofline operator_rows phase_seconds phases_of roofline roofline_data
    sum_known top top_modules total_figures utilisation walk_with_depth whole_latencies
    why_no_utilisation
""".split()


def test_public_names_of_analysis_are_these_alone() -> None:
    assert sorted(ANALYSIS) == sorted(dispatch_flops.analysis.__all__)


RENDERERS = """
    View chrome_trace cluster_page cluster_table collapsed communication csv dataframe deepspeed
    html memory_table notebook overview plan_page plan_table plots scalars table
""".split()


def test_public_names_of_renderers_are_these_alone() -> None:
    assert sorted(RENDERERS) == sorted(dispatch_flops.renderers.__all__)


def test_public_names_of_distributed_are_these_alone() -> None:
    assert dir(distributed) == ["ClusterProfile", "gather", "simulate"]
    for name in dir(distributed):
        assert getattr(distributed, name).__module__ == "dispatch_flops.distributed"


@pytest.mark.slow
def test_a_saved_cluster_is_read_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from dispatch_flops import ModuleNode, Profile
from dispatch_flops.distributed import ClusterProfile
cluster = ClusterProfile.merge([Profile(root=ModuleNode(fqn="", class_name="Net"))])
print(list(ClusterProfile.from_json(cluster.to_json()).ranks))
"""
    assert python(code) == "[0]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(dispatch_flops, "FlopCounter")


def test_a_profile_is_read_and_rendered_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from dispatch_flops import Profile, diff
from dispatch_flops.renderers import deepspeed
from dispatch_flops import ModuleNode
profile = Profile.from_json(Profile(root=ModuleNode(fqn="", class_name="Net")).to_json())
print(deepspeed.render(profile).splitlines()[1])
"""
    assert python(code) == "Profile Summary at step 1:"


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "entrance",
    [
        "dispatch_flops.compile",
        "dispatch_flops.profilers.counter",
        "dispatch_flops.profilers.flops_profiler",
    ],
)
def test_every_way_in_knows_the_formulas(entrance: str) -> None:
    rules = "from dispatch_flops.operators import registry; print(len(registry.rules()))"
    code = f"import {entrance}; {rules}"
    assert int(python(code)) > 1000
