"""Memory of calls of layers that are not dispatched again: as if they were."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode, Profile, _torch, register_workspace
from dispatch_flops.counting.known_layers import LAYERS
from dispatch_flops.operators import workspaces
from dispatch_flops.operators.workspaces import always, builtin_workspace
from tests.helpers.undispatched import note_layers, operators_and_memory

F32 = 4
Program = Callable[[nn.Module], Any]


pytestmark = pytest.mark.usefixtures("collected_before")


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the fqns of the layers whose calls are not dispatched, one for each call."""
    # Another test may have imported it: layers that the program itself calls are then dispatched.
    monkeypatch.delitem(sys.modules, _torch.PIPELINES, raising=False)
    return note_layers(monkeypatch)


def followed(model: nn.Module, program: Program, calls: int, **options: Any) -> Profile:
    with FlopCounterMode(model, display=False, **{"memory": True, **options}) as counter:
        for _ in range(calls):
            program(model)
    return counter.profile


class Block(nn.Module):
    """Layers on results of layers, of operators and of each other, with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 11)
        self.act = nn.GELU()
        self.down = nn.Linear(11, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(self.act(self.up(self.norm(x))))) * 2.0


class Net(nn.Module):
    """Blocks that are alike, some of them recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Sequential(nn.Linear(5, 3), nn.SiLU(), nn.ReLU(inplace=True))
        self.is_recomputing = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_recomputing else block(x)
        return self.head(x.transpose(0, 1))


def ids(model: nn.Module) -> Tensor:
    device = next(model.parameters()).device
    return torch.arange(2 * 3, device=device).reshape(2, 3)


def ones_like(model: nn.Module, *shape: int) -> Tensor:
    return torch.ones(shape, device=next(model.parameters()).device)


def train(model: nn.Module) -> None:
    model(ids(model)).sum().backward()
    model.zero_grad()


def accumulate(model: nn.Module) -> None:
    model(ids(model)).sum().backward()


def infer(model: nn.Module) -> None:
    with torch.no_grad():
        model(ids(model))


def infer_and_train(model: nn.Module) -> None:
    infer(model)
    train(model)


def recompute(model: nn.Module) -> None:
    model.is_recomputing = True  # type: ignore[assignment]
    train(model)


def take_steps(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(3):
        train(model)
        optimizer.step()


def call_a_layer_alone(model: Any) -> None:
    with torch.no_grad():
        x = ones_like(model, 13, 5)
        results = [model.blocks[1].up(x) for _ in range(3)]  # each is a step of its own
        model(ids(model))
        results.append(model.blocks[2].up(x))


def keep_results(model: Any) -> None:
    model.kept = [*getattr(model, "kept", ()), model.blocks[0].up(ones_like(model, 2, 5))]
    train(model)


def replace_a_weight(model: Any) -> None:
    train(model)
    model.blocks[1].up.weight = nn.Parameter(ones_like(model, 11, 5))


def fail(model: Any) -> None:
    train(model)
    with pytest.raises(IndexError):
        model(ids(model) + 5)
    with pytest.raises(RuntimeError):
        model.head(ones_like(model, 2, 4))


PROGRAMS = {
    program.__name__: program
    for program in (
        train, accumulate, infer, infer_and_train, recompute, take_steps, call_a_layer_alone,
        keep_results, replace_a_weight, fail,
    )
}  # fmt: skip
PLACES = pytest.mark.parametrize(("device", "rounding"), [("cpu", 1), ("cpu", 512), ("meta", 1)])


@PLACES
@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_of_calls_that_are_alike_is_that_of_dispatched_ones(
    name: str, device: str, rounding: int, passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, device) == ("fail", "meta"):
        pytest.skip("on meta, any index will do")
    check_repeated_layers(Net, PROGRAMS[name], device, rounding, passed, monkeypatch)


class ConvNet(nn.Module):
    """Layers that work in place or whose kernels have workspaces, each with two more like it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for _ in range(3):
            self.layers.append(nn.Conv2d(6, 6, 3, padding=1, groups=2))
            self.layers.append(nn.BatchNorm2d(6))
            self.layers.append(nn.ReLU(inplace=True))
        self.eval()
        self.means = [torch.ones(6)]  # no buffer as yet
        self.replaced: list[Any] = []
        self.replacing_calls: tuple[int, ...] = ()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in self.replacing_calls:
            self.replaced.append(self.layers[7].running_mean)  # so that both live at the peak
            self.layers[7].running_mean = self.means[0]
        out: Tensor = self.layers(x) * 2.0
        return out


def infer_from_images(model: nn.Module) -> None:
    with torch.no_grad():
        model(ones_like(model, 2, 6, 7, 5))


def train_on_images(model: nn.Module) -> None:
    model(ones_like(model, 2, 6, 7, 5)).sum().backward()


def replace_a_buffer(model: Any) -> None:
    model.replacing_calls = (3,)
    infer_from_images(model)


def keep_images(model: Any) -> None:
    with torch.no_grad():
        model.kept = [*getattr(model, "kept", ()), model(ones_like(model, 2, 6, 7, 5))]


def infer_with_other_kernels(model: nn.Module) -> None:
    infer_from_images(model)
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        infer_from_images(model)


ON_IMAGES = {
    program.__name__: program
    for program in (
        infer_from_images, train_on_images, replace_a_buffer, keep_images, infer_with_other_kernels,
    )
}  # fmt: skip


@PLACES
@pytest.mark.parametrize("name", ON_IMAGES)
def test_workspaces_of_calls_that_are_alike_are_those_of_dispatched_ones(
    name: str, device: str, rounding: int, passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check_repeated_layers(ConvNet, ON_IMAGES[name], device, rounding, passed, monkeypatch)
    known = (3, 4, 5, 6, 7, 8) if device == "cpu" else (5, 8)  # on meta, some workspaces are not
    assert found >= {f"layers.{number}" for number in known}


def check_repeated_layers(
    make: Callable[[], nn.Module],
    program: Program,
    device: str,
    rounding: int,
    passed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> set[str]:
    """Check that a profile does not tell which layers were dispatched; return the others."""

    def run() -> Any:
        with torch.device(device):
            model = make()
        return operators_and_memory(followed(model, program, 3, memory_rounding=rounding))

    found = run()
    fqns = {*passed}
    passed.clear()
    for cls in list(LAYERS):
        monkeypatch.delitem(LAYERS, cls)
    assert found == run()
    assert fqns and not passed
    return fqns


def test_output_of_a_layer_that_ran_without_the_mode_is_an_activation_of_its_own(
    passed: list[str],
) -> None:
    """The input, two weights and, for the backward pass, both results live at the peak."""
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 11, bias=False))
    x = torch.ones(3, 5)
    kept: list[Tensor] = []

    def program(model: nn.Module) -> None:
        kept[:] = []
        kept.append(model(x))

    profile = followed(model, program, 4)
    assert passed == ["0", "1", "0", "1"]
    assert profile.memory is not None
    assert profile.memory.peak_bytes == (5 * 7 + 7 * 11 + 3 * 5 + 3 * 7 + 3 * 11) * F32
    assert profile.memory.peak_at is not None
    assert profile.memory.peak_at.operator == "aten.mm.default"


def test_layer_whose_result_is_viewed_without_a_view_is_not_dispatched_each_time(
    passed: list[str],
) -> None:
    """Without a bias, three dimensions are folded into two and back by ``aten._unsafe_view``."""
    model = nn.Sequential(nn.Linear(5, 7, bias=False))
    kept: list[Tensor] = []
    x = torch.ones(2, 3, 5)
    profile = followed(model, lambda model: kept.append(model(x)), 4)
    assert passed == ["0", "0"]
    assert profile.memory is not None
    assert profile.memory.peak_bytes == (5 * 7 + 2 * 3 * 5 + 4 * 2 * 3 * 7) * F32


NOT_REPEATED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "results besides its output": (lambda: nn.LayerNorm(5), torch.ones(3, 5)),
    "a copy of its input": (lambda: nn.Linear(5, 7), torch.ones(5, 3, 2).permute(2, 1, 0)),
    "an empty output": (lambda: nn.Linear(5, 7), torch.ones(0, 5)),
    "an output of several storages": (lambda: nn.ReLU(), torch.eye(5).to_sparse()),
    "an output without a storage": (lambda: nn.ReLU(), torch.ones(3, 5).to_mkldnn()),
}


@pytest.mark.parametrize("kind", NOT_REPEATED)
def test_layer_is_dispatched_each_time_where_its_output_is_not_all_that_it_allocates(
    kind: str, passed: list[str]
) -> None:
    make, x = NOT_REPEATED[kind]

    def program(model: nn.Module) -> None:
        with torch.no_grad():
            model(x)

    model = nn.Sequential(make())
    profile = followed(model, program, 4)
    assert passed == []
    assert profile.root.children[0].calls == 4
    counted = followed(model, program, 4, memory=False)
    assert profile.root.children[0].ops == counted.root.children[0].ops


def test_timeline_has_every_call(passed: list[str]) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Identity())
    followed(model, lambda model: model(torch.ones(3, 5)), 4, memory="timeline")
    assert passed == []


def test_input_that_no_operator_made_is_met_by_a_layer_that_runs_without_the_mode(
    passed: list[str],
) -> None:
    """The second layer makes the calls known that the first one gets inputs of its own in."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    inputs = [torch.ones(3, 5) for _ in range(4)]
    kept: list[Tensor] = []

    def program(model: nn.Module) -> None:
        with torch.no_grad():
            kept.append(model(inputs[len(kept)]))

    profile = followed(model, program, 4)
    assert passed == ["0", "1"] * 3
    assert profile.memory is not None
    uses = {use.role: use.bytes for use in profile.memory.at_peak}
    assert uses["inputs"] == 4 * 3 * 5 * F32


@pytest.mark.parametrize("size", [1000, 0])
def test_layer_that_ran_without_the_mode_has_the_workspace_of_the_call_that_it_is_like(
    size: int, passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "_WORKSPACES", {})
    builtin_workspace(["aten::gelu"])(lambda *_, **__: size)
    kept: list[Tensor] = []
    x = torch.ones(3, 5)

    def program(model: nn.Module) -> None:
        kept.append(model(x))

    profile = followed(nn.Sequential(nn.GELU(), nn.Identity()), program, 4)
    assert passed == ["0", "0"]
    assert profile.memory is not None
    assert profile.memory.peak_bytes == (1 + 4) * 3 * 5 * F32 + size


def passed_so_far(model: nn.Module, x: Tensor, passed: list[str], *, with_mkldnn: str) -> list[int]:
    """Return how many layers have run without the mode after each of five calls.

    with_mkldnn: "0" or "1" for each call.
    """
    seen: list[int] = []

    def program(model: nn.Module) -> None:
        is_on = with_mkldnn[len(seen)] == "1"
        with torch.no_grad(), torch.backends.mkldnn.flags(enabled=is_on, allow_tf32=None):
            model(x)
        seen.append(len(passed))

    followed(nn.Sequential(model, nn.Identity()), program, len(with_mkldnn))
    return seen


def test_layer_is_dispatched_where_another_kernel_may_run_it(passed: list[str]) -> None:
    layer, x = nn.Conv2d(6, 6, 3, padding=1, groups=2), torch.ones(2, 6, 7, 5)
    assert passed_so_far(layer, x, passed, with_mkldnn="11101") == [0, 0, 1, 1, 2]


def test_layer_whose_kernel_took_nothing_is_dispatched_where_another_may_run_it(
    passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a convolution of size 1 in bfloat16: torch's own takes nothing, oneDNN reorders."""
    monkeypatch.setattr(workspaces, "_WORKSPACES", {})
    builtin_workspace(["aten::gelu"], always, is_steady=True)(lambda *_, **__: None)
    seen = passed_so_far(nn.GELU(), torch.ones(3, 5), passed, with_mkldnn="00010")
    assert seen == [0, 0, 1, 1, 2]


def test_layer_whose_kernel_was_reported_to_take_nothing_is_not_dispatched_again(
    passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "_WORKSPACES", {})
    builtin_workspace(["aten::gelu"], always, is_steady=True)(lambda *_, **__: None)
    model = nn.Sequential(nn.GELU(), nn.Identity())
    profile = followed(model, lambda model: model(torch.ones(3, 5)), 4)
    assert passed == ["0", "0"]
    assert profile.memory is not None and not profile.memory.is_lower_bound


def test_workspace_of_the_users_own_is_asked_each_time(
    passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "_WORKSPACES", {})
    sizes: list[int] = []
    register_workspace(torch.ops.aten.gelu)(lambda *_, **__: sizes.append(0) or 0)
    model = nn.Sequential(nn.GELU(), nn.Identity())
    followed(model, lambda model: model(torch.ones(3, 5)), 4)
    assert (passed, len(sizes)) == ([], 4)


def test_layer_in_whose_call_calls_are_aggregated_is_not_dispatched_for_good(
    passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = nn.Sequential(nn.Linear(5, 5)), torch.ones(3, 5)
    with FlopCounterMode(layer, display=False, memory=True) as counter:
        session, kernel = counter._active["session"], nn.functional.linear

        def linear(*args: Any) -> Tensor:
            session._aggregate()
            return kernel(*args)

        layer(x)  # the first of its kind tells nothing
        with monkeypatch.context() as patch:
            patch.setattr(LAYERS[nn.Linear], "function", linear)
            patch.setattr(nn.functional, "linear", linear)
            layer(x)
        assert not passed
        layer(x), layer(x)
    assert passed == ["0"]
