"""torch.compile: its stance, what its wrappers leave on modules, and when it gives code up.

dispatch_flops tells compiled callables to run their eager code while it counts, and leaves them
compiled. ``torch.compiler.set_stance`` is the public way; the stance itself is replaced by an
object that answers "force_eager" except inside higher-order operators.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import decorators, eval_frame
from torch._dynamo.testing import CompileCounter
from torch._higher_order_ops import utils
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from dispatch_flops import _torch

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# Before torch 2.13 it may be missing, and dispatch_flops asks by getattr.
HOPS_COMPILE = hasattr(utils, "_in_hop_compile") or TorchVersion(torch.__version__) >= (2, 13)


def in_hop_compile() -> bool:
    return bool(utils._in_hop_compile()) if HOPS_COMPILE else False


class Stance:
    """As dispatch_flops has it."""

    def __init__(self, prior: Any, asked: list[bool]) -> None:
        self.prior = prior
        self.asked = asked
        self.skip_guard_eval_unsafe = prior.skip_guard_eval_unsafe
        self.backend = None

    @property
    def stance(self) -> str:
        self.asked.append(in_hop_compile())
        return str(self.prior.stance) if self.asked[-1] else "force_eager"


class Ignoring(TorchDispatchMode):
    """The class methods that dispatch_flops's mode has."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func._op(*args, **(kwargs or {}))


@pytest.fixture
def asked() -> Iterator[list[bool]]:
    """With the stance taken: whether each question for it came from a higher-order operator."""
    answers: list[bool] = []
    prior = eval_frame._set_stance(Stance(eval_frame._stance, answers))
    try:
        yield answers
    finally:
        eval_frame._set_stance(prior)


def compiled(function: Callable[..., Any]) -> tuple[Any, CompileCounter]:
    counter = CompileCounter()
    return torch.compile(function, backend=counter), counter


# -- the stance -----------------------------------------------------------------------------------


def test_stance_has_the_three_attributes_that_a_stand_in_needs() -> None:
    """dispatch_flops relies on this for its own stance (counting/eager_stance.py: ``_Stance``)."""
    names = set(vars(eval_frame._stance)) | set(getattr(eval_frame._stance, "__slots__", ()))
    assert names == {"stance", "skip_guard_eval_unsafe", "backend"}, (
        f"a stance now has {sorted(names)}: _Stance has to answer all of these"
    )


def test_set_stance_returns_the_prior_one() -> None:
    """dispatch_flops relies on this for giving the user's stance back
    (counting/eager_stance.py).
    """
    prior = eval_frame._stance
    mine = Stance(prior, [])
    assert eval_frame._set_stance(mine) is prior
    assert eval_frame._stance is mine, "the module's _stance must be what is in force"
    assert eval_frame._set_stance(prior) is mine


def test_stance_of_another_class_keeps_new_code_from_being_compiled(asked: list[bool]) -> None:
    """dispatch_flops relies on this for eager counts of compiled programs
    (counting/eager_stance.py).
    """
    function, counter = compiled(lambda x: x.sin() + 1)
    function(torch.ones(2))
    assert asked == [False] * len(asked) and asked, "the stance must be asked at each call"
    assert counter.frame_count == 0, "force_eager must keep the function from being compiled"


def test_calls_of_compiled_callables_alone_ask_whether_guards_may_be_skipped(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """dispatch_flops relies on this for knowing that compiled code ran as eager code
    (counting/eager_stance.py: ``eager_runs``).
    """
    calls: list[str] = []
    skips = property(lambda stance: bool(calls.append("asked")), lambda stance, value: None)
    monkeypatch.setattr(Stance, "skip_guard_eval_unsafe", skips, raising=False)
    function, _ = compiled(torch.sin)
    layer = nn.Linear(2, 2)
    layer.compile(backend=CompileCounter())
    torch.compiler.disable(torch.sin)(torch.ones(2))
    assert asked and not calls, "a function that is not to be compiled asks for the stance alone"
    function(torch.ones(2))
    assert len(calls) == 1
    layer(torch.ones(1, 2))
    assert len(calls) == 2


def test_stance_under_which_compiled_code_ran_eagerly_leaves_it_compiled() -> None:
    """dispatch_flops relies on this for leaving the user's program as it was
    (counting/eager_stance.py).
    """
    runs: list[int] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        number = len(runs)  # of runs before it was compiled

        def run(*inputs: Any) -> Any:
            runs.append(number)
            return graph(*inputs)

        return run

    function = torch.compile(lambda x: x.sin() + 1, backend=backend)
    function(torch.ones(2))
    prior = eval_frame._set_stance(Stance(eval_frame._stance, []))
    try:
        with Ignoring():
            function(torch.ones(2))
    finally:
        eval_frame._set_stance(prior)
    assert runs == [0], "under force_eager the compiled code must not run"
    function(torch.ones(2))
    assert runs == [0, 0], "the code that was compiled before must be used afterwards"


@pytest.mark.skipif(not HOPS_COMPILE, reason="such operators do not say so in this torch")
def test_in_hop_compile_is_true_where_cond_compiles_itself(asked: list[bool]) -> None:
    """dispatch_flops relies on this for gradients of what a branch closes over: operators such as
    torch.cond compile themselves, which force_eager would keep them from
    (counting/eager_stance.py).
    """
    weight = torch.ones(2, requires_grad=True)
    x = torch.ones(2)
    out = torch.cond(torch.tensor(True), lambda x: x * weight, lambda x: x + weight, (x,))
    out.sum().backward()
    assert True in asked, "_in_hop_compile() must be true when the stance is asked for cond's sake"
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones(2))
    assert not in_hop_compile(), "and false everywhere else"


# -- modes and compiled code ----------------------------------------------------------------------


def test_mode_that_ignores_compile_internals_leaves_code_to_be_compiled() -> None:
    """dispatch_flops relies on this where the stance lets torch.compile work
    (counting/dispatch_mode.py: ``ignore_compile_internals``): left to itself, it gives the code up
    for good under a mode.
    """
    function, counter = compiled(lambda x: x.sin() + 1)
    with Ignoring():
        function(torch.ones(2))
    function(torch.ones(2))
    assert counter.frame_count == 1, "a mode that ignores compile internals must not stop it"


def test_is_dynamo_compiling_is_true_for_hooks_that_are_traced() -> None:
    """dispatch_flops relies on this for hooks that torch.cond traces along with a module
    (counting/module_tracker.py, timing/module_timer.py, timing/operator_timers.py): they return at
    once.
    """
    called: list[str] = []

    def hook(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        called.append(type(module).__name__)

    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    handle = register_module_forward_pre_hook(hook)
    try:
        with torch.no_grad():
            torch.cond(torch.tensor(True), layer, lambda x: x.clone(), (x,))
    finally:
        handle.remove()
    assert "Linear" not in called, "a traced hook must see is_dynamo_compiling() as true"


def test_warning_of_global_hooks_on_a_compiled_module_has_its_text() -> None:
    """dispatch_flops relies on this for silencing it: the hooks are its own
    (counting/eager_stance.py).
    """
    model, _ = compiled(nn.Linear(2, 2))
    handles = [
        register_module_forward_pre_hook(lambda *_: None),
        register_module_forward_hook(lambda *_: None),
    ]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(1, 2))
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Using `torch.compile.module.` when there are global"
            )
            torch.compile(nn.Linear(2, 2), backend=CompileCounter())(torch.ones(1, 2))
    finally:
        for handle in handles:
            handle.remove()
    assert any("when there are global" in str(w.message) for w in caught), (
        f"torch now warns of {[str(w.message) for w in caught]}, if at all"
    )


# -- what compiling leaves on modules -------------------------------------------------------------


def test_compiled_module_holds_the_original_as_orig_mod() -> None:
    """dispatch_flops relies on this for names (counting/wrappers.py: ``WRAPPED``)."""
    layer = nn.Linear(2, 2)
    wrapper = torch.compile(layer, backend="eager")
    assert wrapper._modules["_orig_mod"] is layer
    assert wrapper._orig_mod is layer
    assert [name for name, _ in wrapper.named_modules()] == ["", "_orig_mod"]


def test_import_of_dynamo_is_by_a_loader_whose_exec_module_can_be_replaced() -> None:
    """dispatch_flops relies on this for taking the stance when torch._dynamo is imported inside its
    block (counting/eager_stance.py: ``_ImportWatch``).
    """
    spec = PathFinder.find_spec("torch._dynamo", torch.__path__)
    assert spec is not None and spec.loader is not None
    loader: Any = spec.loader
    own = loader.exec_module
    loader.exec_module = print
    assert loader.exec_module is print
    del loader.exec_module
    assert loader.exec_module == own, "the class's own method must be there again"


def test_polyfills_lie_in_their_own_folder() -> None:
    """dispatch_flops relies on this for telling an optimizer's lines from those that dynamo traces
    builtins by (compile/attribution.py: ``is_from_optimizer``).
    """
    assert (Path(torch.__file__).parent / "_dynamo" / "polyfills" / "__init__.py").exists()


# -- what is left eager --------------------------------------------------------------------------


def test_graph_breaks_and_failed_compilations_are_recorded_for_the_process() -> None:
    """dispatch_flops relies on this for naming code that runs outside of graphs
    (compile/eager_parts.py): ``reason`` and ``user_stack`` of a break; ``fail_type``,
    ``fail_reason`` and the function's place of a compilation.
    """
    from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons

    @torch.compiler.disable
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def breaking(x: torch.Tensor) -> torch.Tensor:
        return helper(x.sin()).cos()

    def failing(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x.sin()
            torch._dynamo.graph_break()
        return x

    breaks = len(graph_break_reasons)
    torch.compile(breaking, backend="eager")(torch.ones(2))
    (found,) = graph_break_reasons[breaks:]
    assert "disable" in found.reason and found.user_stack[-1].name == "breaking"
    torch.compile(failing, backend="eager")(torch.ones(2))
    record = get_compilation_metrics()[-1]
    assert record.fail_type is not None and record.fail_reason
    assert record.co_name == "failing" and record.co_filename == __file__
    assert record.co_firstlineno


# -- compiled autograd ---------------------------------------------------------------------------


def test_backend_of_a_running_compilation_is_found_until_a_reset() -> None:
    """dispatch_flops relies on this for the backend of each graph and for code that is left eager
    (compile/eager_parts.py): functions are called around compilations, until a reset.
    """
    begun: list[Any] = []
    done: list[Any] = []

    def begin(_: Any) -> None:
        begun.append(_torch.compiling_backend())

    def backend(graph: Any, inputs: Any) -> Any:
        return graph.forward

    assert _torch.call_at_compilations(begin, done.append)
    assert not _torch.call_at_compilations(begin, done.append)
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(3))
    found, named = begun
    assert found is backend
    assert named is torch._dynamo.lookup_backend("eager")
    assert len(done) == 2
    assert _torch.compiling_backend() is None
    torch._dynamo.reset()
    assert _torch.call_at_compilations(begin, done.append)


def test_compiler_of_backward_can_be_taken_off_and_put_back() -> None:
    """dispatch_flops relies on this for backward passes of a program that compiles them (_torch:
    ``suspend_compiled_autograd``): one setting that returns the one before, ``depth`` and
    ``compiled_autograd_enabled``.
    """
    from torch._dynamo import compiled_autograd

    set_compiler = torch._C._dynamo.compiled_autograd.set_autograd_compiler
    assert set_compiler(None, False)[0] is None
    depth = compiled_autograd.depth
    with compiled_autograd._enable(torch.compile(backend="eager")):
        assert compiled_autograd.depth == depth + 1
        assert compiled_autograd.compiled_autograd_enabled
        compiler, is_dynamic = set_compiler(None, False)
        assert compiler is not None
        assert set_compiler(compiler, is_dynamic)[0] is None
    assert set_compiler(None, False)[0] is None
    assert not compiled_autograd.compiled_autograd_enabled


def test_set_stance_of_the_program_calls_the_function_in_decorators() -> None:
    """dispatch_flops relies on this to keep a stance that the program sets in a block for later
    (counting/eager_stance.py: ``_StanceSetting``).
    """
    asked = []

    def answer(stance: Any) -> Any:
        asked.append(stance)
        return "prior"

    assert decorators._set_stance is eval_frame._set_stance
    decorators._set_stance = answer  # type: ignore[assignment]
    try:
        made = torch.compiler.set_stance("force_eager")
        with made:
            pass
    finally:
        decorators._set_stance = eval_frame._set_stance
    assert asked == [made.stance, made.stance, "prior"]
    assert eval_frame._stance.stance == "default", "torch's own function must not have run"


def test_mode_entered_in_a_compiled_call_sees_nothing_after_it() -> None:
    """dispatch_flops relies on finding the frame of such a call, before it enters its mode
    (_torch: ``is_in_compiled_call``), also where the stance forces eager code. Torch 2.11 does not
    restore the dispatch keys.
    """
    restores = TorchVersion(torch.__version__) >= (2, 13)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    @torch.compiler.disable
    def enter(module: nn.Module, args: Any) -> None:
        inside.append(_torch.is_in_compiled_call())
        mode.__enter__()

    for stance in ("default", "force_eager"):
        seen, inside, mode, model = list[Any](), list[bool](), Seen(), nn.ReLU()
        model.register_forward_pre_hook(enter)
        with torch.compiler.set_stance(stance):
            torch.compile(model, backend="eager")(torch.ones(2)).cos()
        mode.__exit__(None, None, None)
        assert inside == [True]
        assert (torch.ops.aten.cos in seen) is not restores
    assert not _torch.is_in_compiled_call()
    seen, inside, mode, wrapper = [], [], Seen(), torch.compile(nn.ReLU(), backend="eager")
    wrapper.register_forward_pre_hook(enter)  # it runs before the compiled call
    with torch.compiler.set_stance("force_eager"):
        wrapper(torch.ones(2)).cos()
    mode.__exit__(None, None, None)
    assert inside == [False]
    assert seen == [torch.ops.aten.relu, torch.ops.aten.cos]


def test_functions_of_an_added_module_are_not_compiled() -> None:
    """dispatch_flops relies on this for its hooks in compiled code, which would otherwise be
    traced (_torch: ``keep_from_compiling``).
    """
    from torch._dynamo import trace_rules

    skipped = list(trace_rules.SKIP_DIRS)
    _torch.keep_from_compiling("dispatch_flops._torch")
    assert trace_rules.check(_torch.is_in_compiled_call)
    assert trace_rules.check(_torch.is_in_compiled_call.__code__)
    _torch.keep_from_compiling("dispatch_flops._torch")
    assert len(trace_rules.SKIP_DIRS) <= len(skipped) + 1


def test_backend_of_a_module_that_is_compiled_in_place_is_known() -> None:
    """dispatch_flops relies on this to name layers that are left eager (compile/eager_parts.py)."""

    def backend(graph: Any, inputs: Any) -> Any:
        return graph

    layer = torch.nn.Linear(3, 5)
    assert _torch.backend_of_compiled_module(layer) is None
    layer.compile(backend=backend, dynamic=True)
    assert _torch.backend_of_compiled_module(layer) is backend


@pytest.mark.skipif(TorchVersion(torch.__version__) >= (2, 14), reason="this torch compiles it")
def test_layer_of_torch_that_is_compiled_in_place_runs_eagerly() -> None:
    """dispatch_flops says so (compile/eager_parts.py)."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    layer = torch.nn.Linear(3, 5)
    layer.compile(backend=backend)
    layer(torch.ones(2, 3))
    assert graphs == []
    assert _torch.is_never_compiled(torch.nn.Linear.forward)
    torch.compile(layer, backend=backend)(torch.ones(2, 3))
    assert len(graphs) == 1
    assert not _torch.is_never_compiled(backend)
