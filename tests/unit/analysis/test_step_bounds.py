"""Bounds of a step beside the roofline of its operators."""

from __future__ import annotations

import pytest

from dispatch_flops.analysis.efficiency import node_roofline
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.step_bounds import step_bounds
from dispatch_flops.profile import Profile
from tests.helpers.trees import module, op

MACHINE = Machine(name="unit", flops_per_s={"float32": 2.0}, bytes_per_s=1.0)


def net(*operators: tuple[int, int]) -> Profile:
    """A model whose operators take these seconds of computing and of moving."""
    ops = (
        op(f"aten.op{i}.default", macs=macs, n_bytes=(n_bytes, 0), calls=1)
        for i, (macs, n_bytes) in enumerate(operators)
    )
    return Profile(root=module("Net", ops=tuple(ops)))


@pytest.mark.parametrize(
    ("operators", "seconds", "bound"),
    [
        # 5 s of computing and 6 s of moving, though all FLOPs together would take 8 s
        (((5, 1), (3, 6)), 11, "memory"),
        (((7, 1), (3, 6)), 13, "compute"),
        # equal parts: computing comes first
        (((6, 1), (3, 6)), 12, "compute"),
    ],
)
def test_step_is_bound_by_what_bounds_the_roofline_of_its_operators(
    operators: tuple[tuple[int, int], ...], seconds: int, bound: str
) -> None:
    profile = net(*operators)
    bounds, limit = step_bounds(profile, MACHINE), node_roofline(profile.root, MACHINE)
    assert bounds.kernels_s == limit.attainable_s == seconds
    assert bounds.bound == limit.bound == bound
