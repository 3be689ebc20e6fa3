"""Composite operators with a formula in compiled functions of torch.func, as closed forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dispatch_flops.compile import counting_backend
from dispatch_flops.errors import UncountedWarning
from tests.helpers.composites import COMPOSITES, S, aten, stated

pytestmark = pytest.mark.slow

EACH = pytest.mark.parametrize("op", [op for op in COMPOSITES if op is not aten.matmul], ids=str)


def costs(op: Any, function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return the costs of a compiled function by phase."""
    backend = counting_backend("aot_eager", custom_mapping={op: stated})
    torch.compile(function, backend=backend)(x)
    return backend.step().costs


def gradient_of(call: Callable[[Tensor], Tensor]) -> Any:
    return torch.func.grad(lambda x: call(x).sum())


@EACH
def test_composite_in_a_compiled_gradient_of_torch_func_counts_by_its_formula(op: Any) -> None:
    call, shape, elements, macs = COMPOSITES[op]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncountedWarning)
        found = costs(op, gradient_of(call), torch.ones(shape))
    assert found["forward"].macs == 17 * elements
    assert found["backward"].macs == macs


@EACH
@pytest.mark.parametrize("kind", ["samples", "gradient of each sample"])
def test_composite_in_a_compiled_vmap_counts_by_its_operators_with_a_warning(
    op: Any, kind: str
) -> None:
    call, shape, _, macs = COMPOSITES[op]
    function = torch.vmap(call if kind == "samples" else gradient_of(call))
    with pytest.warns(UncountedWarning, match=f"{op} are counted; .*a sample of torch.vmap"):
        found = costs(op, function, torch.ones(S, *shape))
    assert found["forward"].macs == S * macs


@EACH
def test_composite_with_tangents_counts_by_its_operators_with_a_warning(op: Any) -> None:
    call, shape, _, macs = COMPOSITES[op]
    function = lambda x: torch.func.jvp(call, (x,), (x,))  # noqa: E731
    with pytest.warns(UncountedWarning, match=f"{op} are counted; .*forward-mode autograd"):
        found = costs(op, function, torch.ones(shape))
    # of the result, of the tangent, and of the weight's tangent, which is zeros
    assert found["forward"].macs == 3 * macs
