"""Compiled programs have the counts of eager ones and keep their compiled code."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops import FlopCounterMode, FlopsProfiler, Profile
from dispatch_flops.counting import eager_stance
from dispatch_flops.counting.undo import UndoStack
from tests.helpers.interpreters import run_python
from tests.helpers.profiling import profile_of

# a warning of torch.compile at graph breaks
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

B, I, H, O = 3, 5, 7, 11  # noqa: E741
FORWARD = {"": B * I * H + B * H * O, "up": B * I * H, "down": B * H * O}
BACKWARD = {"": B * I * H + 2 * B * H * O, "up": B * I * H, "down": 2 * B * H * O}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(I, H)
        self.down = nn.Linear(H, O)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Broken(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        torch._dynamo.graph_break()
        return self.down(torch.relu(hidden))


class Projection(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Regional(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.up = Projection(I, H)
        self.up.compile(backend="eager")


class Nested(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(self._inner, backend="eager")

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.inner(x))


@pytest.fixture(autouse=True)
def no_graphs(fresh_compiler: None) -> None:
    counters.clear()


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def train(model: Callable[[torch.Tensor], torch.Tensor], batch: int = B) -> None:
    model(torch.ones(batch, I)).sum().backward()


def macs(profile: Profile, phase: Any) -> dict[str, int]:
    return {fqn: cost.macs for fqn, cost in profile.by_module(phase).items() if cost.macs}


def in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def compile_with(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, **options)


WAYS: dict[str, tuple[type[nn.Module], Callable[[nn.Module], Any]]] = {
    "backend eager": (MLP, compile_with(backend="eager")),
    "backend aot_eager": (MLP, compile_with(backend="aot_eager")),
    "dynamic": (MLP, compile_with(backend="aot_eager", dynamic=True)),
    "fullgraph": (MLP, compile_with(backend="eager", fullgraph=True)),
    "graph break": (Broken, compile_with(backend="aot_eager")),
    "in place": (MLP, lambda model: in_place(model, backend="aot_eager")),
    "regional": (Regional, lambda model: model),
    "regional in compiled": (Regional, compile_with(backend="eager")),
    "nested": (Nested, compile_with(backend="eager")),
}


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_model_has_the_counts_of_eager(way: str, warm: bool) -> None:
    make, compiled_as = WAYS[way]
    model = make()
    compiled = compiled_as(model)
    if warm:
        train(compiled)
    for _ in range(2):
        profile = profile_of(train, compiled, model=model)
        assert macs(profile, "forward") == FORWARD
        assert macs(profile, "backward") == BACKWARD
        assert profile.node("up").calls == 1
    assert profile.by_module() == profile_of(train, make(), model=None).by_module()


RAN_EAGERLY = (
    "compiled functions ran their eager code: what the compiler makes of it may differ much in {}"
)


@pytest.mark.parametrize("way", WAYS)
def test_memory_and_latency_of_compiled_functions_are_noted_to_be_of_eager_code(way: str) -> None:
    make, compiled_as = WAYS[way]
    compiled = compiled_as(make())
    assert profile_of(train, compiled).notes == ()
    assert profile_of(train, compiled, memory=True).notes == (RAN_EAGERLY.format("memory"),)
    both = profile_of(train, compiled, memory=True, latency=True)
    assert RAN_EAGERLY.format("latency and memory") in both.notes


def test_functions_that_are_not_to_be_compiled_are_not_noted_as_compiled() -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # torch keeps its step from compiling

    def run() -> None:
        torch.compiler.disable(train)(model)
        optimizer.step()
        torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(3),))

    assert profile_of(run, memory=True).notes == ()


@pytest.mark.parametrize("way", WAYS)
def test_compiled_code_is_kept_after_a_profile(way: str) -> None:
    make, compiled_as = WAYS[way]
    profiled, other = make(), make()
    compiled, other_compiled = compiled_as(profiled), compiled_as(other)
    for model in (compiled, other_compiled):
        train(model)
        train(model)
    before = compiled_graphs()
    assert before > 0
    profile_of(train, compiled, model=profiled)
    with torch.compiler.set_stance("fail_on_recompile"):
        train(compiled)
        train(other_compiled)
    assert compiled_graphs() == before


def test_model_first_called_in_the_block_compiles_after_it() -> None:
    compiled = torch.compile(MLP(), backend="eager")
    profile_of(train, compiled)
    assert compiled_graphs() == 0
    train(compiled)
    assert compiled_graphs() == 1


def test_model_within_another_compiled_module_stays_the_root() -> None:
    model = MLP()
    for wrapper in (nn.Sequential(model), torch.compile(nn.Sequential(model), backend="eager")):
        profile = profile_of(train, wrapper, model=model)
        assert macs(profile, "forward") == FORWARD


def test_warnings_of_the_program_are_its_own_in_the_block_and_after_it() -> None:
    before = list(warnings.filters)
    with FlopCounterMode(display=False):
        with pytest.raises(UserWarning, match="mine"):  # an error, as in all tests
            warnings.warn("mine", UserWarning, stacklevel=1)
        assert [entry for entry in warnings.filters if entry in before] == before
    assert list(warnings.filters) == before


def test_new_shapes_in_the_block_do_not_recompile() -> None:
    model = MLP()
    compiled = torch.compile(model, backend="eager", dynamic=True)
    train(compiled)
    before = compiled_graphs()
    for batch in (2, 5, 13):
        profile = profile_of(train, compiled, batch, model=model)
        assert profile.total("forward").macs == batch * (I * H + H * O)
    assert compiled_graphs() == before


@pytest.mark.slow
def test_model_compiled_by_inductor_is_counted_and_kept() -> None:
    model = MLP()
    compiled = torch.compile(model)
    train(compiled)
    before = compiled_graphs()
    profile = profile_of(train, compiled, model=model)
    assert macs(profile, "forward") == FORWARD
    assert macs(profile, "backward") == BACKWARD
    with torch.compiler.set_stance("fail_on_recompile"):
        train(compiled)
    assert compiled_graphs() == before


def test_model_compiled_with_reduce_overhead_is_counted() -> None:
    model = MLP()
    profile = profile_of(train, torch.compile(model, mode="reduce-overhead"), model=model)
    assert macs(profile, "forward") == FORWARD


STANCES = ["default", "force_eager", "eager_on_recompile", "fail_on_recompile"]


@pytest.mark.parametrize("stance", [*STANCES, "eager_then_compile"])
def test_stance_of_the_program_is_restored(stance: Any) -> None:
    model = MLP()
    compiled = torch.compile(model, backend="eager")
    train(compiled)
    with torch.compiler.set_stance(stance):
        before = torch._dynamo.eval_frame._stance
        profile = profile_of(train, compiled, model=model)
        assert torch._dynamo.eval_frame._stance is before
    assert macs(profile, "forward") == FORWARD


def test_setting_may_be_released_while_another_block_takes_it() -> None:
    """The garbage collector, which may run at any moment, ends counters that are lost."""
    lost = UndoStack()
    held: list[object] = []

    class Setting:
        def apply(self) -> None:
            held.append(self)
            if len(held) == 2:
                lost.run()

        def revert(self) -> None:
            held.clear()

    setting = eager_stance._SharedSetting(Setting())
    setting.hold(lost)
    with UndoStack() as undo:
        setting.hold(undo)
        assert held
    assert not held


def test_stance_of_nested_blocks_is_restored_after_an_exception() -> None:
    before = torch._dynamo.eval_frame._stance
    with pytest.raises(ZeroDivisionError), FlopCounterMode(display=False):
        with FlopCounterMode(display=False):
            pass
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        raise ZeroDivisionError
    assert torch._dynamo.eval_frame._stance is before


@pytest.mark.parametrize("stance", ["eager_on_recompile", "fail_on_recompile"])
def test_stance_that_the_program_sets_in_the_block_survives_it(stance: Any) -> None:
    before = torch._dynamo.eval_frame._stance
    try:
        with FlopCounterMode(display=False), FlopCounterMode(display=False):
            torch.compiler.set_stance(stance)
        assert torch._dynamo.eval_frame._stance.stance == stance
    finally:
        torch._dynamo.eval_frame._set_stance(before)


def set_for_good(run: Callable[[], None]) -> None:
    torch.compiler.set_stance("default")
    run()


def set_in_a_block(run: Callable[[], None]) -> None:
    with torch.compiler.set_stance("default"):
        run()


def set_by_a_decorator(run: Callable[[], None]) -> None:
    torch.compiler.set_stance("default")(run)()


@pytest.mark.parametrize("set_stance", [set_for_good, set_in_a_block, set_by_a_decorator])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_runs_eagerly_after_the_program_sets_a_stance_in_the_block(
    backend: str, warm: bool, set_stance: Callable[[Callable[[], None]], None]
) -> None:
    model = MLP()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    eager = profile_of(train, MLP())
    if warm:
        train(compiled)
        model.zero_grad()
    graphs = compiled_graphs()
    profile = profile_of(set_stance, lambda: train(compiled), model=model)
    assert macs(profile, "forward") == FORWARD
    assert macs(profile, "backward") == BACKWARD
    assert profile.total() == eager.total()
    assert compiled_graphs() == graphs


def test_stance_within_the_block_sees_the_programs_own_ones() -> None:
    before = torch._dynamo.eval_frame._stance
    with torch.compiler.set_stance("fail_on_recompile"):
        own = torch._dynamo.eval_frame._stance
        with FlopCounterMode(display=False):
            inner = torch.compiler.set_stance("eager_on_recompile")
            assert inner.prev is own
            inner.__exit__(None, None, None)
        assert torch._dynamo.eval_frame._stance is own
    assert torch._dynamo.eval_frame._stance is before


def test_stance_entered_before_the_block_and_left_in_it_is_gone_afterwards() -> None:
    before = torch._dynamo.eval_frame._stance
    entered = torch.compiler.set_stance("fail_on_recompile")
    with FlopCounterMode(display=False):
        entered.__exit__(None, None, None)
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    assert torch._dynamo.eval_frame._stance is before


def test_stance_that_outlasts_the_block_goes_back_to_the_one_before_it() -> None:
    before = torch._dynamo.eval_frame._stance
    try:
        with ExitStack() as stack:
            with FlopCounterMode(display=False):
                stack.enter_context(torch.compiler.set_stance("fail_on_recompile"))
            assert torch._dynamo.eval_frame._stance.stance == "fail_on_recompile"
        assert torch._dynamo.eval_frame._stance.stance == "default"
    finally:
        torch._dynamo.eval_frame._set_stance(before)


def autograd_compiler() -> Any:
    """Return what compiles backward passes, and leave it as it is."""
    set_compiler = torch._C._dynamo.compiled_autograd.set_autograd_compiler
    compiler, dynamic = set_compiler(None, False)
    set_compiler(compiler, dynamic)
    return compiler


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_compiled_autograd_active_before_the_block_keeps_backward_per_module(
    warm: bool, is_compiled: bool
) -> None:
    model = MLP()
    compiled = torch.compile(model, backend="eager") if is_compiled else model
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        before = autograd_compiler()
        if warm:
            train(compiled)
        profile = profile_of(train, compiled, model=model)
        assert autograd_compiler() is before is not None
        captures = counters["compiled_autograd"]["captures"]
        train(MLP())
        assert counters["compiled_autograd"]["captures"] > captures or warm
    assert macs(profile, "forward") == FORWARD
    assert macs(profile, "backward") == BACKWARD
    assert autograd_compiler() is None


def test_compiled_autograd_that_ends_in_the_block_does_not_come_back() -> None:
    with ExitStack() as outer:
        outer.enter_context(torch._dynamo.compiled_autograd._enable(torch.compile))
        with FlopCounterMode(display=False):
            outer.close()
        assert autograd_compiler() is None


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_backward_of_a_forward_compiled_before_the_block_is_counted(warm: bool) -> None:
    model = MLP()
    compiled = torch.compile(model, backend="aot_eager")
    if warm:
        train(compiled)
    loss = compiled(torch.ones(B, I)).sum()
    profile = profile_of(loss.backward, model=model)
    assert profile.total("backward").macs == BACKWARD[""]
    assert profile.total("forward").macs == 0


FIRST_EVER = """
import sys, torch
from torch import nn
from dispatch_flops import FlopCounterMode

model, x, finders = nn.Linear(5, 7), torch.ones(3, 5), list(sys.meta_path)
with FlopCounterMode(model, display=False) as eager:
    model(x).sum().backward()
assert "torch._dynamo" not in sys.modules
with FlopCounterMode(model, display=False) as counter:
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(x).sum().backward()
assert "torch._dynamo" in sys.modules and sys.meta_path == finders
assert counter.profile.by_module() == eager.profile.by_module()
assert counter.profile.root.total("forward").macs == 3 * 5 * 7

from torch._dynamo.eval_frame import _stance
from torch._dynamo.utils import counters
assert _stance.stance == "default"
assert counters["stats"]["unique_graphs"] == 0
compiled(x)
assert counters["stats"]["unique_graphs"] == 1
"""


@pytest.mark.slow
def test_first_compilation_of_a_process_within_the_block_runs_eagerly() -> None:
    done = run_python("-c", FIRST_EVER)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_compiled_flex_attention_counts_as_eager() -> None:
    """Count the rectangle, or with causal="half" the 3 of 4 blocks of 128 that the mask keeps."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    heads, length, size = 2, 256, 16
    q = torch.ones(1, heads, length, size)
    mask = create_block_mask(
        lambda b, h, i, j: i >= j, 1, heads, length, length, device="cpu", _compile=False
    )
    compiled = torch.compile(flex_attention, backend="eager")
    for call in (flex_attention, compiled):
        whole = profile_of(lambda call=call: call(q, q, q, block_mask=mask))
        kept = profile_of(lambda call=call: call(q, q, q, block_mask=mask), causal="half")
        assert whole.total().macs == 2 * heads * length * length * size
        assert kept.total().macs == 2 * heads * (3 * 128 * 128) * size
        assert whole.uncounted_ops() == {}


# -- blocks that overlap ---------------------------------------------------------------------

ROWS, IN, OUT = 5, 4, 3


@pytest.fixture
def compiled() -> Iterator[tuple[Callable[..., Any], list[str]]]:
    """Return a compiled layer, and a list to which each run of its compiled code is added."""
    done: list[str] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            done.append("ran compiled")
            return graph(*args)

        return run

    layer = torch.compile(nn.Linear(IN, IN), backend=backend)
    layer(torch.ones(ROWS, IN))
    done.clear()
    yield layer, done
    assert eval_frame._stance.stance == "default"
    torch._dynamo.reset()


def test_overlapping_profilers_count_their_own_models(compiled: Any) -> None:
    layer, done = compiled
    first, second = FlopsProfiler(nn.Linear(IN, OUT)), FlopsProfiler(nn.Linear(OUT, 2))
    first.start_profile()
    hidden = first.model(torch.ones(ROWS, IN))
    second.start_profile()
    second.model(hidden)
    first.stop_profile()
    second.model(hidden)
    layer(torch.ones(ROWS, IN))
    assert not done  # the second profiler still counts, so the layer ran eagerly
    second.stop_profile()
    assert first.get_total_macs() == ROWS * IN * OUT
    assert second.get_total_macs() == 2 * ROWS * OUT * 2
    assert _get_current_dispatch_mode_stack() == []
    layer(torch.ones(ROWS, IN))
    assert done == ["ran compiled"]


def test_overlapping_counters_of_two_threads_keep_compiled_code(compiled: Any) -> None:
    layer, done = compiled
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first() -> None:
        with FlopCounterMode(nn.Linear(IN, OUT), display=False):
            first_is_in.set()
            second_is_in.wait(10)
        first_is_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(10)
    with FlopCounterMode(layer, display=False) as counter:
        second_is_in.set()
        first_is_out.wait(10)
        layer(torch.ones(ROWS, IN))
    thread.join()
    assert not done
    assert counter.get_total_macs() == ROWS * IN * IN
    layer(torch.ones(ROWS, IN))
    assert done == ["ran compiled"]


class UndoneTwice(UndoStack):
    """As after an interrupt between a step and the note that it was done."""

    def add(self, undo: Callable[[], object]) -> None:
        super().add(undo)
        super().add(undo)


def test_stance_that_is_undone_twice_is_that_of_the_program() -> None:
    before, filters = eval_frame._stance, [*warnings.filters]
    with UndoneTwice() as undo:
        eager_stance.take_eager_stance(undo)
        assert eval_frame._stance is not before
    assert eval_frame._stance is before
    assert [*warnings.filters] == filters


def test_filter_of_warnings_is_removed_where_the_program_has_copied_the_filters() -> None:
    before, counter = [*warnings.filters], FlopCounterMode(display=False)
    counter.__enter__()
    with warnings.catch_warnings():
        counter.__exit__(None, None, None)
        assert [*warnings.filters] == before
    assert [*warnings.filters] == before
