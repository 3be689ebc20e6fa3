"""Module classes with a formula in compiled code, compared to eager counts and closed forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dispatch_flops import OpCost, Profile
from dispatch_flops.compile import CountingBackend, counting_backend
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
from tests.helpers.profiling import profile_of

# a warning of torch.compile at graph breaks
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


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


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()


class Inside(Holder):
    """Module with a checkpoint inside: its formula does not stand for the recomputation."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(lambda x: self.block(x).exp(), x, use_reentrant=False)
        return found


class Gradient(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: self.block(x).sum())(x)


class Region(Holder):
    """Block whose calls share one subgraph."""

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
