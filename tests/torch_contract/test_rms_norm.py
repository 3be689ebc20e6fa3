"""RMS norm is one operator of autograd for a device that has a kernel of it, and several elsewhere.

dispatch_flops gives the meta device one, for runs that are to be as on CUDA
(counting/meta_rms_norm.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dispatch_flops import _torch
from dispatch_flops.counting.meta_rms_norm import FUSED


def _kernel(_keyset: Any, x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))


def _node_of(device: str) -> str:
    x = torch.ones(3, 5, device=device, requires_grad=True)
    return type(F.rms_norm(x, (5,)).grad_fn).__name__


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_norm_is_taken_apart_on_a_device_without_a_kernel(device: str) -> None:
    assert "FusedRmsNorm" not in _node_of(device)


def test_autograd_makes_a_node_of_its_own_for_a_device_with_a_kernel() -> None:
    kernels = _torch.Kernels("aten")
    try:
        kernels.register(FUSED, _kernel, "Meta")
        assert "FusedRmsNorm" in _node_of("meta")
        assert "FusedRmsNorm" not in _node_of("cpu")
    finally:
        kernels.remove()
    assert "FusedRmsNorm" not in _node_of("meta")
