"""FLOPs of a function of one score, which flex_attention applies to each pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import TorchDispatchMode
from dispatch_flops.operators.formulas._arithmetic import cost_of

_INDICES = 4  # batch, head, query, key


class _Flops(TorchDispatchMode):
    """Sums the FLOPs of the operators that run in the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += cost_of(func, *args, out=out, **(kwargs or {})).flops
        return out


def flops_per_score(
    function: Callable[..., Any] | None,
    q: torch.Tensor,
    buffers: Sequence[Any] = (),
    *,
    takes_grad: bool = False,
) -> int:
    """Return the FLOPs of ``function(score, batch, head, query, key, *buffers)``; 0 for None.

    q: queries, whose device and fake mode the arguments have. takes_grad: the gradient of the score
    comes before the buffers. Raises LookupError for an operator without a formula.
    """
    if function is None:
        return 0
    with _torch.modes_disabled(), torch.no_grad(), _torch.fakes_of(q):
        # One element each: a tensor without dimensions would be read where it is an index.
        scores = [torch.ones(1, device=q.device) for _ in range(1 + takes_grad)]
        indices = [torch.zeros(1, dtype=torch.int32, device=q.device) for _ in range(_INDICES)]
        counted = _Flops()
        with counted:
            function(scores[0], *indices, *scores[1:], *buffers)
    return counted.flops
