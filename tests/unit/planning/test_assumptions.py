"""What plans say of the peaks of memory that they are based on."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from dispatch_flops.analysis import Machine
from dispatch_flops.analysis.machines import Link
from dispatch_flops.planning.assumptions import (
    of_communication,
    of_memory,
    of_sharding,
    of_unknown_costs,
)
from dispatch_flops.profile import MemoryProfile, OpTotal
from tests.helpers.profiling import profile_of

EXACT = MemoryProfile(devices=())
BOUND = MemoryProfile(devices=(), unseen=("aten.convolution.default",))
APPROXIMATE = MemoryProfile(devices=(), decomposed=("aten.lstm.input",))


def test_sharding_of_a_model_is_that_of_the_plan_and_of_a_job_its_own() -> None:
    mesh = {"pp": 2, "dp": 3, "tp": 5}
    ranks, tp, dp, samples, waiting = of_sharding(mesh, is_job=False)
    assert ranks.startswith("30 devices, mesh pp 2 x dp 3 x tp 5;")
    assert tp.startswith("tp: parallelize_module") and dp.startswith("dp: FSDP2")
    assert dp.endswith(
        "no mixed precision: gathered, computed and reduced in the parameters' dtype"
    )
    assert samples == "ranks have samples of their own along dp"
    assert "pipeline stage" in waiting
    _, own, *_ = of_sharding(mesh, is_job=True)
    assert own.startswith("the job builds, shards and runs its model")
    assert list(of_sharding(mesh, is_job=True))[2:] == [samples, waiting]


def test_sharding_in_mixed_precision_names_its_dtype() -> None:
    (_, dp, _) = of_sharding({"dp": 2}, is_job=False, dtype=torch.bfloat16, mixed_precision=True)
    assert "gathered and computed in bfloat16, reduced in float32" in dp


def test_samples_along_a_dimension_of_another_name_are_not_known() -> None:
    assert len(list(of_sharding({"dp": 2, "cp": 4}, is_job=True))) == 2


def test_exact_peaks_are_neither_bounds_nor_approximate() -> None:
    (rounding,) = of_memory([EXACT, None])
    assert rounding.startswith("memory: blocks rounded to 512 bytes")


def test_peaks_that_are_not_exact_are_said_to_be() -> None:
    approximate, bound, _ = of_memory([EXACT, BOUND, APPROXIMATE])
    assert approximate.startswith("memory is approximate: aten.lstm.input ran on the meta device")
    assert bound == (
        "memory is a lower bound: an unknown workspace is allocated by kernels of "
        "aten.convolution.default"
    )


def test_operators_of_unknown_cost_are_named() -> None:
    run = profile_of(nn.Linear(3, 5), torch.ones(2, 3))
    unknown = OpTotal(op="lib.a", phase="forward", calls=1, cost=None, uncounted=1)
    bound = dataclasses.replace(run, root=dataclasses.replace(run.root, ops=(unknown,)))
    (text,) = of_unknown_costs([run, bound])
    assert text.startswith("no cost is known for lib.a: FLOPs, bytes and times are lower bounds")
    assert list(of_unknown_costs([run])) == []


def test_latency_of_links_is_stated_or_said_to_be_left_out() -> None:
    inner = Link(bytes_per_s=17e9, latency_s=3e-6, name="inner")
    machine = Machine(name="mine", node_link=inner, network_link=Link(bytes_per_s=5e9))
    links, *_ = of_communication(machine)
    assert "within: inner, 17 GB/s, 3 us;" in links
    assert links.endswith("between, of each device: 5 GB/s, latency not known, left out")


def test_latency_of_zero_is_a_known_one() -> None:
    links, *_ = of_communication(Machine(name="mine", node_link=Link(bytes_per_s=7e9, latency_s=0)))
    assert "within: 7 GB/s, 0 us;" in links
