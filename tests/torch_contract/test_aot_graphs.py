"""The compiler's graphs: how a backend gets them, and what their nodes say of themselves.

dispatch_flops's counting backend prices the graphs that AOTAutograd hands to a compiler, and
finds module and phase of each node in its ``meta``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

# torch.compile's own, where a graph breaks
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


class Graphs:
    """A backend that keeps what torch.compile and AOTAutograd give it, and interprets it."""

    def __init__(self, **options: Any) -> None:
        self.top: list[fx.GraphModule] = []
        self.forward: list[fx.GraphModule] = []
        self.backward: list[fx.GraphModule] = []
        self.inputs: list[list[tuple[str, Any]]] = []
        self.boxed: list[bool] = []
        self.options = options

    def __call__(self, graph: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch import config
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        self.top.append(graph)
        self.inputs.append(list(inputs_of(graph)))
        with config.patch(enable_autograd_cache=False):
            return aot_autograd(
                fw_compiler=partial(self._compile, self.forward),
                bw_compiler=partial(self._compile, self.backward),
                partition_fn=min_cut_rematerialization_partition,
                keep_inference_input_mutations=True,
            )(graph, example_inputs)

    def _compile(self, kept: list[Any], graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        kept.append(graph)
        interpreter = fx.Interpreter(graph)

        def run(inputs: list[Any]) -> Any:
            self.boxed.append(isinstance(inputs, list))
            return interpreter.boxed_run(inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def inputs_of(graph: fx.GraphModule) -> Iterator[tuple[str, Any]]:
    for node in graph.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        if argument is not None and argument.source is not None:
            name = argument.source.name
            yield (name() if callable(name) else name), argument.example


def products(graph: fx.GraphModule) -> list[fx.Node]:
    targets = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return [node for node in graph.graph.nodes if node.target in targets]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.a(x)).sin())


@pytest.fixture(scope="module")
def trained() -> tuple[Net, Graphs]:
    """A model, and the graphs of one training step of it."""
    torch._dynamo.reset()
    model, graphs = Net(), Graphs()
    torch.compile(model, backend=graphs)(torch.ones(2, 3)).sum().backward()
    torch._dynamo.reset()
    return model, graphs


# -- what a backend gets --------------------------------------------------------------------------


def test_aot_autograd_gives_both_graphs_of_a_training_step(trained: tuple[Net, Graphs]) -> None:
    """dispatch_flops relies on this for ``aot_eager`` (compile/compilers.py:
    ``_compile_parts``).
    """
    _, graphs = trained
    assert [len(g) for g in (graphs.top, graphs.forward, graphs.backward)] == [1, 1, 1]
    assert len(products(graphs.forward[0])) == 3
    assert len(products(graphs.backward[0])) == 5  # the input needs no gradient


def test_aot_autograd_calls_what_is_boxed_with_a_list(trained: tuple[Net, Graphs]) -> None:
    """dispatch_flops relies on this for counting runs (compile/compilers.py: ``count_runs``):
    ``_boxed_call`` on the function, one list of inputs at each run.
    """
    _, graphs = trained
    assert graphs.boxed == [True, True]


def test_map_aggregate_goes_into_tuples_lists_and_dicts() -> None:
    """dispatch_flops relies on this for a node's arguments (compile/templates.py:
    ``arguments_of``).
    """
    from torch.fx.node import map_aggregate

    found = map_aggregate((1, [2, {"a": 3}]), lambda a: a + 1)
    assert found == (2, [3, {"a": 4}])


def test_aot_autograd_keeps_its_compilers_and_can_be_made_again_with_others() -> None:
    """dispatch_flops relies on this for wrapping other backends (_torch:
    ``with_other_compilers``): the attribute ``kwargs``, and these names in it.
    """
    from torch._dynamo.backends.common import AotAutograd, aot_autograd

    def compiler(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return graph.forward

    made = aot_autograd(fw_compiler=compiler)
    assert isinstance(made, AotAutograd)
    assert made.kwargs["fw_compiler"] is compiler
    again = AotAutograd(fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler)
    assert set(again.kwargs) == {"fw_compiler", "bw_compiler", "inference_compiler"}


def test_backends_are_found_by_name() -> None:
    """dispatch_flops relies on this for wrapping backends by name (_torch: ``is_backend_name``,
    ``find_backend``); ``exclude_tags=()`` includes those for debugging.
    """
    from torch._dynamo import list_backends
    from torch._dynamo.backends.registry import lookup_backend

    names = list_backends(exclude_tags=())
    assert {"eager", "aot_eager", "inductor"} <= set(names)
    assert callable(lookup_backend("eager"))
    assert lookup_backend(inputs_of) is inputs_of


def test_tracing_contexts_nest_and_end() -> None:
    """dispatch_flops relies on this for backends that use AOTAutograd within AOTAutograd (_torch:
    ``compiling_apart``).
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing

    assert detect_fake_mode([torch.ones(2)]) is None
    with tracing(TracingContext(None)):
        assert TracingContext.try_get() is not None
    assert TracingContext.try_get() is None


# -- what nodes say of themselves -----------------------------------------------------------------


def test_meta_val_is_a_fake_of_what_the_node_returns(trained: tuple[Net, Graphs]) -> None:
    """dispatch_flops relies on this for the costs of nodes (compile/graph.py)."""
    _, graphs = trained
    for graph in (graphs.forward[0], graphs.backward[0]):
        nodes = [n for n in graph.graph.nodes if n.op in ("placeholder", "call_function")]
        assert nodes and all("val" in node.meta for node in nodes), "nodes without meta['val']"
    assert graphs.forward[0].graph.find_nodes(op="placeholder")
    assert products(graphs.forward[0])[0].meta["val"].shape == (2, 3)


def test_meta_nn_module_stack_is_keyed_by_ids_of_modules(trained: tuple[Net, Graphs]) -> None:
    """dispatch_flops relies on this for a forward node's module (compile/node_stacks.py:
    ``module_stack``): ids, with "@1" and so on where a module is called again.
    """
    model, graphs = trained
    keys = [str(list(n.meta["nn_module_stack"])[-1]) for n in products(graphs.forward[0])]
    a, b = str(id(model.a)), str(id(model.b))
    assert [key.partition("@")[0] for key in keys] == [a, a, b], (
        f"the keys are now {keys}; the modules' ids are {a} and {b}"
    )
    assert keys[0] != keys[1], "two calls of one module must have two keys"


def test_meta_fwd_nn_module_stack_of_backward_nodes_is_their_forwards(
    trained: tuple[Net, Graphs],
) -> None:
    """dispatch_flops relies on this for a backward node's module (compile/node_stacks.py:
    ``module_stack``).
    """
    model, graphs = trained
    found = [n.meta.get("fwd_nn_module_stack") for n in products(graphs.backward[0])]
    assert all(found), "a backward node without meta['fwd_nn_module_stack']"
    modules = {str(list(stack)[-1]).partition("@")[0] for stack in found}
    assert modules == {str(id(model.a)), str(id(model.b))}
    assert not any(n.meta.get("nn_module_stack") for n in products(graphs.backward[0])), (
        "backward nodes now have a stack of their own: which comes first has to be seen"
    )


def test_meta_is_gradient_acc_marks_sums_of_gradients(trained: tuple[Net, Graphs]) -> None:
    """dispatch_flops relies on this for the accumulation of gradients (compile/attribution.py:
    ``of``).
    """
    _, graphs = trained
    sums = [n for n in graphs.backward[0].graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert sums, "self.a is called twice: its gradients must be added"
    assert all(node.meta.get("is_gradient_acc") for node in sums)


def test_meta_partitioner_tag_of_recomputed_nodes_is_is_forward() -> None:
    """dispatch_flops relies on this for recomputation (compile/attribution.py: ``phase_of``)."""

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    graphs = Graphs()
    torch.compile(Checkpointed(), backend=graphs)(torch.ones(2, 3)).sum().backward()
    tags = [str(n.meta.get("partitioner_tag")) for n in products(graphs.backward[0])]
    assert "is_forward" in tags, f"recomputed nodes in the backward graph are now tagged {tags}"
    assert "is_backward" in tags, f"backward nodes in the backward graph are now tagged {tags}"


def test_grapharg_of_a_placeholder_names_its_source_and_has_its_example(
    trained: tuple[Net, Graphs],
) -> None:
    """dispatch_flops relies on this for the parameters of the module that a function calls
    (compile/attribution.py: ``_inputs``, ``_parameters_of``).
    """
    model, graphs = trained
    found = {id(value): name for name, value in graphs.inputs[0]}
    name = found.get(id(model.a.weight))
    assert name is not None, "a parameter must be the very example of its placeholder's grapharg"
    assert "._modules['a']._parameters['weight']" in name, (
        f"a parameter's source is now written {name}"
    )


def test_dynamo_compile_id_of_parts_of_one_function_begins_alike() -> None:
    """dispatch_flops relies on this for what follows a graph break (compile/attribution.py:
    ``function``): the part before "/" tells functions apart.
    """
    graphs = Graphs()

    def function(x: Tensor) -> Tensor:
        return x.sin() + 1

    compiled = torch.compile(function, backend=graphs, dynamic=False)
    for size in (2, 3):
        compiled(torch.ones(size))
    torch.compile(lambda x: x.cos(), backend=graphs)(torch.ones(2))
    names = [str(graph.meta.get("dynamo_compile_id")).partition("/") for graph in graphs.top]
    assert all(slash for _, slash, _ in names), f"compile ids are now {names}"
    assert names[0][0] == names[1][0] != names[2][0]


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_stack_trace_of_an_optimizers_nodes_ends_in_torch_optim() -> None:
    """dispatch_flops relies on this for compiled optimizers (compile/attribution.py:
    ``is_from_optimizer``): lines of ``File "...", line``, the innermost last.
    """
    graphs = Graphs()
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    torch.compile(optimizer.step, backend=graphs)()
    traces = [
        str(node.meta.get("stack_trace"))
        for node in graphs.top[-1].graph.nodes
        if node.op.startswith("call_")
    ]
    folder = str(torch.optim.__file__).removesuffix("__init__.py")
    assert traces and all(f'File "{folder}' in trace for trace in traces), traces


def test_desc_of_a_placeholder_is_its_position_in_the_traced_function(
    trained: tuple[Net, Graphs],
) -> None:
    """dispatch_flops relies on this for the module that runs a shared graph (compile/instances.py:
    ``_position_of_parameter``).
    """
    _, graphs = trained
    traced = len(graphs.inputs[0])
    placeholders = graphs.forward[0].graph.find_nodes(op="placeholder")
    positions = [getattr(node.meta.get("desc"), "idx", None) for node in placeholders]
    assert positions == list(range(traced))


def test_node_of_a_compiled_backward_leads_to_the_parameters() -> None:
    """dispatch_flops relies on this for the module whose backward runs (compile/instances.py:
    ``_parameters``): the running node's ``next_functions``, and ``variable`` of these.
    """
    found: list[Any] = []

    class Watching(Graphs):
        def _compile(self, kept: list[Any], graph: fx.GraphModule, inputs: Any) -> Any:
            compiled = super()._compile(kept, graph, inputs)

            def run(inputs: list[Any]) -> Any:
                node = torch._C._current_autograd_node()
                if node is not None:
                    found.extend(getattr(f, "variable", None) for f, _ in node.next_functions)
                return compiled(inputs)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

    model = Net()
    torch.compile(model, backend=Watching())(torch.ones(2, 3)).sum().backward()
    assert any(value is model.a.weight for value in found)


def test_source_fn_stack_names_the_call_that_torch_func_differentiates_by() -> None:
    """dispatch_flops relies on this for the backward of ``torch.func.grad``
    (compile/attribution.py: ``phase_of``).
    """
    graphs = Graphs()
    weight = torch.ones(3, 3)

    def function(x: Tensor) -> Tensor:
        return torch.func.grad(lambda w: (x @ w).sin().sum())(weight)

    torch.compile(function, backend=graphs)(torch.ones(2, 3))
    stacks = [n.meta.get("source_fn_stack") or [] for n in products(graphs.forward[0])]
    names = [[str(name) for name, _ in stack] for stack in stacks]
    assert sum(any(n.startswith("_autograd_grad") for n in stack) for stack in names) == 1, names


@pytest.mark.slow
def test_compile_id_of_compiled_autograd_begins_with_an_exclamation_mark() -> None:
    """dispatch_flops relies on this for telling a traced backward pass (compile/attribution.py:
    ``is_of_compiled_autograd``).
    """
    graphs = Graphs()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=graphs)):
        Net()(torch.ones(2, 3)).sum().backward()
    assert str(graphs.top[0].meta.get("dynamo_compile_id")).startswith("!")


def test_compiled_autograd_traces_the_nodes_of_a_backward_graph_with_their_meta() -> None:
    """dispatch_flops relies on this for telling recomputation apart under compiled autograd
    (_torch.py: ``keep_node_meta``).
    """
    graphs = Graphs()
    net = Net()
    forward = torch.compile(lambda x: checkpoint(net, x, use_reentrant=False), backend=graphs)
    x = torch.ones(2, 3, requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=graphs)):
        forward(x).sum().backward()
    traced = graphs.top[-1]
    tags = {str(node.meta.get("partitioner_tag")) for node in products(traced)}
    assert tags == {"is_forward", "is_backward"}, "no tag of the partitioner is left"
    assert all("original_aten" in node.meta for node in products(traced))
    assert any(node.meta.get("steal_arg") for node in traced.graph.nodes), "it takes no list"


# -- dynamic shapes -------------------------------------------------------------------------------


def test_symbolic_sizes_are_expressions_of_symbols_among_the_inputs() -> None:
    """dispatch_flops relies on this for costs of dynamic shapes (compile/templates.py:
    ``find_symbols``, ``Templates``, ``fill_in``).
    """
    graphs = Graphs()
    torch.compile(Net(), backend=graphs, dynamic=True)(torch.ones(4, 3)).sum()
    graph = graphs.forward[0]
    symbols: dict[Any, int] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        sizes = [value] if isinstance(value, torch.SymInt) else list(value.shape)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                assert size.node.expr.is_Symbol
                symbols[size.node.expr] = 4
    (rows, columns) = products(graph)[0].meta["val"].shape
    assert isinstance(rows, torch.SymInt), "a dynamic size must be a SymInt"
    assert (int(rows.node.expr.subs(symbols)), columns) == (4, 3)


# -- tracers' tensors -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
def test_functional_tensor_is_the_class_that_aot_autograd_traces_with() -> None:
    """dispatch_flops relies on this for leaving tracers' tensors alone
    (counting/tensor_subclasses.py: ``is_traced``).
    """
    from functorch.compile import aot_function, nop
    from torch._subclasses.functional_tensor import FunctionalTensor

    found: list[bool] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            found.append(any(issubclass(cls, FunctionalTensor) for cls in types))
            return func(*args, **(kw or {}))

    with Mode():
        aot_function(lambda x: x.sin(), nop)(torch.ones(2))
    assert any(found), "a mode above AOTAutograd now sees no FunctionalTensor"
