"""Number of tokens that reach each expert of a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from dispatch_flops.counting.thread_state import NOT_CALLS, OpenCall, ThreadState
from dispatch_flops.operators.tensors import tensors_in, untraced


def count_tokens(thread: ThreadState, expert: OpenCall, args: Any, output: Any) -> None:
    """Count the rows that entered an expert.

    Hooks do not see keyword arguments: without positional ones, the rows of the output count.
    """
    if expert.named is None or expert.named.is_wrapper:
        return
    if expert.module_phase is not None and expert.module_phase.phase not in NOT_CALLS:
        with untraced():
            rows = _rows((*args, *tensors_in(output)))
        if type(rows) is int:  # under torch.export it is symbolic
            thread.tokens[expert.named.fqn] += rows


def _rows(values: Iterable[Any]) -> int | None:
    """Return the product of all dimensions but the last of the first tensor among ``values``."""
    for value in values:
        if isinstance(value, torch.Tensor) and not value.is_nested:
            return math.prod(value.shape[:-1])
    return None
