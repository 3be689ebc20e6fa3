"""Compiled programs in every way of running them: each cell is the product of sizes, or says >=.

Rows are programs whose parts reach a compiler in their own ways. Columns are the counter around the
eager and the compiled program, and the counting backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dispatch_flops import counting_backend
from dispatch_flops.errors import UncountedWarning
from tests.helpers.custom_products import add_product, ordered_product, with_formulas
from tests.helpers.profiling import TRIAL_STEPS, profile_of

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.slow,
    # a warning of torch.compile about inputs that are not leaves
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

A, B, C, D, L = 3, 5, 7, 11, 4  # batch, width, hidden width, steps of a scan, blocks
TWO = A * 2 * B * C  # two products: up and down
Counts = dict[str, int]  # MACs by phase


@pytest.fixture(autouse=True)
def formulas() -> Iterator[None]:
    with with_formulas():
        yield


# -- rows -----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(B, C)
        self.down = nn.Linear(C, B)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).sin()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(L)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Broken(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[2](self.blocks[3](self.blocks[1](x)))


class Checkpointed(Blocks):
    """Each block is recomputed, its dropout from the same random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(self.drop_and_call, block, x, use_reentrant=False)
        return x

    def drop_and_call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(nn.functional.dropout(x, 0.5))


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(B, C))
        self.down = nn.Parameter(torch.ones(C, B))


class Choosing(Weights):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0,
            lambda x, up, down: x @ up @ down,
            lambda x, up, down: x + 1,
            (x, self.up, self.down),
        )


class Scanning(Weights):
    def forward(self, x: Tensor) -> Tensor:
        def step(carried: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            return carried @ self.up @ self.down + at, carried.sum()

        return scan(step, x, torch.ones(D, A, B))[0]


class Mutating(Weights):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], C)
        add_product(x, self.up, out)
        return out @ self.down


class Ordered(Weights):
    def forward(self, x: Tensor) -> Tensor:
        return ordered_product(x, self.up) @ self.down


@dataclass(frozen=True, kw_only=True)
class Row:
    build: Callable[[], nn.Module]
    counts: Counts
    trains: bool = True
    has_blocks: bool = True

    def run(self, model: Any) -> None:
        x = torch.ones(A, B, requires_grad=self.trains)
        with torch.set_grad_enabled(self.trains):
            out = model(x)
        if self.trains:
            out.sum().backward()


STEP = {"forward": L * TWO, "backward": 2 * L * TWO}
ROWS: Mapping[str, Row] = {
    "blocks": Row(build=Blocks, counts=STEP),
    "graph break": Row(build=Broken, counts=STEP),
    "checkpoint with dropout": Row(build=Checkpointed, counts={**STEP, "recompute": L * TWO}),
    "cond": Row(build=Choosing, counts={"forward": TWO}, trains=False, has_blocks=False),
    "scan": Row(build=Scanning, counts={"forward": D * TWO}, trains=False, has_blocks=False),
    "mutating operator": Row(
        build=Mutating, counts={"forward": TWO}, trains=False, has_blocks=False
    ),
    "effectful operator": Row(
        build=Ordered, counts={"forward": TWO}, trains=False, has_blocks=False
    ),
}


# -- columns -------------------------------------------------------------------------------------


def counter(row: Row, *, runs_before: int = 0, **options: Any) -> Counts:
    """Count by FlopCounterMode around a program that is compiled, or eager without options."""
    model = row.build()
    program = torch.compile(model, **options) if options else model
    for _ in range(runs_before):
        row.run(program)
    profile = profile_of(row.run, program, model=model, strict=True)
    return {phase: profile.total(phase).macs for phase in PHASES}


def counter_around_blocks(row: Row) -> Counts:
    model = row.build()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    profile = profile_of(row.run, model, model=model, strict=True)
    return {phase: profile.total(phase).macs for phase in PHASES}


def backend(row: Row, wrapped: Any = "aot_eager", **options: Any) -> Counts:
    """Count by the counting backend; it raises at an unknown operator."""
    model = row.build()
    counting = counting_backend(wrapped, model, strict=True)
    compiled = torch.compile(model, backend=counting, **options)
    row.run(compiled)
    first = counting.step()
    row.run(compiled)
    assert counting.step().costs == first.costs
    return {phase: cost.macs for phase, cost in first.costs.items() if phase in PHASES}


def backend_of_blocks(row: Row) -> Counts:
    model = row.build()
    counting = counting_backend("aot_eager", model, strict=True)
    for block in model.blocks:
        block.compile(backend=counting)
    row.run(model)
    profile = counting.profile()
    for index in range(L):
        assert profile.node(f"blocks.{index}").calls == 1
        assert profile.by_module("forward")[f"blocks.{index}"].macs == TWO
    return {phase: profile.total(phase).macs for phase in PHASES}


def backend_in_compiled_autograd(row: Row) -> Counts:
    model = row.build()
    counting = counting_backend("aot_eager", model, strict=True)
    compiled = torch.compile(model, backend=counting)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=counting)):
        row.run(compiled)
    step, profile = counting.step(), counting.profile()
    assert step.model_total.macs == sum(row.counts[phase] for phase in ("forward", "backward"))
    assert any("compiled autograd" in note for note in profile.notes)
    recomputed = profile.by_module("recompute")
    for index in range(L):
        assert recomputed[f"blocks.{index}"].macs == row.counts.get("recompute", 0) // L
    return {phase: step.costs[phase].macs for phase in PHASES}


PHASES: tuple[Any, ...] = ("forward", "backward", "recompute")
COLUMNS: Mapping[str, Callable[[Row], Counts]] = {
    "counter, eager": counter,
    "counter, cold": lambda row: counter(row, backend="aot_eager"),
    "counter, warm": lambda row: counter(row, runs_before=2, backend="aot_eager"),
    "counter, dynamic": lambda row: counter(row, backend="aot_eager", dynamic=True),
    "counter, blocks": counter_around_blocks,
    "backend": backend,
    "backend, dynamic": lambda row: backend(row, dynamic=True),
    "backend over eager": lambda row: backend(row, "eager"),
    "backend, blocks": backend_of_blocks,
    "backend, compiled autograd": backend_in_compiled_autograd,
}
FOR_BLOCKS = ("counter, blocks", "backend, blocks")
FOR_TRAINING = ("backend, compiled autograd",)
CELLS = [
    (row, column)
    for row, program in ROWS.items()
    for column in COLUMNS
    if (column not in FOR_BLOCKS or program.has_blocks)
    and (column not in FOR_TRAINING or program.trains)
]


@pytest.mark.parametrize(("row", "column"), CELLS)
def test_compiled_program_counts_its_products(row: str, column: str) -> None:
    expected = dict.fromkeys(PHASES, 0) | ROWS[row].counts
    if row == "scan" and column.startswith("counter"):
        expected["forward"] += TRIAL_STEPS * TWO
    assert COLUMNS[column](ROWS[row]) == expected


# -- distributed training on one rank -------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def shard(model: Blocks) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS: Mapping[str, Callable[[Any], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": shard,
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_counter_around_compiled_distributed_model_counts_its_products(
    wrapper: str, warm: bool
) -> None:
    row = ROWS["blocks"]
    model = Blocks()
    compiled = torch.compile(WRAPPERS[wrapper](model), backend="aot_eager")
    if warm:
        row.run(compiled)
    profile = profile_of(row.run, compiled, model=model, strict=True)
    for phase, macs in row.counts.items():
        assert profile.total(phase).macs == macs


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_backend_of_distributed_model_is_exact_or_names_what_it_lacks(wrapper: str) -> None:
    row = ROWS["blocks"]
    model = Blocks()
    counting = counting_backend("aot_eager", model)
    compiled = torch.compile(WRAPPERS[wrapper](model), backend=counting)
    row.run(compiled)
    counts = {phase: counting.profile().total(phase).macs for phase in row.counts}
    assert counts == row.counts
    if wrapper == "FSDP2":  # hooks break the root's graph in a loop: it runs eagerly
        with pytest.warns(UncountedWarning, match=r"forward \(test_compiled_matrix.py"):
            assert counting.step().is_lower_bound
    else:
        assert not counting.step().is_lower_bound


@pytest.mark.usefixtures("process_group")
def test_backend_names_a_distributed_model_of_which_nothing_is_compiled() -> None:
    """torch.compile does not compile the forward of a class of torch.nn behind DDP's."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 5), nn.ReLU()))
    counting = counting_backend("aot_eager", model)
    torch.compile(model, backend=counting)(torch.ones(2, 3))
    assert not counting.graphs
    with pytest.warns(UncountedWarning, match="torch.compile made no graph"):
        assert counting.step().is_lower_bound
