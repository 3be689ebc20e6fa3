"""What a counting backend is given, what it refuses, and what it says of unknown operators."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from dispatch_flops import FlopCounterMode, OpCost, register_flops, unregister_flops
from dispatch_flops.compile import counting_backend
from dispatch_flops.errors import (
    ConfigError,
    TargetError,
    UncountedOpsError,
    UncountedWarning,
)
from tests.helpers.profiling import profile_of

pytestmark = pytest.mark.slow

A, B, C = 3, 5, 7


@torch.library.custom_op("test_backend_options::product", mutates_args=())
def product(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@product.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], y.shape[1])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(B, C)
        self.down = nn.Linear(C, B)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def unknown(x: Tensor, y: Tensor) -> Tensor:
    return product(x, y) @ y.t()


def train(model: Any) -> None:
    model(torch.ones(A, B)).sum().backward()


# -- operators without a known cost -------------------------------------------------------------


def test_step_names_an_unknown_operator_and_warns_once() -> None:
    backend = counting_backend("aot_eager")
    compiled = torch.compile(unknown, backend=backend)
    compiled(torch.ones(A, B), torch.ones(B, C))
    with pytest.warns(UncountedWarning, match=r"test_backend_options.product.default \(1 call\)"):
        step = backend.step()
    assert step.uncounted == {"test_backend_options.product.default": 1}
    assert step.is_lower_bound
    assert step.total.macs == A * C * B
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not backend.step().is_lower_bound  # nothing ran
        compiled(torch.ones(A, B), torch.ones(B, C))
        assert backend.step().is_lower_bound
        backend.total()


@pytest.mark.parametrize("ask", ["step", "total"])
def test_strict_backend_raises_at_an_unknown_operator(ask: str) -> None:
    backend = counting_backend("aot_eager", strict=True)
    torch.compile(unknown, backend=backend)(torch.ones(A, B), torch.ones(B, C))
    with pytest.raises(UncountedOpsError, match="test_backend_options.product"):
        getattr(backend, ask)()
    assert backend.profile().uncounted_ops()  # says which, and does not raise


def test_formula_registered_after_compiling_acts_and_can_go_again() -> None:
    backend = counting_backend("aot_eager", strict=True)
    torch.compile(unknown, backend=backend)(torch.ones(A, B), torch.ones(B, C))
    with pytest.raises(UncountedOpsError):
        backend.total()
    register_flops(product)(lambda x, y, out: OpCost(macs=A * B * C, flops=2 * A * B * C))
    try:
        assert backend.total().macs == 2 * A * B * C
    finally:
        unregister_flops(product)
    with pytest.raises(UncountedOpsError):
        backend.total()


# -- runs that do not end ----------------------------------------------------------------------


def test_run_that_raises_is_not_counted() -> None:
    class StoppedError(Exception):
        pass

    def failing(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            if fails:
                raise StoppedError
            return graph(*inputs)

        return run

    fails = True
    backend = counting_backend(failing)
    compiled = torch.compile(Net(), backend=backend)
    with torch.no_grad():
        with pytest.raises(StoppedError):
            compiled(torch.ones(A, B))
        assert backend.total().macs == 0
        fails = False
        compiled(torch.ones(A, B))
    assert backend.total().macs == 2 * A * B * C


def test_runs_in_several_threads_do_not_disturb_each_other() -> None:
    inside = threading.Barrier(2)

    @torch.library.custom_op("test_backend_options::meet", mutates_args=())
    def meet(x: Tensor) -> Tensor:
        inside.wait(timeout=30)
        return x.clone()

    meet.register_fake(torch.empty_like)
    backend = counting_backend("aot_eager")
    compiled = torch.compile(lambda x: meet(x) @ x.t(), backend=backend)
    inputs = [torch.full((A, B), float(value)) for value in (1, 2)]
    compiled_alone = threading.Thread(target=inside.wait)
    compiled_alone.start()
    compiled(inputs[0])
    compiled_alone.join()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(compiled, inputs))
    assert [result[0, 0].item() for result in results] == [B, 4 * B]
    assert backend.profile().total().macs == 3 * A * B * A


# -- backends that are wrapped --------------------------------------------------------------------


def as_it_is(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    return graph.forward


def by_aot_autograd(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    return aot_autograd(fw_compiler=as_it_is)(graph, inputs)


class Compiler:
    def __call__(self, graph: fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        self.options = options
        return graph.forward


@pytest.mark.parametrize(
    "wrapped",
    [
        "eager",
        "aot_eager",
        "aot_eager_decomp_partition",
        as_it_is,
        by_aot_autograd,
        aot_autograd(fw_compiler=as_it_is),
        Compiler(),
    ],
    ids=lambda wrapped: getattr(wrapped, "__name__", str(type(wrapped).__name__)),
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_wrapped_backend_counts_forward_and_backward(wrapped: Any, dynamic: bool) -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    eager = profile_of(train, plain, model=plain)
    backend = counting_backend(wrapped, model)
    train(torch.compile(model, backend=backend, dynamic=dynamic))
    costs = backend.step().costs
    assert costs["forward"].macs == eager.total("forward").macs == 2 * A * B * C
    assert costs["backward"].macs == eager.total("backward").macs == 3 * A * B * C
    macs = {fqn: cost.macs for fqn, cost in backend.profile().by_module("backward").items()}
    assert macs == {"": 3 * A * B * C, "up": A * B * C, "down": 2 * A * B * C}
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_wrapped_callable_is_given_the_options_of_torch_compile() -> None:
    compiler = Compiler()
    compiled = torch.compile(Net(), backend=counting_backend(compiler), options={"level": 3})
    with torch.no_grad():
        compiled(torch.ones(A, B))
    assert compiler.options == {"options": {"level": 3}}


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["causal", "flops"])
def test_counting_backend_refuses_a_convention_as_the_counter_does(option: str) -> None:
    messages = []
    for make in (counting_backend, FlopCounterMode):
        with pytest.raises(ConfigError, match=f"{option}='odd': choose") as raised:
            make(**{option: "odd"})  # type: ignore[arg-type]
        messages.append(str(raised.value))
    assert len(set(messages)) == 1


@pytest.mark.parametrize("model", [3, "model", [nn.Linear(1, 1), 3], nn.Linear])
def test_counting_backend_refuses_what_is_not_a_model(model: Any) -> None:
    with pytest.raises(TargetError, match="pass an nn.Module"):
        counting_backend("aot_eager", model)


def test_counting_backend_refuses_a_model_in_the_place_of_the_backend() -> None:
    with pytest.raises(TargetError, match="backend is a Linear; pass a model as model="):
        counting_backend(nn.Linear(3, 5))


FUSING = {"epilogue_fusion": True}
WRONG_TYPES = [{"mode": 5}, {"mode": ["x"]}, {"options": 5}, {"options": "x"}, {"options": {1: 2}}]


@pytest.mark.parametrize(
    ("backend", "given", "message"),
    [
        ("aot_eager", {"options": FUSING}, "leave them out"),
        ("inductor", {"mode": "max-autotune", "options": FUSING}, "pass one of them"),
        ("inductor", {"mode": "fastest"}, "fastest"),
        ("inductor", {"options": {"not_an_option": True}}, "options: Unexpected .* not_an_option"),
        ("inductor", {"options": {"max_autotune": 3}}, "options: Unexpected .* max_autotune"),
        *(
            (backend, given, f"{next(iter(given))}=.*: pass a")
            for backend in ("inductor", "eager", Compiler())
            for given in WRONG_TYPES
        ),
    ],
)
def test_counting_backend_refuses_mode_and_options_that_do_not_fit(
    backend: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        counting_backend(backend, **given)


def test_counting_backend_takes_options_spelt_as_torch_compile_does() -> None:
    backend = counting_backend("inductor", options={"epilogue-fusion": False})
    with torch.no_grad():
        torch.compile(Net(), backend=backend)(torch.ones(A, B))
    assert backend.total().macs == 2 * A * B * C


def test_backend_cannot_be_pickled_and_says_why() -> None:
    with pytest.raises(TypeError, match="in each process"):
        pickle.dumps(counting_backend("aot_eager"))


def test_copy_of_a_compiled_model_is_counted_by_the_same_backend() -> None:
    backend = counting_backend("aot_eager")
    compiled = torch.compile(Net(), backend=backend)
    copied = copy.deepcopy(compiled)
    with torch.no_grad():
        compiled(torch.ones(A, B))
        copied(torch.ones(A, B))
    assert backend.total().macs == 2 * 2 * A * B * C


# -- conventions ----------------------------------------------------------------------------------


def test_contractions_only_counts_two_flops_per_mac() -> None:
    model = Net()
    eager = profile_of(train, model, model=model, flops="contractions")
    backend = counting_backend("aot_eager", model, flops="contractions")
    train(torch.compile(model, backend=backend))
    assert backend.total().flops == 2 * backend.total().macs == eager.total().flops
    assert backend.profile().run.flops == "contractions"


def test_causal_half_counts_the_triangle_as_the_counter_does() -> None:
    def attend(q: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.ones(2, 3, 8, 5)
    eager = profile_of(attend, q, causal="half")
    backend = counting_backend("aot_eager", causal="half")
    torch.compile(attend, backend=backend)(q)
    assert backend.total().macs == eager.total().macs == 2 * 3 * 2 * (8 * 9 // 2) * 5


# -- facts of the run -----------------------------------------------------------------------------


def in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


@pytest.mark.parametrize(
    "compile_it", [lambda model, backend: torch.compile(model, backend=backend), in_place]
)
def test_profile_records_the_call_as_the_counter_does(compile_it: Any) -> None:
    model = Net().eval()

    def run(model: Any) -> None:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(A, B))

    eager = profile_of(run, model, model=model, causal="half").run
    backend = counting_backend("aot_eager", model, causal="half")
    run(compile_it(model, backend))
    found = backend.profile().run
    assert found.inputs == eager.inputs and found.inputs is not None
    assert [(tensor.name, tensor.shape) for tensor in found.inputs] == [("x", (A, B))]
    assert (found.training, found.grad_mode, found.autocast) == (False, "inference", "bfloat16")
    assert (found.grad_mode, found.autocast) == (eager.grad_mode, eager.autocast)
    assert (found.causal, found.flops) == (eager.causal, eager.flops) == ("half", "all")


def test_profile_of_a_training_step_records_that_gradients_are_on() -> None:
    model = Net()
    backend = counting_backend("aot_eager", model)
    train(torch.compile(model, backend=backend))
    found = backend.profile().run
    assert (found.training, found.grad_mode, found.autocast) == (True, "grad", None)


def test_profile_of_a_function_that_calls_the_model_records_no_call() -> None:
    model = Net()
    backend = counting_backend("aot_eager", model)
    torch.compile(lambda x: model(x).sum(), backend=backend)(torch.ones(A, B))
    assert backend.profile().run.inputs is None


def own_formula(module: nn.Module, x: Tensor, *, out: Tensor) -> int:
    return 1


@contextmanager
def formula_registered_late(cls: type) -> Iterator[None]:
    register_flops(cls)(own_formula)
    try:
        yield
    finally:
        unregister_flops(cls)


def test_formula_of_a_module_class_that_is_not_asked_is_in_the_profiles_notes() -> None:
    model = Net()
    backend = counting_backend("aot_eager", model)
    train(torch.compile(model, backend=backend))
    with formula_registered_late(nn.Linear):
        with pytest.warns(UncountedWarning, match="operators of module.Linear are counted"):
            profile = backend.profile()
        assert profile.total("forward").macs == 2 * A * B * C
        assert any(note.startswith("module.Linear: its operators") for note in profile.notes)
        plain = counting_backend("aot_eager", model).profile()
        assert not any("module." in note for note in plain.notes)


@pytest.mark.parametrize("read", ["step", "total", "profile"])
def test_formula_of_a_module_class_that_is_not_asked_is_warned_of_once(read: str) -> None:
    backend = counting_backend("aot_eager")
    train(torch.compile(Net(), backend=backend))
    with formula_registered_late(nn.Linear):
        with pytest.warns(UncountedWarning, match="its formula is not asked") as caught:
            getattr(backend, read)()
        assert len(caught) == 1
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            backend.step()
            backend.total()
            backend.profile()


def test_formula_of_a_module_class_that_compiles_itself_is_warned_of_when_registered_late() -> None:
    model = Net()
    backend = counting_backend("aot_eager", model)
    model.compile(backend=backend)
    train(model)
    backend.step()
    with (
        formula_registered_late(Net),
        pytest.warns(UncountedWarning, match="operators of .*Net are counted"),
    ):
        backend.step()


def test_formula_of_a_class_that_is_not_compiled_is_not_warned_of() -> None:
    backend = counting_backend("aot_eager", Net(), custom_mapping={nn.Conv2d: own_formula})
    train(torch.compile(Net(), backend=backend))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend.profile().total("forward").macs == 2 * A * B * C


def test_formula_of_an_operator_that_is_not_composite_is_not_warned_of() -> None:
    mapping = {torch.ops.aten.addmm: lambda *_, out, **__: OpCost(macs=1, flops=2)}
    backend = counting_backend("aot_eager", custom_mapping=mapping)
    with torch.no_grad():
        torch.compile(Net(), backend=backend)(torch.ones(A, B))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend.step().total.macs == 2
