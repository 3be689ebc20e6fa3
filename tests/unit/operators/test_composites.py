"""Which operators are decomposed, and which are counted whole."""

from __future__ import annotations

import pytest
import torch
from torch._ops import OpOverload

from dispatch_flops import _torch
from dispatch_flops.cli.ops import coverage
from dispatch_flops.operators import composites
from dispatch_flops.operators.composites import is_composite, taken_apart_of
from tests.helpers.interpreters import run_python
from tests.helpers.profiling import profile_of

aten = torch.ops.aten
X = torch.ones(2, 6, 5, 7)

# Operators that can be decomposed, and have a kernel of their own for CPU, CUDA or both.
WITH_KERNEL = {
    "aten.mish_backward.default": lambda: aten.mish_backward(X, X),
    "aten.silu_backward.default": lambda: aten.silu_backward(X, X),
    "aten.native_channel_shuffle.default": lambda: aten.native_channel_shuffle(X, 3),
}


def overload(name: str) -> OpOverload:
    _, packet, overload_name = name.split(".")
    found: OpOverload = getattr(getattr(aten, packet), overload_name)
    return found


@pytest.mark.parametrize("name", WITH_KERNEL)
def test_is_composite_of_a_decomposable_operator_with_a_kernel_is_false(name: str) -> None:
    assert overload(name)._can_decompose()
    assert not is_composite(overload(name))


@pytest.mark.parametrize("name", WITH_KERNEL)
def test_coverage_and_counter_agree_on_a_decomposable_operator_with_a_kernel(name: str) -> None:
    kinds, _ = coverage()
    assert any(name in overloads for overloads in kinds.values())
    assert list(profile_of(WITH_KERNEL[name]).by_operator()) == [name]


def test_is_composite_of_an_operator_without_a_kernel_is_true() -> None:
    assert is_composite(aten.matmul.default)


@pytest.mark.parametrize("op", [aten.mm.default, aten.sym_size.default], ids=str)
def test_is_composite_of_an_operator_that_cannot_be_decomposed_is_false(op: OpOverload) -> None:
    assert not is_composite(op)


@pytest.mark.parametrize("inference", [False, True])
def test_composite_of_a_users_library_is_decomposed(inference: bool) -> None:
    with torch.library._scoped_library("dispatch_flops_composites", "FRAGMENT") as library:
        library.define("cube(Tensor x) -> Tensor")
        library.impl("cube", lambda x: x @ x @ x, "CompositeImplicitAutograd")
        with torch.inference_mode(inference):
            profile = profile_of(torch.ops.dispatch_flops_composites.cube, torch.ones(5, 5))
    assert profile.total().macs == 2 * 5 * 5 * 5
    assert profile.uncounted_ops() == {}


def test_operators_that_are_not_asked_are_taken_apart_by_no_autograd_kernel() -> None:
    """``operators_of_extensions`` skips these libraries, which every counter would ask."""
    asked = 0
    for name in _torch.all_operator_names():
        library, _, rest = name.partition("::")
        if library in composites._NEVER_TAKEN_APART:
            packet, _, overload_name = rest.partition(".")
            op = getattr(getattr(torch.ops, library), packet)
            found = getattr(op, overload_name or "default", None)
            assert found is None or not composites.is_taken_apart(found), name
            assert found is None or not composites.may_bypass_device_kernel(found), name
            asked += 1
    assert asked


@pytest.mark.parametrize("name", ["atenx", "profiler", "quantization"])
def test_operator_of_a_programs_library_named_like_one_of_torchs_is_an_extensions(
    name: str,
) -> None:
    before = composites.operators_of_extensions()  # of a test that compiled C++, for one
    with torch.library._scoped_library(name, "FRAGMENT") as library:
        library.define("dispatch_flops_own(Tensor x) -> Tensor")
        library.impl("dispatch_flops_own", torch.clone, "CPU")
        library.impl("dispatch_flops_own", torch.detach, "Autograd")
        op = getattr(torch.ops, name).dispatch_flops_own
        assert {*composites.operators_of_extensions()} - {*before} == {op.default}


MODULES_WITH_LIBRARIES = [
    "torch.ao.quantization.fx._decomposed",
    "torch.distributed._functional_collectives",
    "torch.distributed.tensor",
    "torch.nn.attention.varlen",
]


@pytest.mark.slow
def test_libraries_that_torch_ships_are_not_extensions() -> None:
    """A kernel for each of their operators would be registered whenever a counter is entered."""
    program = f"""
import importlib, warnings
warnings.simplefilter("ignore")
for name in {MODULES_WITH_LIBRARIES}:
    importlib.import_module(name)
from dispatch_flops.operators.composites import operators_of_extensions
print(*operators_of_extensions())
"""
    done = run_python("-c", program)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "_flash_attention_forward"])
def test_operator_of_torch_that_no_device_here_has_is_not_taken_apart(name: str) -> None:
    """``aten.mm.dtype`` runs on CUDA alone; without it, it has a kernel of autograd only."""
    assert not taken_apart_of([getattr(torch.ops.aten, name)])
