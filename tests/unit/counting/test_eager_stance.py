"""Compiled programs: the same counts as eager, and the compiled code is there afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dispatch_flops import FlopCounterMode, Profile
from tests.helpers.profiling import profile_of

# torch.compile's own, where a graph breaks
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
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


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
def test_counts_and_attribution_are_eagers(way: str, warm: bool) -> None:
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


@pytest.mark.parametrize("way", WAYS)
def test_compiled_code_is_intact_afterwards(way: str) -> None:
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


def test_what_is_first_called_inside_compiles_later() -> None:
    compiled = torch.compile(MLP(), backend="eager")
    profile_of(train, compiled)
    assert compiled_graphs() == 0
    train(compiled)
    assert compiled_graphs() == 1


def test_a_wrapper_around_the_model_leaves_it_the_model() -> None:
    model = MLP()
    for wrapper in (nn.Sequential(model), torch.compile(nn.Sequential(model), backend="eager")):
        profile = profile_of(train, wrapper, model=model)
        assert macs(profile, "forward") == FORWARD


def test_new_shapes_inside_cost_no_recompilation() -> None:
    model = MLP()
    compiled = torch.compile(model, backend="eager", dynamic=True)
    train(compiled)
    before = compiled_graphs()
    for batch in (2, 5, 13):
        profile = profile_of(train, compiled, batch, model=model)
        assert profile.total("forward").macs == batch * (I * H + H * O)
    assert compiled_graphs() == before


@pytest.mark.slow
def test_inductor() -> None:
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


def test_reduce_overhead() -> None:
    model = MLP()
    profile = profile_of(train, torch.compile(model, mode="reduce-overhead"), model=model)
    assert macs(profile, "forward") == FORWARD


STANCES = ["default", "force_eager", "eager_on_recompile", "fail_on_recompile"]


@pytest.mark.parametrize("stance", [*STANCES, "eager_then_compile"])
def test_under_any_stance_of_the_users(stance: Any) -> None:
    model = MLP()
    compiled = torch.compile(model, backend="eager")
    train(compiled)
    with torch.compiler.set_stance(stance):
        before = torch._dynamo.eval_frame._stance
        profile = profile_of(train, compiled, model=model)
        assert torch._dynamo.eval_frame._stance is before
    assert macs(profile, "forward") == FORWARD


def test_stance_is_restored_after_an_exception_and_nests() -> None:
    before = torch._dynamo.eval_frame._stance
    with pytest.raises(ZeroDivisionError), FlopCounterMode(display=False):
        with FlopCounterMode(display=False):
            pass
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        raise ZeroDivisionError
    assert torch._dynamo.eval_frame._stance is before


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_backward_of_a_forward_that_was_compiled_before_the_block(warm: bool) -> None:
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
def test_first_ever_compilation_inside_the_block() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_EVER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_compiled_flex_attention_counts_as_eager() -> None:
    """The rectangle, or with causal="half" the blocks of 128 that the mask keeps: 3 of 4."""
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
