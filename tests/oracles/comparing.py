"""Comparison of a call with its definition, in counts and in values.

Also of the same call in other modes and on other devices, which must cost the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.helpers.profiling import profile_of
from tests.oracles.counting import Count, values

size = st.sampled_from([1, 2, 3, 4, 5])
size_or_zero = st.sampled_from([0, 1, 2, 3, 5])
flag = st.booleans()


def examples(n: int) -> settings:
    """Return settings of ``n`` examples, the same on every run."""
    return settings(
        max_examples=n,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def tensor(
    *shape: int, grad: bool = False, dtype: torch.dtype = torch.float64, seed: int = 0
) -> torch.Tensor:
    """Return a tensor of small whole numbers, so that float sums of their products are exact."""
    n = math.prod(shape)
    flat = (torch.arange(n) * 7 + seed * 3) % 5 - 2
    out = flat.to(dtype)
    if dtype.is_complex:
        out = out + 1j * ((torch.arange(n) * 3 + seed) % 7 - 3).to(dtype)
    return out.reshape(shape).requires_grad_(grad)


def macs_of(call: Callable[[], Any]) -> tuple[int, int]:
    """Return (forward, backward) MACs of a call, differentiated if it can be."""

    def step() -> None:
        outs = [o for o in tree_leaves(call()) if isinstance(o, torch.Tensor)]
        outs = [o for o in outs if o.requires_grad]
        if outs:
            loss = torch.stack([o.sum() for o in outs]).sum()
            (loss.real if loss.is_complex() else loss).backward()

    profile = profile_of(step)
    assert profile.uncounted_ops() == {}
    assert profile.formula_errors() == {}
    return profile.total("forward").macs, profile.total("backward").macs


def same_values(result: Any, expected: Any) -> None:
    """Assert that the definition computes what torch computes."""
    torch.testing.assert_close(
        result.detach(), values(expected).to(result.dtype), rtol=1e-5, atol=1e-6
    )


def check(
    call: Callable[[], Any],
    expected: Count,
    *,
    backward: int | None = None,
    only_macs: bool = False,
) -> None:
    """Assert that the call computes what the definition computes, at the definition's cost.

    backward: MACs of the gradients where torch computes them in another way.
    only_macs: compare only MACs, as torch uses other elementwise operations.
    """
    same_values(call(), expected.result)
    wanted = expected.backward_macs if backward is None else backward
    assert macs_of(call) == (expected.macs, wanted)
    if not only_macs:
        assert profile_of(call).total("forward").flops == expected.flops


def forward_macs(call: Callable[..., Any], *args: Any) -> int:
    """Return only the forward MACs."""
    return profile_of(call, *args).total("forward").macs


def cost_everywhere(call: Callable[..., Any], *args: Any) -> set[int]:
    """Return the forward MACs of a call in every mode: a set of one number if all agree.

    Modes: with gradients, without, in inference mode, on meta and on fake tensors.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    on_meta = tree_map_only(torch.Tensor, lambda t: t.detach().to("meta"), args)
    on_fake = tree_map_only(torch.Tensor, lambda t: fake.from_tensor(t.detach()), args)
    found = {forward_macs(call, *args), forward_macs(call, *on_meta)}
    with torch.no_grad():
        found.add(forward_macs(call, *args))
    with torch.inference_mode():
        found.add(forward_macs(call, *args))
    with fake:
        found.add(forward_macs(call, *on_fake))
    return found
