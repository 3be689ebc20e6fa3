"""Compilers of the graphs that AOTAutograd partitions: inductor, aot_eager, other backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import fx, nn

from dispatch_flops import _torch
from dispatch_flops.compile.graph import GraphCost
from dispatch_flops.compile.node_stacks import RECORDS
from dispatch_flops.errors import ConfigError, TargetError

AddGraph = Callable[[fx.GraphModule, bool], GraphCost]  # the graph, is_backward
Compiled = Callable[..., Any]
Options = Mapping[str, Any]
_NO_OPTIONS = 'mode and options do not apply to backend="aot_eager"; leave them out'


class Compiler:
    """Compiler of the graphs of one counting backend.

    backend: a name that ``torch.compile`` knows, or a callable that it accepts. mode, options:
    those of ``torch.compile``.

    Raises TargetError for a backend that torch does not know, and ConfigError for a mode or options
    that do not fit.
    """

    def __init__(self, backend: Any, mode: str | None, options: Options | None) -> None:
        if isinstance(backend, nn.Module):
            raise TargetError(
                f"backend is a {type(backend).__name__}; pass a model as model=, after the backend"
            )
        if not callable(backend) and not _torch.is_backend_name(backend):
            raise TargetError(
                f"backend={backend!r:.60} is not a backend of torch.compile; pass a name from "
                "torch.compiler.list_backends(), or a callable"
            )
        self._backend = backend
        self._given = self._check_options(mode, options)

    @property
    def rewrites_graphs(self) -> bool:
        """True if the backend may change a graph before it compiles the parts of it."""
        return self._backend != "aot_eager" and (
            self._backend == "inductor"
            or _torch.is_aot_autograd(_torch.find_backend(self._backend))
        )

    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: Any,
        add_graph: AddGraph,
        mode: str | None,
        options: Options | None,
    ) -> Compiled:
        """Compile a function as torch.compile traced it.

        add_graph: is told of each graph, before it is compiled, and returns its cost.
        """
        given = {**self._given, **self._check_options(mode, options)}
        # A hit in AOTAutograd's cache would return code that does not count. Inductor's cache
        # stays on.
        with _torch.no_autograd_cache():
            if self._backend == "inductor":
                return _compile_with_inductor(graph, example_inputs, add_graph, given)
            if self._backend == "aot_eager":
                return _compile_parts(graph, example_inputs, add_graph, _interpret)
            backend = _torch.find_backend(self._backend)
            if _torch.is_aot_autograd(backend):
                count = partial(_count_part, add_graph)
                counting = _torch.with_other_compilers(backend, count)
                compiled: Compiled = counting(graph, example_inputs)
                return compiled
            apart = partial(_compile_apart, partial(backend, **given))
            return _compile_parts(graph, example_inputs, add_graph, apart)

    def _check_options(self, mode: str | None, options: Options | None) -> dict[str, Any]:
        """Return the keyword arguments that tell the backend of mode and options."""
        if not isinstance(mode, str | None):
            raise ConfigError(f"mode={mode!r:.60}: pass a name, such as 'max-autotune', or None")
        if options is not None and not (
            isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
        ):
            raise ConfigError(f"options={options!r:.60}: pass a dict of names and values, or None")
        if mode is not None and options is not None:
            raise ConfigError(f"mode={mode!r} and options are given; pass one of them")
        given = {"mode": mode, "options": options}
        if self._backend == "inductor":
            return _options_of(mode) | _checked(options)
        if self._backend == "aot_eager" and (mode or options):
            raise ConfigError(_NO_OPTIONS)
        return {name: value for name, value in given.items() if value is not None}


def count_runs(cost: GraphCost, compiled: Compiled) -> Compiled:
    """Return ``compiled`` with its runs counted, except those that raise.

    cost: of the graph. compiled: takes a list of inputs, and may empty it.
    """
    runs, read = cost.runs, cost.run_reader()

    def run(inputs: list[Any]) -> Any:
        found = read(inputs)
        out = compiled(inputs)
        runs[found] += 1
        return out

    return _mark_boxed(run)


def _count_part(
    add_graph: AddGraph,
    compiler: Callable[..., Compiled],
    part: fx.GraphModule,
    inputs: Any,
    *,
    is_backward: bool,
    **kwargs: Any,
) -> Compiled:
    """Compile one partitioned graph so that its runs are counted."""
    cost = add_graph(part, is_backward)  # first: a compiler rewrites the part
    return count_runs(cost, _boxed(compiler(part, inputs, **kwargs)))


def _boxed(compiled: Compiled) -> Compiled:
    """Return a function that calls ``compiled`` with a list of inputs."""
    if getattr(compiled, "_boxed_call", False):
        return compiled
    return lambda inputs: compiled(*inputs)


def _compile_with_inductor(
    graph: fx.GraphModule, example_inputs: Any, add_graph: AddGraph, patches: Options
) -> Compiled:
    def compile_part(part: fx.GraphModule, inputs: Any, **kwargs: Any) -> Compiled:
        cost = add_graph(part, bool(kwargs.get("is_backward")))
        return count_runs(cost, _torch.compile_part(part, inputs, **kwargs))

    options = _torch.keeping_records(patches, RECORDS)
    compiled: Compiled = _torch.compile_with_inductor(graph, example_inputs, compile_part, options)
    return compiled


def _compile_parts(
    graph: fx.GraphModule,
    example_inputs: Any,
    add_graph: AddGraph,
    compiler: Callable[..., Compiled],
) -> Compiled:
    """Compile by AOTAutograd, and each of its graphs by ``compiler``."""
    count = partial(_count_part, add_graph, compiler)
    compiled: Compiled = _torch.aot_autograd(
        fw_compiler=partial(count, is_backward=False), bw_compiler=partial(count, is_backward=True)
    )(graph, example_inputs)
    return compiled


def _compile_apart(backend: Callable[..., Compiled], part: fx.GraphModule, inputs: Any) -> Compiled:
    """Compile a graph by a backend that may use AOTAutograd by itself."""
    with _torch.compiling_apart(inputs):
        compiled = backend(part, inputs)
    # What AOTAutograd returns takes its inputs one by one, even if it is marked as boxed.
    return _mark_boxed(lambda inputs: compiled(*inputs))


def _interpret(part: fx.GraphModule, _inputs: Any) -> Compiled:
    # Each run has an interpreter of its own: one holds the values of the run, and threads overlap.
    return _mark_boxed(lambda inputs: fx.Interpreter(part).boxed_run(inputs))


def _mark_boxed(run: Compiled) -> Compiled:
    """Mark a function as one that takes a list of inputs, which it may empty."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _options_of(mode: str | None) -> dict[str, Any]:
    """Return inductor's options for a mode of ``torch.compile``."""
    if mode is None or mode == "default":
        return {}
    try:
        return _torch.options_of_mode(mode)
    except RuntimeError as error:
        raise ConfigError(f"mode={mode!r}: {error}") from error


def _checked(options: Options | None) -> dict[str, Any]:
    if options is None:
        return {}
    try:
        return _torch.checked_options(options)
    except RuntimeError as error:
        raise ConfigError(f"options: {str(error).partition(', known options')[0]}") from error
