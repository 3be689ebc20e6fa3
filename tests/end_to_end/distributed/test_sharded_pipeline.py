"""A pipeline whose stages are sharded, on a mesh of four real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dispatch_flops import FlopCounterMode, Profile
from tests.helpers.parallel_nets import FLOAT
from tests.helpers.ranks import rows_of, run_on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.whole,
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
]

ROWS, WIDE, LAYERS = 5, 8, 2
BATCHES = 3
MACS = ROWS * WIDE * WIDE  # of one layer for one micro-batch


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def one_f_one_b() -> Profile:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number = mesh["pp"].get_local_rank()
    model = Stage()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(
        stage, n_microbatches=BATCHES, loss_fn=lambda y, target: (y - target).square().sum()
    )
    batch = torch.ones(BATCHES * ROWS, WIDE)
    with FlopCounterMode(model, display=False) as counter:
        if number == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=[])
    return counter.profile


def test_gathers_and_reductions_serve_the_phases_of_their_micro_batches(tmp_path: Path) -> None:
    """A backward that is not the last keeps the parameters, so that the next forward has them.

    The first stage runs F F B F B B, and gathers for each F but the third and each B but the last.
    The second runs F B F B F B, and gathers for its first F and for every B.
    """
    layer, activation = FLOAT * WIDE * WIDE, FLOAT * ROWS * WIDE
    results = run_on_ranks(__file__, ["one_f_one_b"], 4, tmp_path)
    for rank, profile in enumerate(results.of("one_f_one_b")):
        is_first = rank < 2
        in_forward, in_backward = (2, 2) if is_first else (1, 3)
        sent = (BATCHES, BATCHES * activation)
        truth: dict[Any, tuple[int, int]] = {
            ("", "forward", "send" if is_first else "recv"): sent,
            ("", "backward", "recv" if is_first else "send"): sent,
        }
        for i in range(LAYERS):
            fqn = f"layers.{i}"
            truth[fqn, "forward", "all_gather"] = (in_forward, in_forward * layer)
            truth[fqn, "backward", "all_gather"] = (in_backward, in_backward * layer)
            truth[fqn, "backward", "reduce_scatter"] = (1, layer)
        rows = rows_of(profile)
        assert {key: row for key, row in rows.items() if key[1] != "setup"} == truth
        dims = {total.kind: total.group.mesh_dim for total in profile.communication}
        assert dims == {"all_gather": "dp", "reduce_scatter": "dp", "send": "pp", "recv": "pp"}
        assert profile.total("forward").macs == BATCHES * LAYERS * MACS
        unneeded = BATCHES * MACS if is_first else 0
        assert profile.total("backward").macs == 2 * BATCHES * LAYERS * MACS - unneeded
        assert profile.run.coordinates == {"pp": rank // 2, "dp": rank % 2}
        assert (profile.total_params, profile.local_params) == (
            LAYERS * WIDE * WIDE, LAYERS * WIDE * WIDE // 2,
        )  # fmt: skip
