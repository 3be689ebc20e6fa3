"""Errors name a wrong argument by the beginning of its value, however long the value is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import (
    FlopCounterMode,
    FlopMeter,
    FlopsProfiler,
    Machine,
    StepProfiler,
    analysis,
    attention_cost,
    counting_backend,
    get_model_profile,
    matmul_cost,
    measure_machine,
    overridden,
    plan,
    profile_model,
    register_flops,
    register_workspace,
    unregister_flops,
)
from dispatch_flops.distributed import ClusterProfile, gather, simulate
from dispatch_flops.errors import DispatchFlopsError
from dispatch_flops.integrations.testing import assert_flops
from dispatch_flops.profile import ModuleNode, Profile
from dispatch_flops.renderers import View

LONG: Any = ["ab"] * 9999
MODEL = nn.Linear(3, 5)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
PROFILE = Profile(root=ModuleNode(fqn="", class_name="Net"))
CLUSTER = ClusterProfile(profiles={0: PROFILE}, world_size=1)
MACHINE = Machine(name="board")


def build(batch: int) -> Any:
    return nn.Linear(3, 5), (torch.ones(batch, 3),)


def job(mesh: Any) -> Any:
    return lambda: None


def enter(block: Any) -> None:
    with block:
        pass


CALLS: dict[str, Callable[[], object]] = {
    **{
        f"FlopCounterMode {name}": lambda name=name: FlopCounterMode(MODEL, **{name: LONG})
        for name in ("depth", "causal", "flops", "target", "meta_value", "memory")
    },
    "FlopCounterMode memory_rounding": lambda: FlopCounterMode(MODEL, memory_rounding=LONG),
    "FlopCounterMode custom_mapping": lambda: FlopCounterMode(
        MODEL, custom_mapping={torch.ops.aten.mm: LONG}
    ),
    **{
        f"profile_model {name}": lambda name=name: profile_model(MODEL, **{name: LONG})
        for name in ("input_shape", "mode", "warm_up", "repeats", "device", "ignore_modules")
    },
    "profile_model input_shape of ints": lambda: profile_model(MODEL, [2**40] * 9999),
    "get_model_profile top_modules": lambda: get_model_profile(MODEL, (2, 3), top_modules=LONG),
    "FlopMeter verify_every": lambda: FlopMeter(MODEL, verify_every=LONG),
    "FlopMeter.step": lambda: FlopMeter(MODEL).step(LONG),
    "FlopsProfiler": lambda: FlopsProfiler(MODEL, None, LONG),
    "StepProfiler": lambda: StepProfiler(MODEL, OPTIMIZER, {"flops_profiler": LONG}),
    "Profile.total": lambda: PROFILE.total(LONG),
    "Profile.comm_by": lambda: PROFILE.comm_by(LONG),
    "ClusterProfile.along": lambda: CLUSTER.along(str(LONG)),
    "ClusterProfile.value": lambda: CLUSTER.value(0, LONG),
    "gather dst": lambda: gather(PROFILE, LONG),
    "simulate mesh": lambda: simulate(job, LONG),
    "simulate size": lambda: simulate(job, {"dp": LONG}),
    "simulate rank": lambda: simulate(job, {"dp": 2}, [str(LONG)]),  # type: ignore[list-item]
    "simulate ranks": lambda: simulate(job, {"dp": 2}, str(LONG)),  # type: ignore[arg-type]
    "simulate timeout_s": lambda: simulate(job, {"dp": 2}, timeout_s=LONG),
    **{
        f"plan {name}": lambda name=name: plan(build, MACHINE, **{name: LONG})
        for name in ("sizes", "dtype", "mesh", "optimizer", "host_s_per_operator")
    },
    "plan machine": lambda: plan(build, LONG),
    "measure_machine device": lambda: measure_machine(LONG),
    "measure_machine dtypes": lambda: measure_machine(dtypes=LONG),
    "measure_machine size": lambda: measure_machine(size=LONG),
    "measure_machine families": lambda: measure_machine(families=LONG),
    "register_flops targets": lambda: register_flops(LONG)(lambda *_, out: 0),
    "register_flops computes_in": lambda: register_flops("short::errors", computes_in=LONG)(
        lambda *_, out: 0
    ),
    "register_workspace": lambda: register_workspace(LONG)(lambda *_, out: 0),
    "unregister_flops": lambda: unregister_flops(str(LONG)),
    "overridden": lambda: enter(overridden({"aten::mm": LONG})),
    "matmul_cost": lambda: matmul_cost(LONG, (3, 5)),
    "attention_cost": lambda: attention_cost(*[torch.ones(2, 3, 5, 7)] * 3, layout=LONG),
    "counting_backend model": lambda: counting_backend("eager", LONG),
    "counting_backend backend": lambda: counting_backend(str(LONG)),
    "counting_backend mode": lambda: counting_backend("inductor", mode=LONG),
    "diff rename": lambda: analysis.diff(PROFILE, PROFILE, rename={"": LONG}),
    "top_modules key": lambda: analysis.top_modules(PROFILE, LONG),
    "top_modules k": lambda: analysis.top_modules(PROFILE, "flops", LONG),
    "mfu definition": lambda: analysis.mfu(PROFILE, MACHINE, 3.0, definition=LONG),
    **{
        f"View {name}": lambda name=name: View(**{name: LONG})
        for name in ("top", "table", "style", "by", "step", "machine", "title", "sort", "width")
    },
    "View recompute_fwd_factor": lambda: View(recompute_fwd_factor=LONG),
    "assert_flops macs": lambda: assert_flops(MODEL, [torch.ones(2, 3)], macs=LONG),
    "assert_flops rtol": lambda: assert_flops(MODEL, [torch.ones(2, 3)], macs=30, rtol=LONG),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_error_does_not_print_a_long_value_in_full(call: Callable[[], object]) -> None:
    with pytest.raises(DispatchFlopsError) as caught:
        call()
    assert len(str(caught.value)) < 900  # the longest lists the known machines
