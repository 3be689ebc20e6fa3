"""Composite operators that AOTAutograd traces: kernels in their place, marks on their nodes.

dispatch_flops's counting backend asks the formulas of composite operators with these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dispatch_flops import _torch

LINEAR, MATMUL = torch.ops.aten.linear.default, torch.ops.aten.matmul.default
X, W = torch.ones(7, 3), torch.eye(5, 3)


class Tracing:
    """Marks the nodes of calls of linear and matmul, and keeps what it sees."""

    def __init__(self) -> None:
        self.shapes: list[Any] = []
        self.nodes: list[str] = []
        self.is_in_backward: list[bool] = []
        self.graphs: list[fx.GraphModule] = []

    def kernel(self, op: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _torch.traced_graph() is None:
            return run(*args, **kwargs)
        self.shapes.append([tuple(arg.shape) for arg in args if isinstance(arg, Tensor)])
        self.nodes.append(_torch.interpreted_node()[1])
        self.is_in_backward.append(_torch.graph_task_id() != -1)
        with _torch.marking_nodes(f"mark {len(self.nodes)}", type(op)):
            return run(*args, **kwargs)

    def backend(self, graph: fx.GraphModule, inputs: Any) -> Any:
        def keep(part: fx.GraphModule, _: Any) -> Any:
            self.graphs.append(part)
            run = fx.Interpreter(part).boxed_run
            return make_boxed_func(lambda *inputs: run(list(inputs)))

        with (
            torch._functorch.config.patch(enable_autograd_cache=False),
            _torch.kernels_in_traces([LINEAR, MATMUL], self.kernel),
        ):
            return aot_autograd(fw_compiler=keep)(graph, inputs)

    def marked(self, graph: int, meta: str = "nn_module_stack") -> set[str]:
        """Return the operators of the nodes with a mark."""
        return {
            str(node.target)
            for node in self.graphs[graph].graph.nodes
            if any(key.startswith("mark") for key in node.meta.get(meta) or {})
        }


@pytest.fixture
def tracing(fresh_compiler: None) -> Tracing:
    return Tracing()


def trained(tracing: Tracing, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    weight = W.clone().requires_grad_()
    torch.compile(function, backend=tracing.backend)(X, weight).sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_kernel_in_a_trace_has_the_arguments_and_marks_the_forward_nodes(tracing: Tracing) -> None:
    """dispatch_flops relies on this for a formula's arguments (compile/traced_composites.py)."""
    assert torch.equal(trained(tracing, F.linear), torch.full((5, 3), 7.0))
    assert tracing.shapes[0] == [(7, 3), (5, 3)]
    assert tracing.shapes[1] == [(7, 3), (3, 5)]  # linear without a bias calls matmul
    assert tracing.nodes == ["linear", "linear"]
    assert "aten.mm.default" in tracing.marked(0)
    assert tracing.marked(1) == set()
    assert "aten.mm.default" in tracing.marked(1, "fwd_nn_module_stack")


def test_call_of_autograd_in_backward_marks_its_nodes_alone(tracing: Tracing) -> None:
    """dispatch_flops relies on this to count it in backward (compile/node_stacks.py: own_stack)."""
    trained(tracing, lambda x, w: torch.linalg.inv(w[:3] + torch.eye(3)))
    assert tracing.is_in_backward == [True, True]
    assert set(tracing.nodes) == {""}
    assert tracing.marked(0) == set()
    assert tracing.marked(1) == {"aten.mm.default"}


def test_nodes_that_a_checkpoint_recomputes_are_known(tracing: Tracing) -> None:
    """dispatch_flops relies on this to ask a formula again (compile/node_calls.py)."""
    trained(
        tracing, lambda x, w: checkpoint(lambda x: F.linear(x, w).exp(), x, use_reentrant=False)
    )
    [product] = (
        n for n in tracing.graphs[1].graph.nodes if "recompute" in n.meta and "mm" in n.name
    )
    assert "mark 1" in product.meta["nn_module_stack"]


def test_kernels_in_traces_end_with_the_block_and_do_not_see_eager_calls() -> None:
    """dispatch_flops relies on this to leave other code as it is (compile/traced_composites.py)."""
    seen: list[Any] = []

    def kernel(op: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seen.append(op)
        return run(*args, **kwargs)

    before = dict(LINEAR.py_kernels)
    with _torch.kernels_in_traces([LINEAR], kernel):
        F.linear(X, W)
        assert not seen
        assert LINEAR.py_kernels != before
        with torch._dispatch.python.enable_python_dispatcher():
            F.linear(X, W)
        assert seen == [LINEAR]
    assert LINEAR.py_kernels == before
    with torch._dispatch.python.enable_python_dispatcher():
        F.linear(X, W)
    assert seen == [LINEAR]
