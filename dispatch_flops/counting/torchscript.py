"""Kernels of TorchScript's own, which run no operators: those that it fuses, and oneDNN's.

On CUDA it fuses element-wise operators by default, once a function has run twice. On the CPU
``torch.jit.optimize_for_inference`` and ``enable_onednn_fusion`` replace convolutions and products.
No setting makes a graph that has such kernels run by its operators again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dispatch_flops.counting.aggregation import RecordedCalls

_KERNELS = ("prim::TensorExprGroup", "prim::oneDNNFusionGroup", "prim::mkldnn_convolution")
# A graph that is differentiated hides its kernels, whose results this operator makes room for.
_DIFFERENTIATED, _ROOM = "prim::DifferentiableGraph", "aten.empty_strided.default"


def forget_last_graph() -> None:
    """Have TorchScript run a graph without such kernels, if it has run any in this thread."""
    if torch.jit.last_executed_optimized_graph() is not None:
        # oneDNN's fuser ends the process where it optimizes a graph without tensors.
        with torch.jit.optimized_execution(False):
            _nothing()()


@functools.cache
def _nothing() -> Callable[[], Any]:
    unit: Any = torch.jit.CompilationUnit("def nothing() -> int:\n    return 0\n")
    nothing: Callable[[], Any] = unit.nothing
    return nothing


def uncounted_kernels(calls: RecordedCalls) -> tuple[str, ...]:
    """Return the sentence on such kernels, if the graph that this thread ran last has some."""
    graph: Any = torch.jit.last_executed_optimized_graph()
    if graph is None:
        return ()
    has = graph.findNode  # the graph's text would have constants converted, by operators
    if not (any(map(has, _KERNELS)) or (has(_DIFFERENTIATED) and calls.ran(_ROOM))):
        return ()
    return (
        "TorchScript ran kernels of its own, into which it fuses operators: their work counts as "
        "0; count the model in Python, as with the environment variable PYTORCH_JIT=0",
    )
