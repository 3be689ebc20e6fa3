"""Module calls that torch.compile traces: their values, and marks on the nodes that they make.

dispatch_flops's counting backend asks the formulas of module classes with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.variables import UnspecializedNNModuleVariable
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint

from dispatch_flops import _torch


class Pair(NamedTuple):
    x: Tensor
    n: int


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5, bias=False)

    def forward(self, x: Tensor, *rest: Any, **more: Any) -> dict[str, Any]:
        return {"pair": Pair(self.layer(x).relu(), 7), "more": [*rest, more["k"]]}


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.part(x, 2, None, k=x.shape[0])["pair"].x
        return found.exp()


class Checkpointed(Whole):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


class Follower:
    """Marks the calls of ``Part`` and keeps what it is told."""

    def __init__(self) -> None:
        self.traces: list[Any] = []
        self.inside: list[tuple[str, ...]] = []
        self.ended: list[tuple[str, Any, bool]] = []
        self.compiled: list[tuple[Any, Any]] = []  # what the backend asked
        self.values: Any = None  # of the compiled function
        self.graphs: list[fx.GraphModule] = []

    def begin(
        self, module: Any, backend: Any, trace: Any, stack: dict[str, Any], inside: tuple[str, ...]
    ) -> str | None:
        if not isinstance(module, Part):
            return None
        self.traces.append(trace)
        self.inside.append(inside)
        return f"mark {len(self.traces)}"

    def end(self, mark: str, read: Callable[[], Any], has_nodes: bool) -> None:
        self.ended.append((mark, read(), has_nodes))

    def backend(self, graph: fx.GraphModule, inputs: Any) -> Any:
        frame = _torch.compiled_frame()
        self.compiled.append((_torch.current_trace(), frame))
        if frame is not None and frame.read is not None:
            names = [name for name in frame.code.co_varnames if name in ("x", "rest", "more")]
            self.values = frame.read(names).value

        def keep(part: fx.GraphModule, _: Any) -> Any:
            self.graphs.append(part)
            run = fx.Interpreter(part).boxed_run
            return make_boxed_func(lambda *inputs: run(list(inputs)))

        with torch._functorch.config.patch(enable_autograd_cache=False):
            return aot_autograd(fw_compiler=keep)(graph, inputs)


@pytest.fixture
def follower(fresh_compiler: None) -> Iterator[Follower]:
    found = Follower()
    before = UnspecializedNNModuleVariable.call_function  # a counting backend may be alive
    _torch.follow_traced_calls(None)
    _torch.follow_traced_calls(found)
    yield found
    UnspecializedNNModuleVariable.call_function = before  # type: ignore[method-assign]


def marked(graph: fx.GraphModule) -> set[str]:
    nodes = graph.graph.nodes
    return {str(n.target) for n in nodes if "mark 1" in (n.meta.get("nn_module_stack") or {})}


def test_traced_call_is_followed_with_the_structure_of_its_values(follower: Follower) -> None:
    """dispatch_flops relies on this for a formula's arguments (compile/call_recorder.py)."""
    torch.compile(Whole(), backend=follower.backend)(torch.ones(2, 3))
    [(_, traced, has_nodes)] = follower.ended
    args, kwargs, out = traced.value
    assert [arg if isinstance(arg, int) else type(arg) for arg in args[1:]] == [2, type(None)]
    assert (args[0].shape, kwargs, has_nodes) == ((2, 3), {"k": 2}, True)
    assert isinstance(args[0], torch._subclasses.FakeTensor)
    assert type(out["pair"]) is Pair
    assert (out["pair"].x.shape, out["pair"].n, out["more"]) == ((2, 5), 7, [2, None, 2])
    assert {id(part) for part, _ in traced.leaves} == {id(args[0]), id(out["pair"].x)}


def test_sizes_of_a_traced_call_are_symbols_of_the_graph(follower: Follower) -> None:
    """dispatch_flops relies on this for dynamic shapes (compile/opaque_calls.py)."""
    torch.compile(Whole(), backend=follower.backend, dynamic=True)(torch.ones(2, 3))
    args, kwargs, _ = follower.ended[0][1].value
    inputs = follower.graphs[0].graph.find_nodes(op="placeholder")
    symbols = {str(node.meta["val"]) for node in inputs}
    assert isinstance(args[0].shape[0], torch.SymInt)
    assert str(args[0].shape[0]) in symbols
    assert str(kwargs["k"].node.expr) in symbols


def test_mark_of_a_traced_call_is_on_its_forward_and_recomputed_nodes(follower: Follower) -> None:
    """dispatch_flops relies on this to leave the nodes out (compile/opaque_regions.py)."""
    x = torch.ones(2, 3, requires_grad=True)
    torch.compile(Checkpointed(), backend=follower.backend)(x).sum().backward()
    forward, backward = follower.graphs
    assert {"aten.mm.default", "aten.relu.default"} <= marked(forward)
    assert "aten.exp.default" not in marked(forward)
    assert {"aten.mm.default", "aten.relu.default"} <= marked(backward)
    assert "tag_activation_checkpoint" in follower.inside[0]


def test_trace_of_a_followed_call_is_that_of_the_backend(follower: Follower) -> None:
    """dispatch_flops relies on this to find a graph's calls (compile/call_recorder.py)."""
    torch.compile(Whole(), backend=follower.backend)(torch.ones(2, 3))
    assert follower.compiled[0][0] is follower.traces[-1]


def test_compiled_frame_has_the_values_of_the_function(follower: Follower) -> None:
    """dispatch_flops relies on this for a module that is compiled itself
    (compile/opaque_regions.py).
    """
    model = Part()
    torch.compile(model, backend=follower.backend)(torch.ones(2, 3), 5, k=3)
    frame = follower.compiled[0][1]
    assert frame.code is Part.forward.__code__
    assert frame.variables["self"] is model
    (x, rest, more), out = follower.values
    assert (x.shape, rest, more) == ((2, 3), (5,), {"k": 3})
    assert (out["pair"].n, out["more"]) == (7, [5, 3])


def test_compiled_frame_of_a_function_with_a_graph_break_has_no_values(follower: Follower) -> None:
    """dispatch_flops relies on this for calls that a graph break splits
    (compile/opaque_regions.py).
    """

    def function(x: Tensor) -> Tensor:
        x = x.exp()
        torch._dynamo.graph_break()
        return x.exp()

    torch.compile(function, backend=follower.backend)(torch.ones(2, 3))
    first, rest = (frame for _, frame in follower.compiled)
    assert (first.code is function.__code__, first.read) == (True, None)
    assert rest.code.co_name.startswith(_torch.RESUMING)


def test_wrappers_of_torch_func_are_taken_off() -> None:
    """dispatch_flops relies on this for formulas of module classes in gradients of torch.func
    (counting/opaque_modules.py).
    """
    x = torch.ones(2, 3)
    found: list[Any] = []

    def function(x: Tensor) -> Tensor:
        with pytest.raises(NotImplementedError):
            x.untyped_storage()
        found.append(_torch.without_gradient_wrappers({"x": [x]})["x"][0])
        found.append(_torch.is_in_vmap())
        return x.sum()

    torch.func.grad(function)(x)
    assert found[0].data_ptr() == x.data_ptr()
    assert found[1] is False


def test_samples_of_vmap_are_known() -> None:
    """dispatch_flops relies on this where a formula would be given the shapes of one sample
    (counting/formulas_not_asked.py: ``is_in_vmap``).
    """
    found: list[bool] = []

    def function(x: Tensor) -> Tensor:
        found.extend((_torch.is_in_vmap(), _torch.is_batched(x)))
        return x * 2

    torch.func.vmap(torch.func.grad(lambda x: function(x).sum()))(torch.ones(2, 3))
    assert found == [True, True]
    assert not _torch.is_in_vmap()
    assert not _torch.is_batched(torch.ones(2))
