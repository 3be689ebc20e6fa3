"""Pipelines on real processes: micro-batches, sends and setup of each rank, against hand truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dispatch_flops import FlopCounterMode, Profile
from dispatch_flops.counting.python_frames import ACCUMULATION
from dispatch_flops.profile import OUTSIDE
from tests.helpers.parallel_nets import FLOAT
from tests.helpers.profiling import TORCH
from tests.helpers.ranks import Results, rows_of, run_on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

RANKS = 2
ROWS, WIDE = 5, 7  # of a micro-batch, which every stage takes and gives
BATCHES = 4
ACTIVATION = FLOAT * ROWS * WIDE
MACS = ROWS * WIDE * WIDE  # of one layer for one micro-batch


class Stage(nn.Module):
    """As many layers as the number of the stage, counted from 1."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDE, WIDE, bias=False) for _ in range(number)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def run(schedule_name: str, per_rank: int, *, steps: int = 1, warm: bool = False) -> Profile:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    rank = dist.get_rank()
    numbers = range(rank, RANKS * per_rank, RANKS)
    if schedule_name in ("ZBVZeroBubble", "DualPipeV"):
        numbers = [rank, RANKS * per_rank - 1 - rank]  # type: ignore[assignment]
    modules = nn.ModuleList([Stage(number + 1) for number in numbers])
    stages = [
        PipelineStage(module, number, RANKS * per_rank, torch.device("cpu"))
        for number, module in zip(numbers, modules, strict=True)
    ]
    schedule: Any = get_schedule_class(schedule_name)(
        stages[0] if per_rank == 1 else stages,
        n_microbatches=BATCHES,
        loss_fn=lambda y, target: (y - target).square().sum(),
    )
    batch = torch.ones(BATCHES * ROWS, WIDE)
    is_last = (RANKS * per_rank - 1) in numbers

    def step() -> None:
        inputs = [batch] if 0 in numbers else []
        schedule.step(*inputs, **({"target": batch, "losses": []} if is_last else {}))

    if warm:
        step()
    with FlopCounterMode(list(modules), display=False) as counter:
        for _ in range(steps):
            step()
    return counter.profile


def gpipe() -> Profile:
    return run("GPipe", 1)


def gpipe_second_step() -> Profile:
    return run("GPipe", 1, warm=True)


def one_f_one_b() -> Profile:
    return run("1F1B", 1)


def interleaved() -> Profile:
    return run("Interleaved1F1B", 2)


def zero_bubble() -> Profile:
    return run("InterleavedZeroBubble", 2)


def zero_bubble_v() -> Profile:
    return run("ZBVZeroBubble", 2)


def looped() -> Profile:
    return run("LoopedBFS", 2)


WORKLOADS = ["gpipe", "gpipe_second_step", "one_f_one_b", "interleaved", "zero_bubble", "looped"]
if TORCH >= (2, 12):  # before, its first step does not end on gloo
    WORKLOADS.append("zero_bubble_v")
infers_gradients = pytest.mark.skipif(
    TORCH < (2, 12), reason="this torch infers the shapes of activations alone"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_on_ranks(__file__, WORKLOADS, RANKS, tmp_path_factory.mktemp("ranks"))


def stages_of(workload: str, rank: int) -> list[int]:
    """The numbers of a rank's stages; the model of stage n has n + 1 layers."""
    if workload in ("gpipe", "gpipe_second_step", "one_f_one_b"):
        return [rank]
    return [rank, 3 - rank] if workload == "zero_bubble_v" else [rank, rank + 2]


def last_stage(workload: str) -> int:
    return 1 if len(stages_of(workload, 0)) == 1 else 3


@pytest.mark.parametrize("workload", WORKLOADS)
def test_work_of_a_pipeline_is_that_of_its_micro_batches(results: Results, workload: str) -> None:
    for rank, profile in enumerate(results.of(workload)):
        layers = sum(number + 1 for number in stages_of(workload, rank))
        assert profile.total("forward").macs == BATCHES * layers * MACS
        unneeded = BATCHES * MACS if rank == 0 else 0  # the gradient of the first layer's input
        assert profile.total("backward").macs == 2 * BATCHES * layers * MACS - unneeded
        assert profile.total("optimizer").macs == profile.total("recompute").macs == 0
        calls = {node.calls for node in profile.root.walk() if node.class_name == "Stage"}
        assert calls == {BATCHES}
        assert (profile.run.rank, profile.run.world_size) == (rank, RANKS)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_gradients_of_micro_batches_are_added_up_in_backward(
    results: Results, workload: str
) -> None:
    """A zero-bubble schedule adds up what it computes apart from the inputs' gradients itself."""
    sums = BATCHES if workload == "gpipe_second_step" else BATCHES - 1
    for rank, profile in enumerate(results.of(workload)):
        weights = sum((number + 1) * WIDE * WIDE for number in stages_of(workload, rank))
        added = sums * weights
        if workload == "zero_bubble" and TORCH < (2, 12):
            # It then adds 0 to the gradient of each layer's output, but in the first stage.
            layers = sum(number + 1 for number in stages_of(workload, rank) if number > 0)
            added += BATCHES * layers * ROWS * WIDE
        assert profile.node(ACCUMULATION).own("backward").flops == added


@infers_gradients
@pytest.mark.parametrize("workload", WORKLOADS)
def test_setup_of_a_pipeline_is_a_phase_of_its_own(results: Results, workload: str) -> None:
    """The first step infers shapes with an extra micro-batch: its forward, and the gradients of
    inputs, which the first stage does not need. The loss runs once more on the last rank."""
    for rank, profile in enumerate(results.of(workload)):
        numbers = stages_of(workload, rank)
        macs = sum((number + 1) * MACS * (1 if number == 0 else 2) for number in numbers)
        if workload == "gpipe_second_step":
            macs = 0
        ops = [op for op in profile.op_totals() if op.phase == "setup"]
        assert sum(op.cost.macs for op in ops if op.cost) == macs
        loss = profile.outside.own("forward").flops
        last = last_stage(workload) in stages_of(workload, rank)
        assert loss == (BATCHES * (3 * ROWS * WIDE - 1) if last else 0)


def neighbours(workload: str, number: int) -> tuple[bool, bool]:
    """Whether the stages before and after are on the other rank."""
    own = stages_of(workload, 0) if number in stages_of(workload, 0) else stages_of(workload, 1)
    before = number > 0 and number - 1 not in own
    after = number < last_stage(workload) and number + 1 not in own
    return before, after


@infers_gradients
@pytest.mark.parametrize("workload", WORKLOADS)
def test_activations_are_sent_in_forward_and_gradients_in_backward(
    results: Results, workload: str
) -> None:
    sent = (BATCHES, BATCHES * ACTIVATION)
    for rank, profile in enumerate(results.of(workload)):
        truth: dict[Any, Any] = {}
        setup: dict[Any, int] = {}
        numbers = stages_of(workload, rank)
        for number, fqn in zip(numbers, ["Stage", "Stage_2"] if numbers[1:] else [""], strict=True):
            before, after = neighbours(workload, number)
            for kind, is_there in (("recv", before), ("send", after)):
                truth |= {(fqn, "forward", kind): sent} if is_there else {}
            for kind, is_there in (("send", before), ("recv", after)):
                truth |= {(fqn, "backward", kind): sent} if is_there else {}
            for kind in ("send", "recv"):
                if workload != "gpipe_second_step":
                    # a vote on whether to infer, the size of the metadata, and the metadata
                    setup[fqn, "setup", kind] = 3 * (before + after)
        rows = rows_of(profile)
        found = {key: calls for key, (calls, _) in rows.items() if key[1] == "setup"}
        if TORCH < (2, 15) or not setup:
            assert found == setup
        else:
            # The vote is an all_reduce. The lower rank then sends a flag, and another one follows.
            for kind, flags in (("send", rank == 0), ("recv", rank == 1)):
                metadata = sum(n for key, n in setup.items() if key[2] == kind) * 2 // 3
                assert sum(n for key, n in found.items() if key[2] == kind) == metadata + flags
            assert found[OUTSIDE, "setup", "all_reduce"] == 2
        assert {key: row for key, row in rows.items() if key[1] != "setup"} == truth


def test_peer_of_what_is_sent_is_known(results: Results) -> None:
    for rank, profile in enumerate(results.of("gpipe_second_step")):
        by_phase = {total.phase: total for total in profile.communication}
        shares = tuple(BATCHES * ACTIVATION if peer != rank else 0 for peer in range(RANKS))
        sending, receiving = ("forward", "backward") if rank == 0 else ("backward", "forward")
        assert by_phase[sending].sent_bytes == shares  # type: ignore[index]
        assert by_phase[receiving].received_bytes == shares  # type: ignore[index]
