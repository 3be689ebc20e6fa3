"""What a program launches outside of operators is warned of and noted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode, FlopMeter, Profile, _torch
from dispatch_flops.errors import UncountedWarning
from tests.helpers.profiling import profile_of

Launch = Callable[[str], None]


class Graph:
    """As ``torch.cuda.CUDAGraph``, of which there is none without a GPU."""

    def __init__(self, replayed: list[Any]) -> None:
        self.replayed = replayed

    def replay(self) -> None:
        self.replayed.append(self)


class HookChain:
    """As Triton has it: what is added is called before each launch."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add(self, call: Any) -> None:
        if call not in self.calls:
            self.calls.append(call)

    def remove(self, call: Any) -> None:
        if call in self.calls:
            self.calls.remove(call)

    def __call__(self, metadata: Any) -> None:
        for call in self.calls:
            call(metadata)


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> HookChain:
    """In place of Triton, which launches no kernel without a GPU."""
    chain = HookChain()
    runtime = SimpleNamespace(launch_enter_hook=chain)
    stand_in = SimpleNamespace(knobs=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "triton", stand_in)
    return chain


@pytest.fixture
def launch(chain: HookChain) -> Launch:
    return lambda name: chain(SimpleNamespace(data={"name": name}))


def notes(run: Callable[[], Any]) -> list[str]:
    return [note for note in profile_of(run).notes if "Triton" in note]


def test_launch_outside_of_operators_is_noted_and_warned_of(
    chain: HookChain, launch: Launch
) -> None:
    with pytest.warns(UncountedWarning, match="the Triton kernel rms_norm ran outside") as caught:
        found = notes(lambda: (launch("rms_norm"), launch("rms_norm")))
    assert [str(w.message) for w in caught] == found
    assert chain.calls == []


@pytest.mark.filterwarnings("ignore:the Triton kernel:UserWarning")
def test_each_kernel_is_named_once(launch: Launch) -> None:
    (note,) = notes(lambda: [launch(name) for name in ("a", "b", "a")])
    assert "the Triton kernels a, b ran" in note


@pytest.mark.filterwarnings("ignore:the Triton kernel:UserWarning")
@pytest.mark.parametrize("data", [None, {}, {"stream": 0}])
def test_kernel_whose_metadata_has_no_name_is_noted(chain: HookChain, data: Any) -> None:
    (note,) = notes(lambda: chain(SimpleNamespace(data=data)))
    assert "the Triton kernel unnamed ran" in note


def counted_as_operator(run: Callable[[torch.Tensor], torch.Tensor]) -> Profile:
    """Return the profile of a custom operator with a formula, whose kernel is ``run``."""
    with torch.library._scoped_library("launching", "FRAGMENT") as library:
        library.define("sum(Tensor x) -> Tensor")
        library.impl("sum", run, "CPU")
        with FlopCounterMode(
            display=False, custom_mapping={torch.ops.launching.sum: lambda x, **_: x.numel()}
        ) as counter:
            torch.ops.launching.sum(torch.ones(3, 5))
    return counter.profile


def test_what_a_custom_operator_launches_is_part_of_it(launch: Launch) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        launch("sum")
        return x.new_empty(())

    profile = counted_as_operator(run)
    assert profile.total().flops == 3 * 5
    assert profile.notes == ()


def test_launches_while_counting_is_paused_are_not_noted(launch: Launch) -> None:
    with FlopCounterMode(display=False) as counter:
        counter.pause()
        launch("outside")
        counter.resume()
    assert counter.profile.notes == ()


def test_meter_warns_of_launches_once(launch: Launch) -> None:
    model = nn.Linear(3, 5)
    meter = FlopMeter(model, verify_every=1)
    with pytest.warns(UncountedWarning, match="the Triton kernel rms_norm ran outside") as caught:
        for _ in range(2):
            with meter.step():
                model(torch.ones(2, 3))
                launch("rms_norm")
    assert len(caught) == 1


def test_replays_of_cuda_graphs_are_noted_and_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[Any] = []
    own = Graph.replay
    followed = _torch.FollowedMethod(Graph, "replay")
    monkeypatch.setattr(_torch, "graph_replays", followed)
    graph = Graph(replayed)
    with pytest.warns(UncountedWarning, match="CUDA graphs were replayed 2 times") as caught:
        profile = profile_of(lambda: (graph.replay(), graph.replay()))
    assert profile.notes == (str(caught[0].message),)
    graph.replay()
    assert len(replayed) == 3
    assert Graph.replay is own


class AOTICompiledModel:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_runs_of_aot_inductor_packages_are_noted_and_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = SimpleNamespace(AOTICompiledModel=AOTICompiledModel)
    monkeypatch.setitem(sys.modules, "torch.export.pt2_archive._package", stand_in)
    package, x = AOTICompiledModel(), torch.ones(3)
    with pytest.warns(UncountedWarning, match="AOTInductor's packages ran once") as caught:
        profile = profile_of(lambda: package(x))
    assert profile.notes == (str(caught[0].message),)
    assert package(x) is x


def test_replays_and_packages_within_a_custom_operator_are_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_torch, "graph_replays", _torch.FollowedMethod(Graph, "replay"))
    stand_in = SimpleNamespace(AOTICompiledModel=AOTICompiledModel)
    monkeypatch.setitem(sys.modules, "torch.export.pt2_archive._package", stand_in)
    graph, package = Graph([]), AOTICompiledModel()

    def run(x: torch.Tensor) -> torch.Tensor:
        graph.replay()
        return package(x).new_empty(())

    assert counted_as_operator(run).notes == ()
    assert len(graph.replayed) == 1


@pytest.fixture
def triton() -> Iterator[Any]:
    yield pytest.importorskip("triton")


@pytest.mark.filterwarnings("ignore:the Triton kernel:UserWarning")
def test_triton_has_the_hook_that_is_taken(triton: Any) -> None:
    from triton.compiler.compiler import LazyDict

    chain = triton.knobs.runtime.launch_enter_hook
    (note,) = notes(lambda: chain(LazyDict({"name": "kernel_of_mine", "stream": 0})))
    assert "kernel_of_mine" in note
