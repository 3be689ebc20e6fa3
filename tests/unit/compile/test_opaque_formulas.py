"""Which formulas of module classes are asked in compiled code, and what says why others are not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops import OpCost, Profile, overridden, register_flops, unregister_flops
from dispatch_flops.compile import CountingBackend, counting_backend
from dispatch_flops.errors import UncountedWarning
from tests.helpers.interpreters import run_python
from tests.helpers.opaque_blocks import (
    BLOCK,
    LINEAR,
    A,
    Block,
    Broken,
    Chain,
    H,
    I,
    block_formula,
    compile_blocks,
    five,
)

# a warning of torch.compile at graph breaks
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.mark.slow
@pytest.mark.parametrize("model", [Chain, Block])
def test_formula_is_asked_for_each_size_of_a_dynamic_graph(model: Callable[[], nn.Module]) -> None:
    mapping = {Block: block_formula}
    backend = counting_backend("aot_eager", custom_mapping=mapping)
    compiled = torch.compile(model(), backend=backend)
    calls = 3 if model is Chain else 1
    for size in (2, 3, 4, 7, 4):
        compiled(torch.ones(size, I))
        macs = calls * (1000 * size + H)
        scales = 1 + 1 + 7 if model is Chain else 1
        assert backend.step().total == OpCost(
            macs=macs,
            flops=2 * macs + scales,
            bytes_read=calls * 4 * (size * I + 2 * I * H),
            bytes_written=calls * 4 * size * I,
        )
    assert sum(not graph.is_backward for graph in backend.graphs) == 2


@pytest.mark.slow
def test_formula_is_asked_for_the_module_that_runs_a_shared_graph() -> None:
    model = nn.Sequential(Block(), Block(), Block())
    widths = {id(block): 10**i for i, block in enumerate(model)}
    backend = counting_backend(
        "aot_eager", model, custom_mapping={Block: lambda module, x, *, out: widths[id(module)]}
    )
    with torch.no_grad():
        compile_blocks(model, backend)(torch.ones(A, I))
    profile = backend.profile()
    assert len(backend.graphs) == 1
    assert [node.own().flops for node in profile.root.children] == [1, 10, 100]


def test_formula_that_raises_is_listed_and_the_program_runs() -> None:
    model = Chain()
    backend = counting_backend("aot_eager", model, custom_mapping={Block: lambda *a, **k: 1 // 0})
    x = torch.ones(A, I)
    assert torch.equal(torch.compile(model, backend=backend)(x), model(x))
    with pytest.warns(UncountedWarning, match=r"module\.Block \(3 calls; ZeroDivisionError"):
        step = backend.step()
    assert (step.uncounted, step.total.flops) == ({"module.Block": 3}, 0)


def not_asked(backend: CountingBackend, reason: str) -> Profile:
    """Check that the operators are counted, and that a warning and a note say why."""
    with pytest.warns(UncountedWarning, match=f"formula is not asked: {reason}"):
        backend.step()
    profile = backend.profile()
    assert any(reason.strip(".*") in note for note in profile.notes)
    return profile


@pytest.mark.slow
def test_formula_of_a_call_with_a_graph_break_inside_is_not_asked() -> None:
    model = nn.Sequential(Broken(), Block())
    backend = counting_backend("aot_eager", model, custom_mapping={Broken: five, Block: five})
    torch.compile(model, backend=backend)(torch.ones(A, I))
    profile = not_asked(backend, "a graph break splits the call")
    # The formula of the blocks, whose calls are whole, is asked.
    assert profile.total().macs == 2 * 5 + 5


def test_formula_of_a_call_in_cond_is_not_asked() -> None:
    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Any:
            return torch.cond(x.sum() > 0, self.block, lambda x: x + 1, (x,))

    backend = counting_backend("aot_eager", custom_mapping={Block: block_formula})
    torch.compile(Conditional(), backend=backend)(torch.ones(A, I))
    assert not_asked(backend, "the call is in cond").total().macs == 2 * LINEAR


def test_formula_of_a_call_in_vmap_is_not_asked() -> None:
    model = Block()
    backend = counting_backend("aot_eager", model, custom_mapping={Block: block_formula})
    torch.compile(torch.func.vmap(model), backend=backend)(torch.ones(7, A, I))
    assert not_asked(backend, ".*a sample of torch.vmap").total().macs == 7 * 2 * LINEAR


def test_formula_of_a_call_with_tangents_is_not_asked() -> None:
    model, x = Block(), torch.ones(A, I)
    backend = counting_backend("aot_eager", model, custom_mapping={Block: block_formula})
    torch.compile(lambda x: torch.func.jvp(model, (x,), (x,)), backend=backend)(x)
    # of the result, of the tangent, and of the weight's tangent, which is zeros
    assert not_asked(backend, ".*forward-mode autograd").total().macs == 2 * 3 * LINEAR


@pytest.mark.parametrize("model", [Block, lambda: nn.Sequential(Block())])
def test_formula_registered_after_the_call_was_compiled_is_not_asked(model: Any) -> None:
    backend = counting_backend("aot_eager")
    torch.compile(model(), backend=backend)(torch.ones(A, I))
    assert backend.step().total.macs == 2 * LINEAR
    register_flops(Block)(block_formula)
    try:
        profile = not_asked(backend, "it was registered after the call was compiled")
        assert profile.total().macs == 2 * LINEAR
    finally:
        unregister_flops(Block)


def test_operators_are_counted_where_the_formula_does_not_act_any_more() -> None:
    model = Chain()
    with overridden({Block: block_formula}):
        backend = counting_backend("aot_eager", model)
        torch.compile(model, backend=backend)(torch.ones(A, I))
        assert backend.total().macs == 3 * BLOCK
    assert backend.total().macs == 3 * 2 * LINEAR


def test_formula_of_a_model_that_is_deleted_was_asked() -> None:
    model = Chain()
    backend = counting_backend("aot_eager", model, custom_mapping={Block: block_formula})
    torch.compile(model, backend=backend)(torch.ones(A, I))
    del model
    torch._dynamo.reset()
    gc.collect()
    assert backend.total().macs == 3 * BLOCK


@pytest.mark.slow
def test_counting_backend_leaves_torch_as_it_was_when_none_is_alive() -> None:
    """In a process of its own: another test's backend may be alive."""
    code = """
import gc
import torch
from torch._dynamo.variables import UnspecializedNNModuleVariable as Variable
from dispatch_flops.compile import counting_backend

before = Variable.call_function
first, second = counting_backend("aot_eager"), counting_backend("aot_eager")
found = [Variable.call_function is before]
del first
gc.collect()
found.append(Variable.call_function is before)
del second
gc.collect()
found.append(Variable.call_function is before)
print(found)
"""
    ran = run_python("-c", code)
    assert ran.stdout.strip() == "[False, False, True]", ran.stderr
