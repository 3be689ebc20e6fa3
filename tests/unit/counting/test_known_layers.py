"""Calls of layers that are like earlier ones: not dispatched again, and counted as if they were."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode, OpCost, Profile, _torch, register_flops
from dispatch_flops.counting import known_layers
from dispatch_flops.counting.known_layers import LAYERS
from dispatch_flops.errors import UncountedWarning
from dispatch_flops.operators.registry import overridden, unregister_flops
from tests.helpers.modes import NamesBesideCompiled, OperatorNames
from tests.helpers.undispatched import imported_again, note_layers, signalled_at

aten = torch.ops.aten
Program = Callable[[nn.Module], Any]
Run = Callable[..., Profile]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the fqns of the layers whose calls are not dispatched, one for each call."""
    return note_layers(monkeypatch)


def counted(model: nn.Module, *programs: Program, **options: Any) -> Profile:
    with FlopCounterMode(model, display=False, **options) as counter:
        for program in programs:
            program(model)
    return counter.profile


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return ``counted``, with every call dispatched."""

    def run(model: nn.Module, *programs: Program, **options: Any) -> Profile:
        with monkeypatch.context() as patch:
            for cls in list(LAYERS):
                patch.delitem(LAYERS, cls)
            return counted(model, *programs, **options)

    return run


def facts(profile: Profile) -> Any:
    """Return everything that a profile says of the modules and operators."""
    return {
        node.fqn: (node.calls, node.ops, node.total_params, node.active_params, node.output_shapes)
        for root in (profile.root, profile.outside)
        for node in root.walk()
    }


def step(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()


LAYERS_AND_INPUTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(5, 7), (3, 5)),
    "Linear without bias": (lambda: nn.Linear(5, 7, bias=False), (3, 5)),
    "Linear of three dimensions": (lambda: nn.Linear(5, 7), (2, 3, 5)),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 4, stride=2), (5, 2, 11)),
    "Conv2d": (lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2), (5, 2, 7, 6)),
    "Conv2d, padding same": (lambda: nn.Conv2d(2, 3, 3, padding="same"), (5, 2, 7, 6)),
    "Conv3d": (lambda: nn.Conv3d(1, 2, 2, bias=False), (1, 1, 3, 4, 5)),
    "LayerNorm": (lambda: nn.LayerNorm((3, 5)), (2, 3, 5)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(5, bias=False), (3, 5)),
    "LayerNorm without parameters": (
        lambda: nn.LayerNorm(5, elementwise_affine=False), (3, 5)
    ),
    "RMSNorm": (lambda: nn.RMSNorm(5), (3, 5)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), (3, 6, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3).eval(), (2, 3, 5, 7)),
    "GELU": (lambda: nn.GELU(), (3, 5)),
    "GELU with tanh": (lambda: nn.GELU("tanh"), (3, 5)),
    "ReLU": (lambda: nn.ReLU(), (3, 5)),
    "SiLU": (lambda: nn.SiLU(), (3, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS_AND_INPUTS)
@pytest.mark.parametrize("way", ["backward", "no_grad", "inference", "meta"])
def test_calls_that_are_alike_count_as_dispatched_ones(
    name: str, way: str, passed: list[str], dispatched: Run
) -> None:
    """The first call shows that there is such a kind, the second one is kept for later ones."""
    make, shape = LAYERS_AND_INPUTS[name]
    model = nn.Sequential(make(), nn.Identity())
    x = torch.randn(shape)
    if way == "meta":
        model, x = model.to("meta"), x.to("meta")

    def run(model: nn.Module) -> None:
        if way == "no_grad":
            with torch.no_grad():
                model(x)
        elif way == "inference":
            with torch.inference_mode():
                model(x)
        else:
            step(model, x.clone().requires_grad_())

    profile = counted(model, run, run, run, run)
    assert passed == ["0", "0"]
    assert facts(profile) == facts(dispatched(model, run, run, run, run))


def test_embedding_of_other_indices_is_like_an_earlier_call(
    passed: list[str], dispatched: Run
) -> None:
    model = nn.Sequential(nn.Embedding(11, 3))
    programs = [lambda model, i=i: model(torch.tensor([i, 2 * i, 3])) for i in range(4)]
    profile = counted(model, *programs)
    assert passed == ["0", "0"]
    assert facts(profile) == facts(dispatched(model, *programs))


def test_first_call_of_a_layer_that_is_like_those_of_others_is_not_dispatched(
    passed: list[str], dispatched: Run
) -> None:
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    x = torch.randn(3, 5)
    profile = counted(model, lambda model: step(model, x))
    assert passed == ["2", "3"]
    assert facts(profile) == facts(dispatched(model, lambda model: step(model, x)))
    assert profile.total().macs == 4 * 3 * 5 * 5 * 2 + 3 * 3 * 5 * 5  # the first has no input grad


def test_layers_of_several_kinds_in_turns_are_told_apart(passed: list[str]) -> None:
    def layers() -> list[nn.Module]:
        return [nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 5, bias=False), nn.ReLU()]

    model = nn.Sequential(*layers(), *layers(), *layers())
    profile = counted(model, under(torch.no_grad), under(torch.no_grad))
    assert set(passed) == {str(position) for position in range(12)}
    gelu = counted(nn.GELU(), lambda model: model(x)).total().flops
    layers_flops = 2 * 2 * 3 * 5 * 5 + 3 * 5 + gelu + 3 * 5  # two products, a bias, GELU and ReLU
    assert profile.total().flops == 2 * 3 * layers_flops


# -- calls that are not alike ---------------------------------------------------------------------

x = torch.randn(3, 5)


class SmallLinear(nn.Linear):
    """A class of the program's own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input[:1])


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out + out if func is F.linear else out


def with_other_function_on_the_class(model: nn.Module) -> None:
    forward = nn.Linear.forward
    nn.Linear.forward = lambda self, x: forward(self, x) + 1  # type: ignore[method-assign]
    try:
        model(x)
    finally:
        nn.Linear.forward = forward  # type: ignore[method-assign]


def with_other_function_of_torch(model: nn.Module) -> None:
    linear = F.linear
    F.linear = lambda *args: linear(*args) + 1  # type: ignore[assignment]
    try:
        model(x)
    finally:
        F.linear = linear


def with_own_forward(model: nn.Module) -> None:
    layer = model[0]  # type: ignore[index]
    layer.forward = lambda x: F.linear(x, layer.weight)
    try:
        model(x)
    finally:
        del layer.forward


def with_hook(register: Callable[[nn.Module], Any]) -> Program:
    def run(model: nn.Module) -> None:
        handle = register(model[0])  # type: ignore[index]
        try:
            with_grad(model)
        finally:
            handle.remove()

    return run


def without_bias(model: nn.Module) -> None:
    layer = model[0]  # type: ignore[index]
    bias, layer.bias = layer.bias, None
    model(x)
    layer.bias = bias


def of_its_own_weight(model: nn.Module) -> None:
    """The product reads each element of the weight once."""
    model(model[0].weight.detach()[:3])  # type: ignore[index]


def under_dual_level(model: nn.Module) -> None:
    with forward_ad.dual_level():
        model(forward_ad.make_dual(x, torch.ones_like(x)))


def under(context: Callable[[], Any]) -> Program:
    def run(model: nn.Module) -> None:
        with context():
            model(x)

    return run


def traced(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(model, (x,), check_trace=False)


def several_times(model: nn.Module) -> None:
    """A parameter is cast once."""
    with torch.autocast("cpu"):
        for _ in range(4):
            model(x)


def nested(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.nested.nested_tensor([torch.randn(2, 5), torch.randn(3, 5)]))


def with_grad(model: nn.Module) -> None:
    step(model, x.clone().requires_grad_())


VARIATIONS: dict[str, Program] = {
    "shape": lambda model: model(torch.randn(4, 5)),
    "dimensions": lambda model: model(torch.randn(2, 3, 5)),
    "strides": lambda model: model(torch.randn(5, 3).t()),
    "expanded": lambda model: model(torch.randn(1, 5).expand(3, 5)),
    "Parameter": lambda model: model(nn.Parameter(x)),
    "nested": nested,
    "by keyword": lambda model: model[0](input=x),  # type: ignore[index]
    "own forward": with_own_forward,
    "forward of the class": with_other_function_on_the_class,
    "function of torch": with_other_function_of_torch,
    "bias": without_bias,
    "memory of the weight": of_its_own_weight,
    "forward mode": under_dual_level,
    "vmap": lambda model: torch.vmap(model)(torch.randn(2, 3, 5)),
    "gradients of torch.func": lambda model: torch.func.grad(lambda x: model(x).sum())(x),
    "tracing": traced,
    "autocast": under(lambda: torch.autocast("cpu")),
    "autocast several times": several_times,
    "mode for functions": under(Doubling),
    "another dispatch mode": under(OperatorNames),
    "another counter": under(lambda: FlopCounterMode(display=False)),
    "saved tensors": under(
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2)
    ),
    "pre-hook": with_hook(lambda m: m.register_forward_pre_hook(lambda m, args: (args[0][:2],))),
    "hook": with_hook(lambda m: m.register_forward_hook(lambda m, args, out: out * 2)),
    "backward hook": with_hook(lambda m: m.register_full_backward_hook(lambda m, gi, go: None)),
    "backward pre-hook": with_hook(
        lambda m: m.register_full_backward_pre_hook(lambda m, go: None)
    ),
    "global pre-hook": with_hook(
        lambda m: register_module_forward_pre_hook(lambda m, args: (args[0] * 2,))
    ),
    "global backward pre-hook": with_hook(
        lambda m: register_module_full_backward_pre_hook(lambda m, go: None)
    ),
    "global hook": with_hook(
        lambda m: register_module_forward_hook(lambda m, args, out: out * 2)
    ),
    "global backward hook": with_hook(
        lambda m: register_module_full_backward_hook(lambda m, gi, go: None)
    ),
}  # fmt: skip


@pytest.mark.parametrize("variation", VARIATIONS)
def test_call_that_differs_is_counted_as_it_runs(
    variation: str, passed: list[str], dispatched: Run
) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Identity())
    programs = [lambda model: model(x)] * 3 + [with_grad] * 2 + [VARIATIONS[variation]]
    profile = counted(model, *programs)
    assert passed == ["0", "0"]
    assert facts(profile) == facts(dispatched(model, *programs))


@pytest.mark.parametrize("variation", VARIATIONS)
def test_call_that_differs_is_not_kept_for_one_that_does_not(
    variation: str, dispatched: Run
) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Identity())
    programs = [VARIATIONS[variation]] * 4 + [lambda model: model(x), with_grad]
    assert facts(counted(model, *programs)) == facts(dispatched(model, *programs))


def test_samples_of_vmap_are_not_like_those_of_another_batch(dispatched: Run) -> None:
    model = nn.Sequential(nn.Linear(5, 7))
    programs = [
        lambda model, n=n: torch.vmap(model)(torch.randn(n, 3, 5)) for n in (2, 2, 2, 11)
    ]  # fmt: skip
    assert facts(counted(model, *programs)) == facts(dispatched(model, *programs))


def setting(position: int, **attributes: Any) -> Program:
    """Return a program that sets attributes of a layer, and calls the model."""

    def run(model: Any) -> None:
        for name, value in attributes.items():
            setattr(model[position], name, value)
        model(model.example)

    return run


def with_weight_norm(model: Any) -> None:
    if not hasattr(model[0], "parametrizations"):
        nn.utils.parametrizations.weight_norm(model[0])
    model(model.example)


def with_weight_in_place(model: Any) -> None:
    """Give the layer a plain attribute, which comes before the parameter of that name."""
    vars(model[0])["weight"] = torch.randn(11, 5)
    vars(model[0])["bias"] = None
    model(model.example)


def with_strides_in_a_list(model: Any) -> None:
    model[0].stride = strides = [1, 1]
    for _ in range(3):
        model(model.example)
    strides[0] = 2
    model(model.example)


class Doubled(nn.Parameter):
    """A class of the program's own, which runs another operator in some calls."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            if func is F.linear:
                cls.calls += 1
                out = out * 2 if cls.calls % 3 else out
            return out


def with_weight_of_a_subclass(model: Any) -> None:
    model[0].weight = Doubled(torch.randn(5, 5))
    Doubled.calls = 0
    for _ in range(5):
        model(model.example)


def with_other_layer_norm(model: Any) -> None:
    layer_norm = torch.layer_norm
    torch.layer_norm = lambda *args: layer_norm(*args) * 2  # type: ignore[assignment]
    try:
        model(model.example)
    finally:
        torch.layer_norm = layer_norm


CHANGES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Program]] = {
    "stride": (lambda: nn.Conv2d(2, 3, 3), (1, 2, 7, 8), setting(0, stride=(2, 1))),
    "padding": (lambda: nn.Conv2d(2, 3, 3), (1, 2, 7, 8), setting(0, padding=(1, 2))),
    "dilation": (lambda: nn.Conv2d(2, 3, 2), (1, 2, 7, 8), setting(0, dilation=(2, 3))),
    "padding mode": (
        lambda: nn.Conv2d(2, 3, 3, padding=1), (1, 2, 7, 8), setting(0, padding_mode="circular")
    ),
    "method": (
        lambda: nn.Conv2d(2, 3, 3), (1, 2, 7, 8),
        setting(0, _conv_forward=lambda x, weight, bias: F.conv2d(x[..., 1:], weight, bias)),
    ),
    "training": (lambda: nn.BatchNorm2d(3).eval(), (2, 3, 5, 7), setting(0, training=True)),
    "statistics": (
        lambda: nn.BatchNorm2d(3).eval(), (2, 3, 5, 7),
        setting(0, running_mean=None, running_var=None),
    ),
    "normalized shape": (
        lambda: nn.LayerNorm((3, 5), elementwise_affine=False), (2, 3, 5),
        setting(0, normalized_shape=(5,)),
    ),
    "groups": (lambda: nn.GroupNorm(2, 12), (3, 12, 5), setting(0, num_groups=3)),
    "class of the program": (lambda: nn.Linear(5, 5), (3, 5), setting(0, __class__=SmallLinear)),
    "class": (lambda: nn.ReLU(), (3, 5), setting(0, __class__=nn.SiLU)),
    "class with other parameters": (
        lambda: nn.LayerNorm(5, bias=False), (3, 5), setting(0, __class__=nn.RMSNorm)
    ),
    "parametrization": (lambda: nn.Linear(5, 5), (3, 5), with_weight_norm),
    "weight of no parameter": (lambda: nn.Linear(5, 5), (3, 5), with_weight_in_place),
    "list that changes": (lambda: nn.Conv2d(2, 3, 3), (1, 2, 7, 8), with_strides_in_a_list),
    "class of the weight": (lambda: nn.Linear(5, 5), (3, 5), with_weight_of_a_subclass),
    "function of torch below": (lambda: nn.LayerNorm(5), (3, 5), with_other_layer_norm),
    "approximation": (lambda: nn.GELU(), (3, 5), setting(0, approximate="tanh")),
    "in place": (lambda: nn.ReLU(), (3, 5), setting(0, inplace=True)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_layer_whose_attributes_change_is_counted_as_it_runs(
    change: str, passed: list[str], dispatched: Run
) -> None:
    make, shape, changed = CHANGES[change]

    def model() -> nn.Module:
        made = nn.Sequential(make())
        made.example = torch.randn(shape)  # type: ignore[assignment]
        return made

    with torch.no_grad():
        programs = [setting(0), setting(0), setting(0), changed, changed, changed, changed]
        profile = counted(model(), *programs)
        assert "0" in passed
        assert facts(profile) == facts(dispatched(model(), *programs))


def test_calls_of_more_than_a_few_states_of_a_kind_are_dispatched(
    passed: list[str], dispatched: Run
) -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Conv2d(2, 3, 3))
        made.example = torch.randn(1, 2, 7, 8)  # type: ignore[assignment]
        return made

    programs = [setting(0)] + [setting(0, padding=(1, columns)) for columns in [*range(6)] * 2]
    profile = counted(model(), *programs)
    assert passed == ["0"] * 4
    assert facts(profile) == facts(dispatched(model(), *programs))


def test_embedding_that_renormalises_is_dispatched(passed: list[str], dispatched: Run) -> None:
    model, indices = nn.Sequential(nn.Embedding(11, 3, max_norm=1.0)), torch.tensor([1, 2])
    profile = counted(model, *[lambda model: model(indices)] * 4)
    assert passed == []
    assert "aten.embedding_renorm_.default" in profile.by_operator()


@pytest.mark.parametrize(
    ("layer", "shape", "context"),
    [
        (nn.RMSNorm(5), (3, 5), torch.no_grad),  # other operators on some devices
        (
            nn.BatchNorm2d(3).eval(), (2, 3, 5, 7),
            lambda: torch.backends.cudnn.flags(enabled=not torch.backends.cudnn.enabled),
        ),
    ],
)  # fmt: skip
def test_call_under_another_setting_of_torch_is_dispatched(
    layer: nn.Module, shape: tuple[int, ...], context: Callable[[], Any], passed: list[str]
) -> None:
    model, x = nn.Sequential(layer), torch.randn(shape)
    with FlopCounterMode(model, display=False):
        for _ in range(3):
            model(x)
        with context():
            model(x)
    assert passed == ["0"]


@pytest.mark.parametrize("mode", [OperatorNames, NamesBesideCompiled])
def test_mode_of_the_program_sees_the_operators_of_each_call(mode: type[OperatorNames]) -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    with FlopCounterMode(model, display=False):
        for _ in range(4):
            model(x)
        with mode() as names:
            model(x)
    assert names.seen == ["aten.t.default", "aten.addmm.default"]


def test_call_without_modes_is_not_counted() -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    with FlopCounterMode(model, display=False) as counter:
        for _ in range(4):
            model(x)
        with _torch.modes_disabled():
            model(x)
    assert counter.get_total_macs() == 4 * 3 * 5 * 5


def test_counter_within_another_one_counts_each_call() -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    with FlopCounterMode(model, display=False) as outer:
        for _ in range(4):
            model(x)
        with FlopCounterMode(model, display=False) as inner:
            model(x)
    assert (outer.get_total_macs(), inner.get_total_macs()) == (5 * 3 * 5 * 5, 3 * 5 * 5)


def test_traced_graph_is_as_without_a_counter() -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    before = torch.jit.trace(model, (x,), check_trace=False).inlined_graph
    with FlopCounterMode(model, display=False):
        for _ in range(4):
            model(x)
        graph = torch.jit.trace(model, (x,), check_trace=False).inlined_graph
    assert [node.kind() for node in graph.nodes()] == [node.kind() for node in before.nodes()]


@pytest.mark.parametrize("make", [lambda: SmallLinear(5, 5), lambda: nn.Tanh()])
def test_other_classes_are_dispatched(make: Callable[[], nn.Module], passed: list[str]) -> None:
    counted(nn.Sequential(make()), *[lambda model: model(x)] * 4)
    assert passed == []


# -- modules that need more -----------------------------------------------------------------------


class Calling(nn.Module):
    """Calls what it holds by ``call``."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], **held: nn.Module) -> None:
        super().__init__()
        self.call = call
        for name, module in held.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def test_shared_layer_belongs_to_each_of_its_callers(dispatched: Run) -> None:
    shared = nn.Linear(5, 5)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared, nn.ReLU()))
    programs = [lambda model: step(model, x)] * 3
    assert facts(counted(model, *programs)) == facts(dispatched(model, *programs))


def test_experts_still_count_their_tokens() -> None:
    experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
    model = Calling(lambda self, x: self.experts[0](x) + self.experts[1](x), experts=experts)
    profile = counted(model, *[lambda model: model(x)] * 4)
    assert profile.node("experts.1").tokens == 4 * 3


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_are_recomputed(use_reentrant: bool, dispatched: Run) -> None:
    inner = nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 5))
    model = Calling(
        lambda self, x: checkpoint(self.inner, x, use_reentrant=use_reentrant), inner=inner
    )
    programs = [lambda model: step(model, x.clone().requires_grad_())] * 4
    profile = counted(model, *programs)
    assert facts(profile) == facts(dispatched(model, *programs))
    assert profile.total("recompute").macs == 4 * (2 if use_reentrant else 1) * 3 * 5 * 5


def test_backward_belongs_to_the_layers_that_made_its_nodes(dispatched: Run) -> None:
    model = Calling(
        lambda self, x: self.a(self.a(x) * 2).relu() + self.b(x).exp(),
        a=nn.Linear(5, 5), b=nn.Linear(5, 5),
    )  # fmt: skip
    programs = [lambda model: step(model, x)] * 4
    profile = counted(model, *programs)
    assert facts(profile) == facts(dispatched(model, *programs))
    # By its two calls, the second of which gives its input a gradient.
    assert profile.by_module("backward")["a"].macs == 4 * 3 * 3 * 5 * 5


def test_backward_of_a_layer_that_ran_in_another_thread_belongs_to_it() -> None:
    model, gradient = nn.Sequential(nn.Linear(5, 5), nn.ReLU()), torch.ones(3, 5)
    outputs: list[Tensor] = []

    def run(counter: FlopCounterMode) -> None:
        with counter.in_thread():
            outputs.extend(model(x) for _ in range(4))

    with FlopCounterMode(model, display=False) as counter:
        thread = threading.Thread(target=run, args=(counter,))
        thread.start()
        thread.join()
        outputs[-1].backward(gradient)
    assert counter.profile.by_module("backward")["1"].flops == 3 * 5
    assert counter.profile.by_module("backward")["0"].macs == 3 * 5 * 5


def test_parameter_that_a_layer_is_given_is_active() -> None:
    model = Calling(lambda self, x: self.layer(self.given), layer=nn.Linear(5, 5))
    with FlopCounterMode(model, display=False) as counter:
        for _ in range(4):
            model.given = nn.Parameter(torch.randn(3, 5))
            model(x)
    assert counter.profile.root.active_params == 3 * 5 + 5 * 5 + 5


def test_parameter_that_replaces_another_is_active() -> None:
    model = nn.Sequential(nn.Linear(5, 5))

    def replace_weight(model: Any) -> None:
        model[0].weight = nn.Parameter(torch.randn(5, 5))
        model(x)

    profile = counted(model, *[lambda model: model(x)] * 4, replace_weight)
    assert profile.root.active_params == 5 * 5 + 5


def test_functional_call_with_other_tensors_uses_no_parameter() -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    given = {"0.weight": torch.randn(5, 5), "0.bias": torch.randn(5)}
    with FlopCounterMode(model, display=False) as counter:
        for _ in range(4):
            torch.func.functional_call(model, given, (x,))
        tracker = counter._active["session"]._tracker
        assert tracker.used_params() == set()
    assert counter.get_total_macs() == 4 * 3 * 5 * 5


def test_backward_from_the_output_of_a_layer_belongs_to_it(dispatched: Run) -> None:
    model, gradient = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), torch.ones(3, 5)
    programs = [lambda model: model(x).backward(gradient), lambda model: model.zero_grad()] * 4
    profile = counted(model, *programs)
    assert facts(profile) == facts(dispatched(model, *programs))
    assert profile.by_module("backward")["1"].macs == 4 * 2 * 3 * 5 * 5


def test_layer_in_a_thread_is_counted_there(passed: list[str]) -> None:
    model = nn.Sequential(nn.Linear(5, 5))

    def run(counter: FlopCounterMode) -> None:
        with counter.in_thread():
            for _ in range(4):
                model(x)

    with FlopCounterMode(model, display=False) as counter:
        thread = threading.Thread(target=run, args=(counter,))
        thread.start()
        thread.join()
        model(x)
    assert len(passed) == 3
    assert counter.get_total_macs() == 5 * 3 * 5 * 5


# -- formulas -------------------------------------------------------------------------------------


def test_formula_of_an_operator_of_torch_is_asked_each_time(passed: list[str]) -> None:
    numbers = iter(range(100))
    mapping = {aten.addmm.default: lambda *args, **kwargs: next(numbers)}
    model = nn.Sequential(nn.Linear(5, 5))
    counted(model, *[lambda model: model(x)] * 4, custom_mapping=mapping)
    assert passed == []


def test_formula_of_another_library_changes_nothing(passed: list[str]) -> None:
    with overridden({"library_of_no_test::op": lambda *args, **kwargs: 1}):
        counted(nn.Sequential(nn.Linear(5, 5)), *[lambda model: model(x)] * 4)
    assert passed == ["0", "0"]


def test_formula_that_is_registered_within_the_block_is_asked_from_then_on() -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    try:
        with FlopCounterMode(model, display=False) as counter:
            for _ in range(4):
                model(x)
            before = counter.get_total_flops()
            register_flops(aten.addmm, override=True)(lambda *args, **kwargs: OpCost(flops=1009))
            model(x)
    finally:
        unregister_flops(aten.addmm)
    assert counter.get_total_flops() == before + 1009


def test_formula_of_a_layer_is_asked(passed: list[str]) -> None:
    mapping = {nn.Linear: lambda module, x, out, **kwargs: OpCost(flops=1013)}
    model = nn.Sequential(nn.Linear(5, 5))
    profile = counted(model, *[lambda model: model(x)] * 4, custom_mapping=mapping)
    assert (passed, profile.total().flops) == ([], 4 * 1013)


@pytest.mark.parametrize("options", [{"latency": True}, {"memory": "timeline"}], ids=str)
def test_counter_that_follows_more_sees_every_operator(
    options: dict[str, Any], passed: list[str]
) -> None:
    counted(nn.Sequential(nn.Linear(5, 5)), *[lambda model: model(x)] * 4, **options)
    assert passed == []


# -- limits, errors and interrupts ----------------------------------------------------------------


def test_kinds_beyond_the_limit_are_forgotten(
    passed: list[str], dispatched: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_layers, "_LIMIT", 3)
    model = nn.Sequential(nn.Linear(5, 5))
    programs = [lambda model, n=n: model(torch.randn(n, 5)) for n in (1, 1, 1, 2, 3, 4, 1, 1, 1)]
    profile = counted(model, *programs)
    assert passed == ["0", "0"]
    assert facts(profile) == facts(dispatched(model, *programs))


def test_costs_that_are_aggregated_during_a_call_are_not_taken_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    with FlopCounterMode(model, display=False) as counter:
        for rows in (1, 2, 3):
            model(x[:rows])
        session, kernel = counter._active["session"], F.linear

        def linear(*args: Any) -> Tensor:
            session._aggregate()
            return kernel(*args)

        with monkeypatch.context() as patch:
            patch.setattr(LAYERS[nn.Linear], "function", linear)
            patch.setattr(F, "linear", linear)
            model(x[:3])
        model(x[:3])
    calls = {op: found.calls for op, found in counter.profile.by_operator().items()}
    assert calls == {"aten.slice.Tensor": 5, "aten.t.default": 5, "aten.addmm.default": 5}


def test_call_in_which_signatures_are_forgotten_is_not_taken_for_a_whole_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer of several operators, the first of which are aggregated while it runs.

    A counter with a formula of its own knows none from earlier counters.
    """
    model = nn.Sequential(*(nn.RMSNorm(5) for _ in range(4)))
    own = {torch.ops.quantized.add: lambda *args, **kwargs: OpCost()}

    @torch.no_grad()
    def run(model: nn.Module) -> None:
        model(x)

    whole = counted(model, run).total().flops
    for limit in range(2, 9):
        monkeypatch.setattr("dispatch_flops.counting.dispatch_mode._LIMIT", limit)
        found = counted(model, *[run] * 5, custom_mapping=own)
        assert found.total().flops == 5 * whole


@pytest.mark.parametrize(("owner", "name"), [(F, "linear"), (nn.Linear, "forward")], ids=str)
def test_layer_that_was_replaced_before_the_import_is_dispatched(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a library put in place of torch's function may compute anything."""
    own = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: own(*args))
    later = imported_again(known_layers).LAYERS
    assert {cls.__name__ for cls in LAYERS} - {cls.__name__ for cls in later} == {"Linear"}


def test_layer_that_gets_the_name_of_its_former_holder_is_counted(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """A program wraps a layer, as an adapter does, and takes the wrapper off again."""

    class Wrapper(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x)

    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    with FlopCounterMode(model, display=False) as counter:
        for i in range(9):
            if i == 2:
                model[0] = Wrapper(model[0])
            if i == 6:
                model[0] = model[0].base  # type: ignore[assignment]
            model(x)
    macs = {fqn: cost.macs for fqn, cost in counter.profile.by_module().items()}
    each = 3 * 5 * 5
    assert macs == {"": 18 * each, "0": 9 * each, "0.base": 4 * each, "1": 9 * each}
    assert not recwarn.list


def test_function_mode_of_the_program_sees_nothing_that_the_counter_asks() -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    seen: list[str] = []

    class Noting(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def watched(model: nn.Module) -> None:
        with Noting():
            model(x)

    counted(model, lambda model: model(x), watched)
    assert seen == ["linear"]


def test_call_that_raises_is_not_counted_and_lets_the_mode_in_again(passed: list[str]) -> None:
    model = nn.Sequential(nn.Embedding(11, 3))
    with FlopCounterMode(model, display=False) as counter:
        for _ in range(3):
            model(torch.tensor([1, 2]))
        with pytest.raises(IndexError):
            model(torch.tensor([1, 11]))
        x @ x.t()
    assert passed == ["0", "0"]
    assert counter.profile.by_operator()["aten.embedding.default"].calls == 3
    assert counter.get_total_macs() == 3 * 5 * 3


def test_parameter_of_a_layer_whose_calls_all_raise_is_not_active() -> None:
    model, rows = nn.Sequential(nn.BatchNorm2d(3).eval()), torch.randn(2, 3, 5)
    with FlopCounterMode(model, display=False) as counter:
        for _ in range(3):
            with pytest.raises(ValueError, match="expected 4D input"):
                model(rows)
    assert counter.profile.root.active_params == 0


def test_error_of_a_signals_handler_is_the_programs() -> None:
    """It arrives while an earlier call is looked for."""
    model = nn.Sequential(nn.Linear(5, 5))

    def give_up() -> None:
        raise TimeoutError

    with FlopCounterMode(model, display=False):
        model(x)
        with signalled_at(_torch.function_transforms, give_up), pytest.raises(TimeoutError):
            model(x)


def test_first_call_that_raises_has_no_output() -> None:
    model = nn.Sequential(*(nn.Embedding(11, 3) for _ in range(3)))
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 11])
    with FlopCounterMode(model, display=False) as counter:
        model[0](good)
        model[1](good)
        with pytest.raises(IndexError):
            model[2](bad)
        assert counter.profile.node("2").output_shapes is None
        model[2](good)
    assert counter.profile.node("2").output_shapes == ((2, 3),)


@pytest.fixture
def interrupting() -> Iterator[Callable[[nn.Module], None]]:
    """Return what calls a model and interrupts the product of its first layer."""

    def run(model: nn.Module) -> None:
        def interrupt(frame: Any, event: str, what: Any) -> None:
            if event == "c_return" and what is F.linear:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

        sys.setprofile(interrupt)
        model(x)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    yield run
    signal.signal(signal.SIGINT, handler)
    sys.setprofile(None)


def test_interrupt_of_a_layer_that_ends_the_block_leaves_nothing_behind(
    interrupting: Program, passed: list[str]
) -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    with pytest.raises(KeyboardInterrupt), FlopCounterMode(model, display=False) as counter:
        for _ in range(3):
            model(x)
        interrupting(model)
    assert passed == ["0", "0"]
    assert counter.get_total_macs() == 3 * 3 * 5 * 5
    with OperatorNames() as names:
        x + x
    assert names.seen == ["aten.add.Tensor"]


def test_interrupt_of_a_layer_within_the_block_is_told(interrupting: Program) -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    with pytest.warns(UncountedWarning, match="broken off"):  # noqa: SIM117
        with FlopCounterMode(model, display=False) as counter:
            for _ in range(3):
                model(x)
            with pytest.raises(KeyboardInterrupt):
                interrupting(model)
            model(x)
            x @ x.t()
    assert counter.get_total_macs() == 4 * 3 * 5 * 5 + 3 * 5 * 3


def test_interrupt_of_a_layer_before_the_end_of_the_block_is_told(interrupting: Program) -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    with pytest.warns(UncountedWarning, match="broken off"):  # noqa: SIM117
        with FlopCounterMode(model, display=False):
            for _ in range(3):
                model(x)
            with pytest.raises(KeyboardInterrupt):
                interrupting(model)


def test_interrupt_of_a_layer_ends_at_an_optimizer_step(interrupting: Program) -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x).sum().backward()
    with pytest.warns(UncountedWarning, match="broken off"):  # noqa: SIM117
        with FlopCounterMode(model, display=False) as counter:
            for _ in range(3):
                model(x)
            with pytest.raises(KeyboardInterrupt):
                interrupting(model)
            optimizer.step()
    assert counter.profile.total("optimizer").flops == 2 * (5 * 5 + 5)


def test_no_tensor_is_kept_alive() -> None:
    model = nn.Sequential(nn.Linear(5, 5))
    with FlopCounterMode(model, display=False):
        for _ in range(4):
            model(x)
        weight = weakref.ref(model[0].weight)
        model[0].weight = nn.Parameter(torch.randn(5, 5))  # type: ignore[union-attr]
        assert weight() is None


def test_layer_that_a_signals_handler_breaks_off_is_told_and_counted_once(
    passed: list[str],
) -> None:
    """The handler calls a model while a layer runs without the mode."""
    model, other = nn.Sequential(nn.Linear(5, 5)), nn.Sequential(nn.Linear(7, 11))

    with pytest.warns(UncountedWarning, match="broken off"):  # noqa: SIM117
        with FlopCounterMode(model, display=False) as counter:
            for _ in range(3):
                model(x)
            with signalled_at(nn.Linear.forward, lambda: other(torch.randn(2, 7))):
                model(x)
            model(x)
    assert passed == ["0", "0", "0"]
    assert counter.get_total_macs() == 5 * 3 * 5 * 5 + 2 * 7 * 11
