"""Module classes with a formula in compiled code, compared to eager counts and closed forms."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dispatch_flops import OpCost, Profile, overridden, register_flops, unregister_flops
from dispatch_flops.compile import CountingBackend, counting_backend
from dispatch_flops.errors import UncountedWarning
from tests.helpers.interpreters import run_python
from tests.helpers.opaque_blocks import BLOCK, LINEAR, A, Block, H, I, block_formula, five
from tests.helpers.profiling import profile_of

# a warning of torch.compile at graph breaks
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Chain(nn.Module):
    """Blocks of which the second is called twice, once by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.blocks[1](x, scale=7)


class Checkpointed(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(
            lambda x: super(Checkpointed, self).forward(x).exp(), x, use_reentrant=False
        )


class CheckpointedOnly(Chain):
    """Recomputation ends within the last call."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


class Inside(nn.Module):
    """Module with a checkpoint inside: its formula does not stand for the recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(lambda x: self.block(x).exp(), x, use_reentrant=False)
        return found


class Broken(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[1](x)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.broken = Broken()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.block(self.broken(x))
        return found


class Gradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: self.block(x).sum())(x)


class Region(nn.Module):
    """Block whose calls share one subgraph."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    @torch.compiler.nested_compile_region
    def region(self, x: Tensor) -> Tensor:
        return self.block(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.region(self.region(self.region(x)))


class Closure(Block):
    """Module whose argument a function inside captures."""

    def forward(self, x: Tensor, scale: int = 1) -> Tensor:
        def up() -> Tensor:
            return self.up(x)

        return self.down(up()) * scale


class Hooked(Chain):
    """Model with hooks that run operators within the call of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(lambda module, args, out: out @ out.T @ out)
        self.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 3,))


def linear_formula(module: nn.Linear, x: Tensor, *, out: Tensor) -> OpCost:
    return OpCost(macs=77, flops=154)


def compile_whole(model: nn.Module, backend: CountingBackend) -> Callable[..., Any]:
    return torch.compile(model, backend=backend)


def compile_blocks(model: nn.Module, backend: CountingBackend) -> Callable[..., Any]:
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(backend=backend)
    return model


class Program(NamedTuple):
    """Program with its MACs in forward, recomputation and backward."""

    model: Callable[[], nn.Module]
    macs: tuple[int, int, int]
    mapping: Mapping[Any, Any] = {Block: block_formula}
    kwargs: Mapping[str, Any] = {}
    compile: Callable[..., Any] = compile_whole


# The first layer of a model has no gradient of its input.
PROGRAMS = {
    "blocks": Program(Chain, (3 * BLOCK, 0, 11 * LINEAR)),
    "blocks compiled one by one": Program(
        Chain, (3 * BLOCK, 0, 11 * LINEAR), compile=compile_blocks
    ),
    "a block": Program(Block, (BLOCK, 0, 3 * LINEAR)),
    "a block with a keyword": Program(Block, (BLOCK, 0, 3 * LINEAR), kwargs={"scale": 7}),
    "a block that compiles itself": Program(
        Block, (BLOCK, 0, 3 * LINEAR), kwargs={"scale": 7}, compile=compile_blocks
    ),
    "an argument that is captured": Program(
        Closure, (BLOCK, 0, 3 * LINEAR), mapping={Closure: block_formula}
    ),
    "torch's own module": Program(
        lambda: nn.Linear(I, H), (77, 0, LINEAR), mapping={nn.Linear: linear_formula}
    ),
    "a checkpoint": Program(Checkpointed, (3 * BLOCK, 3 * BLOCK, 11 * LINEAR)),
    "a checkpoint that ends within a call": Program(
        CheckpointedOnly, (3 * BLOCK, 2 * BLOCK + LINEAR, 11 * LINEAR)
    ),
    "a checkpoint inside": Program(
        Inside, (5, 2 * LINEAR, 3 * LINEAR), mapping={Inside: five}
    ),
    "a call in a checkpoint inside": Program(
        Inside, (5, BLOCK, 3 * LINEAR), mapping={Inside: five, Block: block_formula}
    ),
    "a call in a call": Program(
        lambda: nn.Sequential(Chain(), Block()), (5 + BLOCK, 0, 15 * LINEAR),
        mapping={Chain: five, Block: block_formula},
    ),
    "a graph break between calls": Program(Broken, (2 * BLOCK, 0, 7 * LINEAR)),
    "a subgraph that runs thrice": Program(Region, (3 * BLOCK, 0, 11 * LINEAR)),
    "hooks": Program(Hooked, (3 * BLOCK, 0, 11 * LINEAR + 2 * 2 * A * A * I)),
}  # fmt: skip


def counted(
    program: Program, backend: str, *, is_training: bool = True
) -> tuple[Profile, Profile, CountingBackend]:
    """Return the profiles of a compiled run and of an eager run, and the backend."""
    model = program.model()
    counting = counting_backend(backend, model, custom_mapping=program.mapping)

    def run(called: Callable[..., Tensor]) -> None:
        out = called(torch.ones(A, I), **program.kwargs)
        if is_training:
            out.sum().backward()
        model.zero_grad()

    run(program.compile(model, counting))
    with torch.compiler.set_stance("force_eager"):
        eager = profile_of(run, model, model=model, custom_mapping=program.mapping)
    return counting.profile(), eager, counting


def by_module(profile: Profile, phase: Any) -> dict[str, tuple[int, int]]:
    costs = profile.by_module(phase)
    return {fqn: (cost.macs, cost.flops) for fqn, cost in costs.items() if cost.flops}


def check_program(name: str, backend: str) -> None:
    compiled, eager, counting = counted(PROGRAMS[name], backend)
    macs = tuple(compiled.total(phase).macs for phase in ("forward", "recompute", "backward"))
    assert macs == PROGRAMS[name].macs
    assert counting.total().macs == counting.step().total.macs == sum(macs)
    assert eager.total().macs == sum(macs)
    for phase in ("forward", "recompute"):
        assert by_module(compiled, phase) == by_module(eager, phase)
    # Sums of the gradients of a tensor that is used twice belong to no module in a graph.
    for fqn, cost in eager.by_module("backward").items():
        assert compiled.by_module("backward")[fqn].macs == cost.macs, fqn
    for cls in PROGRAMS[name].mapping:
        op = f"module.{cls.__name__}"
        assert compiled.by_operator().get(op) == eager.by_operator().get(op)
    assert not any("formula" in note for note in compiled.notes)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_opaque_calls_count_as_in_an_eager_program(name: str) -> None:
    check_program(name, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blocks", "a block", "a checkpoint"])
def test_opaque_calls_count_as_in_an_eager_program_under_inductor(name: str) -> None:
    check_program(name, "inductor")
    torch._dynamo.reset()
    check_program(name, "inductor")  # from inductor's cache


class Attending(nn.Module):
    """Model with an attention that inductor fuses where it needs no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x, x, x)[0]
        return found * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mapping", "macs"),
    [
        ({}, 4 * 5 * 6 * 6 + 2 * 5 * 5 * 6),
        ({nn.MultiheadAttention: lambda *_, **__: OpCost(macs=7, flops=14)}, 7),
    ],
)
def test_operators_that_inductor_fuses_belong_to_the_module_of_their_parts(
    mapping: Mapping[Any, Any], macs: int
) -> None:
    model = Attending()
    backend = counting_backend("inductor", model, custom_mapping=mapping)
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.ones(1, 5, 6))
    profile = backend.profile()
    assert profile.total().macs == profile.node("attention").total().macs == macs
    operators = profile.by_operator()
    assert bool(mapping) or "aten._scaled_dot_product_flash_attention_for_cpu.default" in operators


def test_opaque_calls_without_gradients_count_as_in_an_eager_program() -> None:
    for block in (torch.no_grad(), torch.inference_mode()):
        torch._dynamo.reset()
        with block:
            compiled, eager, _ = counted(PROGRAMS["blocks"], "aot_eager", is_training=False)
        assert compiled.total().macs == eager.total().macs == 3 * BLOCK


def test_backward_within_an_opaque_call_is_counted_as_operators() -> None:
    program = Program(lambda: nn.Sequential(Gradient()), (5, 0, 2 * LINEAR), {Gradient: five})
    compiled, eager, _ = counted(program, "aot_eager", is_training=False)
    for profile in (compiled, eager):
        assert profile.total("forward").macs == 5
        assert profile.total("backward").macs == 2 * LINEAR


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


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.chain(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "macs"), [(Block, 3 * BLOCK), (Chain, 5), (Wrapped, 5), (nn.Conv2d, 3 * 2 * LINEAR)]
)
@pytest.mark.usefixtures("one_rank")
def test_opaque_call_that_ddp_splits_is_counted_once(
    cls: type, macs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 100)
    model = DistributedDataParallel(Wrapped(), bucket_cap_mb=100 / 2**20)
    mapping = {cls: block_formula if cls is Block else five}
    backend = counting_backend("aot_eager", model, custom_mapping=mapping, strict=True)
    torch.compile(model, backend=backend)(torch.ones(A, I)).sum().backward()
    assert sum(not graph.is_backward for graph in backend.graphs) > 1
    costs = backend.step().costs
    assert (costs["forward"].macs, costs["backward"].macs) == (macs, 11 * LINEAR)


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
    model = Around()
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
