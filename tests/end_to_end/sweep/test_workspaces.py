"""Each kernel of torch's databases allocates what its workspace rule says, or the rule asks.

The CPU's allocator reports what an operator allocates besides its results. A kernel that is missing
here needs a name, or a formula, in ``dispatch_flops/operators/formulas/*_workspaces.py``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dispatch_flops import _torch
from dispatch_flops.operators.workspaces import workspace_of
from tests.end_to_end.sweep.opdb import (
    Case,
    call,
    cases_by_name,
    is_differentiable,
    programs_in,
    samples_of,
    seed_all,
    tensors,
)
from tests.end_to_end.sweep.sampling import MOST, one_in

pytestmark = pytest.mark.slow

CASES = cases_by_name()
LARGEST = 2  # samples of each case
NUMBERS = 128  # bytes of the numbers, and of the sizes, that a kernel makes tensors of
# Tensors that are nested without a jagged layout; benchmarks/limits.md states this.
NOT_SEEN = {"aten.to_padded_tensor.default"}


class Comparison(TorchDispatchMode):
    """A mode that compares what each kernel allocates for itself with what its rule says.

    different: of the kernels that differ, the bytes of both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.different: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        said = _said(func, args, kwargs)
        if said is None or _casts_operands(func):
            return func(*args, **kwargs)
        _torch.start_reporting_allocations()
        try:
            out = func(*args, **kwargs)
        finally:
            sizes, _ = _torch.stop_reporting_allocations()
            levels = list(accumulate(sizes, initial=0))
        reported = max(levels) - levels[-1]
        if abs(reported - said) > NUMBERS and str(func) not in NOT_SEEN:
            self.different[str(func)] = (reported, said)
        return out


def _said(func: Any, args: Any, kwargs: Any) -> int | None:
    """Return the bytes that the rule of an operator states; None if it has the allocator asked."""
    rule = workspace_of(func)
    if rule is None:
        return 0
    try:
        return rule.formula(*args, **kwargs)
    except Exception:
        return None


def _casts_operands(func: Any) -> bool:
    """Return True for kernels that may cast each operand; benchmarks/limits.md states this."""
    return torch.Tag.pointwise in func.tags


def programs_of(case: Case) -> Iterator[Callable[[], Any]]:
    """Yield programs that run a case with its largest samples, and with copies that have gaps."""
    if case.kind == "module":
        programs = list(programs_in(case))
        for program in one_in(max(1, len(programs) // MOST), programs, case=case.name):
            # Layers have kernels of their own for inference.
            yield torch.no_grad()(program) if case.variant == "eval" else program
        return
    grad = is_differentiable(case)
    samples = sorted(samples_of(case, grad), key=_elements, reverse=True)
    for sample in samples[:LARGEST]:
        yield lambda sample=sample: call(case, sample, grad)
        with contextlib.suppress(Exception):  # sparse samples, and some of autograd's
            with_gaps = sample.noncontiguous()
            yield lambda sample=with_gaps: call(case, sample, grad)


def _elements(sample: Any) -> int:
    dense = (t for t in tensors((sample.input, sample.args)) if t.layout is torch.strided)
    return sum(tensor.numel() for tensor in dense)


@pytest.mark.parametrize("cases", CASES.values(), ids=[f"{kind}-{name}" for kind, name in CASES])
def test_kernels_allocate_what_their_rules_say(cases: list[Case]) -> None:
    comparison = Comparison()
    seed_all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            if case.variant in ("function", "train", "eval"):
                for program in programs_of(case):
                    with contextlib.suppress(Exception), comparison:  # what raises does so anyway
                        program()
    assert not comparison.different
