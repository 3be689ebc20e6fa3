"""Plans over a device mesh: parameters, MACs, communication and times of closed forms."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dispatch_flops import FlopCounterMode, Machine, Profile, plan
from dispatch_flops.analysis.machines import Link
from dispatch_flops.analysis.planned import Plan, PlannedStep
from dispatch_flops.distributed import simulate
from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.planning.cluster_step import ShardedStep
from dispatch_flops.renderers import plan_table
from tests.helpers.parallel_nets import FLOAT, padded
from tests.helpers.ranks import run_on_ranks
from tests.models.parallel import (
    BATCH,
    LAYERS,
    MICROBATCHES,
    SEQUENCE,
    VOCABULARY,
    WIDTH,
    Part,
    attention_macs,
    forward_macs,
    layer_params,
)
from tests.models.parallel_jobs import JOBS

PEAK, BANDWIDTH, NODE, NETWORK, ALPHA = 1e9, 1e8, 7e6, 3e6, 1e-3
MACHINE = Machine(
    name="test",
    flops_per_s={"float32": PEAK, "bfloat16": 3 * PEAK},
    bytes_per_s=BANDWIDTH,
    memory_bytes=10e6,
    devices_per_node=2,
    node_link=Link(bytes_per_s=NODE, latency_s=ALPHA, name="inner"),
    network_link=Link(bytes_per_s=NETWORK, name="outer"),
)
DP_TP = {"dp": 2, "tp": 2}
PARAMETERS = LAYERS * layer_params() + 2 * VOCABULARY * WIDTH
HIDDEN_BYTES = FLOAT * BATCH * SEQUENCE * WIDTH


class Stated(Part):
    """A model that states its tensor-parallel plan, as models of transformers do."""

    tp_plan: ClassVar = {
        "layers.*.attn.wq": "colwise", "layers.*.attn.wk": "colwise",
        "layers.*.attn.wv": "colwise", "layers.*.attn.wo": "rowwise",
        "layers.*.w1": "colwise", "layers.*.w2": "rowwise", "out": "colwise_gather_output",
    }  # fmt: skip


def build(batch: int = BATCH) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Stated(), (torch.zeros(batch, SEQUENCE, dtype=torch.long),)


def only(planned: Plan) -> PlannedStep:
    (step,) = planned.steps
    return step


def plan_of(**options: Any) -> Plan:
    arguments: dict[str, Any] = {"mesh": DP_TP, "search_batch": False, "optimizer": "sgd"}
    arguments["target"] = "cpu"  # CUDA has no fused kernel for heads of 6
    return plan(build, MACHINE, **arguments | options)


def planned(**options: Any) -> PlannedStep:
    return only(plan_of(**options))


@pytest.fixture(scope="module")
def whole_plan() -> Plan:
    return plan_of()


@pytest.fixture(scope="module")
def step(whole_plan: Plan) -> PlannedStep:
    return only(whole_plan)


def test_parameters_are_those_of_the_model_and_of_a_device(step: PlannedStep) -> None:
    assert step.cluster is not None
    assert step.cluster.parameters == PARAMETERS
    # Of 25 rows of the head on a rank of tp, dp gives 13 and 12. The embedding has no tp.
    shards = [LAYERS * layer_params() // 4 + (25 + rows) * WIDTH for rows in (13, 12)]
    assert [part.profile.local_params for part in step.cluster.ranks] == shards
    assert [part.rank for part in step.cluster.ranks] == [0, 2]
    assert [part.ranks for part in step.cluster.ranks] == [2, 2]
    assert step.devices == 4


def test_macs_are_those_of_the_products_of_a_rank(step: PlannedStep) -> None:
    assert step.cluster is not None
    forward, scores = forward_macs(tp=2), LAYERS * attention_macs(2) // 2
    assert step.profile.total("forward").macs == forward
    assert step.profile.total("backward").macs == 2 * forward
    assert step.profile.total("recompute").macs == scores
    assert step.cluster.model_cost.macs == 4 * 3 * forward
    assert step.cluster.cost.macs == 4 * (3 * forward + scores)


def test_communication_over_each_dimension_has_the_closed_form(step: PlannedStep) -> None:
    """dp gathers layers twice and the root once, and reduces each of them; tp adds partial sums."""
    assert step.cluster is not None
    found = {part.dim: part for part in step.cluster.communication}
    layer, head = FLOAT * layer_params() // 2, padded(VOCABULARY // 2, 2)
    root = FLOAT * WIDTH * (VOCABULARY + head)
    dp = found["dp"]
    assert dp.size == 2 and dp.cost.calls == 3 * LAYERS + 2
    assert dp.cost.payload_bytes == 3 * LAYERS * layer + 2 * root
    assert dp.cost.bus_bytes == dp.cost.payload_bytes // 2
    assert (dp.reach, dp.seconds) == ("network", pytest.approx(dp.cost.bus_bytes / NETWORK))
    tp = found["tp"]
    sums = 6 * LAYERS + 1  # wo and w2; the gradients of the inputs of wq, wk, wv, w1 and out
    logits = FLOAT * BATCH * SEQUENCE * VOCABULARY
    assert tp.cost.calls == sums + 1
    assert tp.cost.payload_bytes == sums * HIDDEN_BYTES + logits
    assert tp.cost.bus_bytes == sums * HIDDEN_BYTES + logits // 2
    assert tp.reach == "node"
    assert tp.seconds == pytest.approx((sums + 1) * ALPHA + tp.cost.bus_bytes / NODE)
    assert step.bounds.communication_s == pytest.approx(dp.seconds + tp.seconds)
    assert step.bounds.busiest_link_s == pytest.approx(max(dp.seconds, tp.seconds))


def test_rates_are_of_all_devices(step: PlannedStep) -> None:
    assert (step.samples, step.tokens) == (2 * BATCH, 2 * BATCH * SEQUENCE)
    assert step.bounds.serial_s is not None
    assert step.tokens_per_s[0] == pytest.approx(2 * BATCH * SEQUENCE / step.bounds.serial_s)


def test_memory_holds_the_shards_of_the_fullest_rank(step: PlannedStep) -> None:
    assert step.cluster is not None
    assert step.cluster.fullest.rank == 0
    blocks = 4 * [WIDTH * WIDTH // 4] + 2 * [WIDTH * 40 // 4]
    held = [*LAYERS * blocks, 25 * WIDTH, 13 * WIDTH]
    rounded = sum(-(-FLOAT * elements // 512) * 512 for elements in held)
    assert step.memory_by_role["parameters"] == rounded
    assert step.peak_bytes == sum(step.memory_by_role.values())
    assert step.fits and step.headroom_bytes == 10e6 - step.peak_bytes


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class SumOfPair(nn.Linear):
    def forward(self, pair: Pair) -> torch.Tensor:
        return super().forward(pair.first) + super().forward(pair.second)


@pytest.mark.parametrize("mesh", [None, {"dp": 2}])
def test_named_tuple_of_one_input_twice_is_planned(mesh: dict[str, int] | None) -> None:
    def build() -> tuple[nn.Module, tuple[Pair]]:
        x = torch.ones(3, 7)
        return SumOfPair(7, 5), (Pair(x, x),)

    options: dict[str, Any] = {"mesh": mesh, "optimizer": None, "search_batch": False}
    step = only(plan(build, MACHINE, **options))
    assert step.profile.total("forward").macs == 2 * 3 * 7 * 5
    assert step.memory_by_role["inputs"] == 512  # rounded up
    in_half = only(plan(build, MACHINE, dtype=torch.bfloat16, **options))
    assert in_half.profile.total("forward").macs == 2 * 3 * 7 * 5


@pytest.mark.slow
def test_adamw_holds_two_shards_of_each_parameter(step: PlannedStep) -> None:
    state = planned(optimizer="adamw").memory_by_role["optimizer state"]
    assert state == adamw_state_bytes(step)


def adamw_state_bytes(step: PlannedStep) -> int:
    """Return two shards of each parameter, and a number for each in a block of its own."""
    return 2 * step.memory_by_role["parameters"] + 512 * (6 * LAYERS + 2)


@pytest.mark.slow
def test_checkpointed_layers_are_recomputed_with_their_sums_over_tp() -> None:
    found = planned(checkpoint=True)
    assert found.cluster is not None
    tp = {part.dim: part for part in found.cluster.communication}["tp"]
    # Recomputation ends before w2, the last product, whose result no gradient needs.
    assert tp.cost.calls == 7 * LAYERS + 2
    scores, rows = attention_macs(2) // 2, BATCH * SEQUENCE
    layer = (forward_macs(tp=2) - rows * WIDTH * VOCABULARY // 2) // LAYERS
    unneeded = rows * WIDTH * 40 // 2
    assert found.profile.total("recompute").macs == LAYERS * (layer - unneeded + scores)


@pytest.mark.slow
def test_mixed_precision_gathers_half_the_bytes_and_keeps_float32_shards() -> None:
    mesh = {"dp": 2}
    whole = planned(mesh=mesh)
    mixed = planned(mesh=mesh, dtype=torch.bfloat16, mixed_precision=True)
    half = planned(mesh=mesh, dtype=torch.bfloat16)
    gathered = [_payload(step, "all_gather") for step in (whole, mixed, half)]
    reduced = [_payload(step, "reduce_scatter") for step in (whole, mixed, half)]
    assert [2 * part for part in gathered[1:]] == gathered[:1] * 2
    assert reduced[0] == reduced[1] == 2 * reduced[2] == FLOAT * PARAMETERS
    held = [step.memory_by_role["parameters"] for step in (whole, mixed)]
    assert held[0] == held[1]


def _payload(step: PlannedStep, kind: str) -> int:
    return step.profile.comm_by("kind")[kind].payload_bytes


def test_tensor_parallelism_alone_needs_no_dp() -> None:
    step = planned(mesh={"tp": 4}, optimizer="adamw")
    assert step.cluster is not None
    assert [part.dim for part in step.cluster.communication] == ["tp"]
    rows = BATCH * SEQUENCE
    head = rows * WIDTH * 13  # the first rank has 13 of the 50 rows
    layers = 4 * rows * WIDTH * WIDTH // 4 + 2 * rows * WIDTH * 40 // 4 + attention_macs(4)
    assert step.profile.total("forward").macs == LAYERS * layers + head
    assert step.samples == BATCH
    assert step.memory_by_role["optimizer state"] == adamw_state_bytes(step)


def test_plan_without_an_optimizer_gathers_for_a_forward_pass() -> None:
    step = planned(mesh={"dp": 2}, optimizer=None)
    assert not step.profile.total("backward").flops
    assert step.profile.comm_by("kind").keys() == {"all_gather"}


@pytest.mark.slow
def test_largest_batch_is_the_last_one_that_fits_on_the_fullest_rank() -> None:
    largest = planned(mesh={"dp": 2}, sizes={"batch": 1}, search_batch=True).largest_batch
    assert largest is not None and largest > 1
    peaks = [
        planned(mesh={"dp": 2}, sizes={"batch": batch}).peak_bytes
        for batch in (largest, largest + 1)
    ]
    assert peaks[0] <= 10e6 < peaks[1]


@pytest.fixture(scope="module")
def staged() -> PlannedStep:
    job = JOBS["pp_fsdp_tp"]
    return only(plan(job.run, MACHINE, mesh=job.mesh, search_batch=False, target="cpu"))


@pytest.mark.slow
class TestJob:
    """A user's job: two pipeline stages, each sharded over dp and tp."""

    def test_work_is_that_of_all_ranks(self, staged: PlannedStep) -> None:
        work = [JOBS["pp_fsdp_tp"].work(rank) for rank in range(8)]
        assert staged.cluster is not None
        assert staged.cluster.model_cost.macs == sum(w.forward + w.backward for w in work)
        assert staged.cluster.slowest.stage == 1  # it has the head

    def test_communication_is_that_of_the_slowest_rank(self, staged: PlannedStep) -> None:
        assert staged.cluster is not None
        rows = JOBS["pp_fsdp_tp"].rows(4)
        found = {part.dim: part.cost for part in staged.cluster.communication}
        assert found.keys() == {"pp", "dp", "tp"}
        assert found["pp"].calls == 2 * MICROBATCHES
        assert found["pp"].payload_bytes == 2 * MICROBATCHES * HIDDEN_BYTES
        total = sum(cost.payload_bytes for cost in found.values())
        assert total == sum(payload for _, payload in rows.values())

    def test_mfu_ceiling_is_of_the_mean_of_all_devices(self, staged: PlannedStep) -> None:
        assert staged.cluster is not None and staged.bounds.least_s is not None
        ranks = staged.cluster.ranks
        flops = [part.profile.model_total().flops for part in ranks for _ in range(part.ranks)]
        assert len(flops) == 8 and min(flops) < max(flops)
        mean_s = sum(flops) / 8 / PEAK
        assert staged.bounds.mfu_ceiling[0] == pytest.approx(mean_s / staged.bounds.least_s)

    def test_memory_is_that_of_the_fullest_rank(self, staged: PlannedStep) -> None:
        assert staged.cluster is not None
        peaks = [part.peak_bytes for part in staged.cluster.ranks]
        assert min(peaks) < staged.peak_bytes == max(peaks)
        assert sum(staged.memory_by_role.values()) == staged.peak_bytes

    def test_parameters_are_those_of_all_stages(self, staged: PlannedStep) -> None:
        assert staged.cluster is not None and staged.cluster.parameters == PARAMETERS

    def test_samples_are_those_of_the_micro_batches_of_the_first_stage(
        self, staged: PlannedStep
    ) -> None:
        samples = 2 * MICROBATCHES * BATCH
        assert (staged.samples, staged.tokens) == (samples, samples * SEQUENCE)


def test_job_takes_the_sizes_and_dimensions_of_its_own() -> None:
    def job(mesh: DeviceMesh, rows: int) -> Any:
        model = nn.Linear(WIDTH, VOCABULARY, bias=False)
        x = torch.ones(rows, WIDTH)
        return model, lambda: model(x).sum().backward()

    steps = plan(job, MACHINE, sizes={"rows": [2, 3]}, mesh={"ring": 2}).steps
    assert [step.profile.total("forward").macs for step in steps] == [
        2 * WIDTH * VOCABULARY, 3 * WIDTH * VOCABULARY,
    ]  # fmt: skip
    assert [(step.samples, step.largest_batch) for step in steps] == 2 * [(None, None)]


def test_slowest_rank_is_one_whose_group_is_on_two_nodes() -> None:
    """Nodes have 4 devices: ranks 0 to 2 are on the first, and ranks 3 to 5 on both."""

    def job(mesh: DeviceMesh) -> Any:
        group = mesh.get_group("tp")
        return lambda: torch.distributed.all_reduce(torch.ones(3, 50, 70), group=group)

    machine = replace(MACHINE, devices_per_node=4)
    cluster = plan(job, machine, mesh={"dp": 2, "tp": 3}).steps[0].cluster
    assert cluster is not None and cluster.devices == 2 * 3
    assert [(part.rank, part.ranks) for part in cluster.ranks] == [(0, 3), (3, 3)]
    assert cluster.slowest.rank == cluster.slowest.profile.run.rank == 3
    (time,) = cluster.communication
    assert (time.dim, time.size, time.reach) == ("tp", 3, "network")
    # One of the ranks is on the first node, so that one link connects the nodes.
    assert time.seconds == pytest.approx(2 * 2 * FLOAT * 50 * 70 / NETWORK)
    (total,) = cluster.slowest.profile.communication
    assert total.group.ranks == (3, 4, 5)


class Tied(Stated):
    tp_plan: ClassVar = {**Stated.tp_plan, "tok": "embedding_rowwise"}

    def __init__(self) -> None:
        super().__init__()
        assert self.out is not None and self.tok is not None
        self.out.weight = self.tok.weight


@pytest.mark.slow
def test_tied_parameter_stays_one_parameter() -> None:
    def tied() -> tuple[nn.Module, torch.Tensor]:
        return Tied(), torch.zeros(BATCH, SEQUENCE, dtype=torch.long)

    step = only(plan(tied, MACHINE, mesh=DP_TP, optimizer="sgd", search_batch=False))
    assert step.cluster is not None
    assert step.cluster.parameters == PARAMETERS - VOCABULARY * WIDTH
    root = [t for t in step.profile.communication if t.kind == "reduce_scatter" and not t.fqn]
    assert [t.payload_bytes for t in root] == [FLOAT * WIDTH * padded(VOCABULARY // 2, 2)]


def _unstated() -> tuple[nn.Module, torch.Tensor]:
    return Part(), torch.zeros(BATCH, SEQUENCE, dtype=torch.long)


def _packed() -> tuple[nn.Module, torch.Tensor]:
    model = Stated()
    model.tp_plan = {**Stated.tp_plan, "out": "packed_colwise"}
    return model, torch.zeros(BATCH, SEQUENCE, dtype=torch.long)


def _tied_in_one_place() -> tuple[nn.Module, torch.Tensor]:
    model = Tied()
    model.tp_plan = Stated.tp_plan
    return model, torch.zeros(BATCH, SEQUENCE, dtype=torch.long)


def _job(mesh: DeviceMesh) -> Any:
    return lambda: None


@pytest.mark.parametrize(
    ("build", "options", "error", "message"),
    [
        (_unstated, {}, TargetError, "Part states no tensor-parallel plan"),
        (_packed, {}, TargetError, "has the style packed_colwise"),
        (_tied_in_one_place, {}, TargetError, "differently, which is one parameter"),
        (build, {"mesh": {"pp": 2, "dp": 2}}, ConfigError, "mesh has pp: .* pass a job"),
        (build, {"mesh": {}}, ConfigError, "pass names and sizes"),
        (build, {"mixed_precision": True}, ConfigError, "needs a dtype, and a mesh with dp"),
        (build, {"optimizer": "lion"}, ConfigError, "choose one of adamw"),
        (_job, {"mesh": None}, ConfigError, "build has a parameter mesh"),
        (build, {"mesh": "dp=2"}, ConfigError, "pass names and sizes"),
        (_job, {"checkpoint": True}, ConfigError, "a job sets its precision and checkpointing"),
        (_job, {"mixed_precision": True}, ConfigError, "a job sets its precision"),
    ],
)
def test_mesh_that_cannot_be_planned_says_what_to_do(build, options, error, message: str) -> None:
    with pytest.raises(error, match=message):
        plan(build, MACHINE, **{"mesh": DP_TP, "search_batch": False, **options})


@pytest.mark.slow
def test_table_shows_devices_dimensions_and_what_is_assumed(whole_plan: Plan) -> None:
    text = plan_table.render(whole_plan)
    cells = (re.split(r"  +", line.strip()) for line in text.splitlines())
    rows = {row[0]: row[-1] for row in cells}
    assert rows["devices"] == "4"
    assert rows["dp, 2 ranks: calls"] == str(3 * LAYERS + 2)
    assert rows["tp, 2 ranks: link"] == "7 MB/s within a node"
    assert "tokens/s ceiling, a device" in text
    for words in ("FSDP2", "no mixed precision", "latency not known", "along dp", "hidden by"):
        assert words in text.partition("Assumptions:")[2]


# -- real ranks --------------------------------------------------------------------------------

EVEN = {"optimizer": "adamw", "checkpoint": True}


class Even(nn.Module):
    """Layers whose rows four ranks divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)
        )
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def _sharded(mixed: bool) -> ShardedStep:
    dtype = torch.bfloat16 if mixed else None
    return ShardedStep(
        optimizer="adamw", checkpoint=True, dtype=dtype, mixed_precision=mixed, target="cuda"
    )


def _steady(mesh: DeviceMesh, mixed: bool) -> Any:
    job = _sharded(mixed).job(lambda: (Even(), torch.ones(BATCH, 8)), {}, set())
    model, step = job(mesh)
    step()
    return model, step


def counted_step() -> list[str]:
    """Return the profile of a step of a real rank, in float32 and with mixed precision."""
    texts = []
    for mixed in (False, True):
        model, step = _steady(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), mixed)
        with FlopCounterMode(model, display=False, memory=True) as counter:
            step()
        texts.append(json.dumps(counter.profile.to_dict()))
    return texts


@pytest.mark.slow
def test_planned_rank_has_the_peaks_and_communication_of_a_real_rank(tmp_path) -> None:
    """Rows are even: the first and the last rank, simulated, are as each of the real ones."""
    results = run_on_ranks(__file__, ["counted_step"], 4, tmp_path)
    for number, mixed in enumerate((False, True)):
        cluster = simulate(
            lambda mesh, mixed=mixed: _steady(mesh, mixed), {"dp": 4}, [0, 3], memory=True
        )
        for texts in results.of("counted_step"):
            real = Profile.from_json(texts[number])
            for simulated in cluster.ranks.values():
                assert _peaks(simulated) == _peaks(real)
                assert simulated.comm_by("kind") == real.comm_by("kind")
                assert simulated.total().macs == real.total().macs


def _peaks(profile: Profile) -> dict[str, dict[str, int]]:
    assert profile.memory is not None
    phases = [peak.peak_at.phase for peak in profile.memory.devices[0].peaks]
    return {phase: profile.memory.by_role(phase) for phase in phases}
