"""Inductor: where its compiler can be put in another's hands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def boxed(graph: fx.GraphModule) -> Callable[..., Any]:
    """What runs the graph, with no more than the mark by which inductor knows boxed code."""
    interpreter = fx.Interpreter(graph)

    def run(inputs: list[Any]) -> Any:
        return interpreter.boxed_run(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def test_compile_fx_gives_inner_compile_both_graphs_and_says_which_is_backward() -> None:
    """dispatch_flops relies on this for counting what inductor compiles (compile/compilers.py:
    ``_compile_with_inductor``): ``inner_compile=`` and its keyword ``is_backward``.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    parts: list[tuple[bool, int]] = []

    def inner(part: fx.GraphModule, inputs: Any, **kwargs: Any) -> Callable[..., Any]:
        found = [n for n in part.graph.nodes if n.target is torch.ops.aten.mm.default]
        parts.append((bool(kwargs.get("is_backward")), len(found)))
        return boxed(part)

    def backend(graph: fx.GraphModule, example_inputs: Any) -> Any:
        with config.patch(enable_autograd_cache=False):
            return compile_fx(
                graph, example_inputs, inner_compile=inner, config_patches={"max_autotune": False}
            )

    weight = torch.ones(3, 3, requires_grad=True)
    torch.compile(lambda x: (x @ weight).sin(), backend=backend)(torch.ones(2, 3)).sum().backward()
    assert parts == [(False, 1), (True, 1)], f"inner_compile was given {parts}"
    assert weight.grad is not None


def test_compile_fx_inner_takes_the_graph_inputs_and_what_inner_compile_was_given() -> None:
    """dispatch_flops relies on this for handing the graph on to the real compiler
    (compile/compilers.py: ``_compile_with_inductor``).
    """
    from torch._inductor.compile_fx import compile_fx_inner

    parameters = inspect.signature(compile_fx_inner).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert [kind in positional for kind in kinds[:2]] == [True, True]
    assert inspect.Parameter.VAR_KEYWORD in kinds, f"compile_fx_inner now takes {parameters}"


def test_autograd_cache_can_be_turned_off_for_a_while() -> None:
    """dispatch_flops relies on this for counting at all: a hit in this cache hands back code that
    does not count (compile/compilers.py).
    """
    from torch._functorch import config

    before = config.enable_autograd_cache
    with config.patch(enable_autograd_cache=False):
        assert config.enable_autograd_cache is False
    assert config.enable_autograd_cache == before


def test_list_mode_options_knows_the_modes_of_torch_compile() -> None:
    """dispatch_flops relies on this for ``mode=`` (compile/compilers.py: ``_options_of``)."""
    from torch._inductor import list_mode_options

    assert list_mode_options("max-autotune")["max_autotune"] is True
    assert list_mode_options("reduce-overhead")["triton.cudagraphs"] is True
    with pytest.raises(RuntimeError):
        list_mode_options("fastest")


def test_options_given_to_torch_compile_reach_a_backend_as_keywords() -> None:
    """dispatch_flops relies on this for ``torch.compile(model, backend=..., options=...)``
    (compile/backend.py: ``CountingBackend.__call__``).
    """
    given: list[dict[str, Any]] = []

    def backend(graph: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        given.append(kwargs)
        return graph

    def function(x: Tensor) -> Tensor:
        return x + 1

    torch.compile(function, backend=backend, options={"max_autotune": False})(torch.ones(2))
    assert given == [{"options": {"max_autotune": False}}]


def test_original_aten_of_a_product_taken_apart_names_the_product() -> None:
    """dispatch_flops relies on this for the MACs of products that inductor takes apart
    (compile/contractions.py).
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    found: list[tuple[str, str]] = []

    def inner(part: fx.GraphModule, inputs: Any, **kwargs: Any) -> Callable[..., Any]:
        nodes = part.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        nodes += part.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
        found.extend((str(node.target), str(node.meta.get("original_aten"))) for node in nodes)
        return boxed(part)

    def backend(graph: fx.GraphModule, example_inputs: Any) -> Any:
        with config.patch(enable_autograd_cache=False):
            return compile_fx(graph, example_inputs, inner_compile=inner)

    torch.compile(torch.bmm, backend=backend)(torch.ones(2, 1, 3), torch.ones(2, 3, 1))
    assert found == [
        ("aten.mul.Tensor", "aten.bmm.default"),
        ("aten.sum.dim_IntList", "aten.bmm.default"),
    ]
