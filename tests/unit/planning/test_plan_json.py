"""Plans as JSON: figures are those of the objects, and products of the sizes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import Machine, plan
from dispatch_flops.analysis.machines import Link
from dispatch_flops.planning.generation import plan_generate
from tests.helpers.plain_data import differences, figures, leaves

IN, OUT, F32, BATCH = 256, 384, 4, 128  # multiples of the 512 bytes that blocks are rounded to
WEIGHT = IN * OUT
PEAK, BANDWIDTH, CAPACITY = 1e9, 1e7, 10_000_000
MACHINE = Machine(
    name="test",
    flops_per_s={"float32": PEAK},
    bytes_per_s=BANDWIDTH,
    memory_bytes=CAPACITY,
    devices_per_node=2,
    node_link=Link(bytes_per_s=7e6),
)
COUNTS = (
    "macs", "flops", "bytes_read", "bytes_written", "bytes_total", "total_params", "local_params",
    "parameters", "operators", "calls", "devices", "samples", "tokens", "batch", "seq",
)  # fmt: skip


def linear(batch: int, seq: int = 1) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Linear(IN, OUT, bias=False), (torch.ones(batch * seq, IN),)


def check_types(data: Any) -> None:
    """Check that bytes and counts are ints and that booleans say what they are about."""
    for name, value in leaves(data):
        if (name.endswith("_bytes") or name in COUNTS) and value is not None:
            assert type(value) is int or (name, value) == ("flops", "all"), name
        if name.startswith("is_") or name in ("fits", "largest_batch_is_lower_bound"):
            assert type(value) is bool, name


def test_json_of_a_forward_pass_has_the_products_of_its_sizes() -> None:
    planned = plan(linear, MACHINE, sizes={"batch": [BATCH, 64], "seq": 2}, optimizer=None)
    data = json.loads(planned.to_json())
    assert (data["schema"], data["version"]) == ("dispatch_flops.plan", 1)
    assert data["machine"]["name"] == "test" and data["machine"]["memory_bytes"] == CAPACITY
    assert [step["sizes"] for step in data["steps"]] == [
        {"batch": BATCH, "seq": 2}, {"batch": 64, "seq": 2},
    ]  # fmt: skip
    step, rows = data["steps"][0], 2 * BATCH
    held = (WEIGHT + rows * IN + rows * OUT) * F32
    assert step["memory_by_role"]["parameters"] == WEIGHT * F32
    assert step["memory_by_role"]["inputs"] == rows * IN * F32
    assert step["peak_bytes"] == held and step["headroom_bytes"] == CAPACITY - held
    assert step["fits"] is True and step["devices"] == 1
    assert step["largest_batch"] == (CAPACITY - WEIGHT * F32) // (2 * (IN + OUT) * F32)
    assert step["profile"]["total_params"] == WEIGHT
    assert step["profile"]["total"]["macs"] == rows * WEIGHT
    assert step["profile"]["total"]["bytes_total"] == held
    assert step["bounds"]["compute_s"] == pytest.approx(2 * rows * WEIGHT / PEAK)
    assert step["bounds"]["least_s"] == pytest.approx(held / BANDWIDTH)
    assert step["samples_per_s"][0] == pytest.approx(rows / (held / BANDWIDTH))


def test_json_of_a_training_step_is_that_of_the_objects() -> None:
    planned = plan(linear, MACHINE, sizes={"batch": BATCH}, search_batch=False)
    data = json.loads(planned.to_json(indent=2))
    assert data == planned.to_dict()
    check_types(data)
    del data["schema"], data["version"]
    assert [*differences(data, planned)] == []
    (row,), (step,) = data["steps"], planned.steps
    assert row["memory_by_role"]["gradients"] == WEIGHT * F32
    assert row.keys() == figures(step) and row["bounds"].keys() == figures(step.bounds)


def test_json_of_a_plan_on_a_mesh_has_its_ranks_and_their_communication() -> None:
    planned = plan(
        linear, MACHINE, sizes={"batch": 3}, mesh={"dp": 2}, optimizer="sgd", search_batch=False
    )
    data = json.loads(planned.to_json())
    check_types(data)
    del data["schema"], data["version"]
    assert [*differences(data, planned)] == []
    (step,) = data["steps"]
    cluster = step["cluster"]
    assert cluster.keys() == figures(planned.steps[0].cluster)
    assert cluster["mesh"] == {"dp": 2} and step["devices"] == cluster["devices"] == 2
    assert cluster["parameters"] == WEIGHT
    assert [(rank["rank"], rank["ranks"]) for rank in cluster["ranks"]] == [(0, 2)]
    assert cluster["ranks"][0]["profile"]["local_params"] == WEIGHT // 2
    assert cluster["fullest"] == cluster["slowest"] == 0
    (over_dp,) = cluster["communication"]
    gathered, reduced = WEIGHT * F32, WEIGHT * F32
    assert (over_dp["dim"], over_dp["size"], over_dp["reach"]) == ("dp", 2, "node")
    assert over_dp["cost"]["bus_bytes"] == (gathered + reduced) // 2
    assert over_dp["seconds"] == pytest.approx((gathered + reduced) // 2 / 7e6)
    assert over_dp["link"]["latency_s"] is None


def test_json_of_generation_is_that_of_the_objects() -> None:
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, batch, prompt, new = 2, 12, 3, 1, 5
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=3, vocab_size=17, n_positions=64)
    planned = plan_generate(
        lambda: GPT2LMHeadModel(config), MACHINE, search_batch=False,
        sizes={"batch": batch, "prompt": prompt, "new": new}, sequences=["2x1@7+5@0"],
    )  # fmt: skip
    data = json.loads(planned.to_json())
    assert (data.pop("schema"), data.pop("version")) == ("dispatch_flops.generation_plan", 1)
    check_types(data)
    for choice, found in zip(data["choices"], planned.choices, strict=True):
        assert choice.keys() == figures(found)
        assert choice["decode"].keys() == figures(found.decode)
        names, highest = choice.pop("passes"), choice.pop("highest")
        assert [getattr(found, name) for name in names] == list(found.passes)
        assert getattr(found, highest) is found.highest
    assert [*differences(data, planned)] == []
    equal, packed = data["choices"]
    assert equal["sizes"] == {"batch": batch, "prompt": prompt, "new": new}
    assert equal["cache_bytes"] == 2 * layers * width * batch * (prompt + new - 1) * F32
    assert packed["cache_bytes"] == 2 * layers * width * (2 * 8 + 5) * F32
    assert packed["prefill"] is None and packed["last"] is None
    assert equal["steps"] == [new - 1, new - 1]
    assert equal["decode"]["reading_s"] == pytest.approx(equal["decode"]["read_bytes"] / BANDWIDTH)
