"""The meter of a model that changes in mid-run, and of compiled code that meets new shapes."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopMeter

B, IN, HID, OUT = 2, 3, 5, 7
# Torch 2.11 runs a module with a hook that it cannot trace as eager code.
COMPILES_AROUND_HOOKS = TorchVersion(torch.__version__) >= (2, 13)


def linears(*sizes: int) -> nn.Sequential:
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairs))


def step_flops(rows: int, *sizes: int) -> int:
    """Return the FLOPs of forward, sum and backward: the first input has no gradient."""
    products = [a * b for a, b in itertools.pairwise(sizes)]
    return 2 * rows * (3 * sum(products) - products[0]) + rows * sizes[-1] - 1


def run(model: nn.Module, rows: int = B, width: int = IN) -> None:
    model(torch.ones(rows, width)).sum().backward()
    model.zero_grad()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not _get_current_dispatch_mode_stack()
    torch._dynamo.reset()


def test_module_replaced_in_mid_run_has_its_own_cost() -> None:
    model = linears(IN, HID, OUT)
    meter, first, exact = FlopMeter(model, verify_every=0), model[1], 0
    for wide in (False, False, True, True, False, True):
        model[1] = nn.Linear(HID, 11, bias=False) if wide else first
        with meter.step():
            run(model)
        exact += step_flops(B, IN, HID, 11 if wide else OUT)
        # What runs before the first call of a model is known when it is called again.
        assert meter.is_estimate is (meter.steps_done > 2)
    assert meter.total_flops == exact
    assert meter.run.timed_steps == 1  # the second; before the fifth's call all is counted


def test_module_without_parameters_that_is_replaced_has_its_own_cost() -> None:
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    meter = FlopMeter(model, verify_every=0)
    for step in range(6):
        if step == 3:
            model[0] = nn.ReLU()
        with meter.step(), torch.no_grad():
            model(torch.ones(B, IN))
    assert meter.total_flops == 3 * B * IN + 3 * 2 * B * IN


def test_module_added_in_mid_run_is_counted() -> None:
    model = linears(IN, IN)
    meter = FlopMeter(model, verify_every=0)
    for step in range(6):
        if step == 3:
            model.append(nn.Linear(IN, OUT, bias=False))
        with meter.step():
            run(model)
    assert meter.total_flops == 3 * step_flops(B, IN, IN) + 3 * step_flops(B, IN, IN, OUT)


def test_parameters_of_an_added_module_are_followed() -> None:
    """Whether they require a gradient belongs to the signature, as for any parameter."""
    model = linears(IN, HID)
    meter = FlopMeter(model, verify_every=0)
    with meter.step():
        run(model)
    model.append(nn.Linear(HID, OUT, bias=False))
    for frozen in (False, True, False, True):
        model[1].requires_grad_(not frozen)
        with meter.step():
            run(model)
    frozen_flops = step_flops(B, IN, HID, OUT) - 2 * B * HID * OUT
    exact = step_flops(B, IN, HID) + 2 * step_flops(B, IN, HID, OUT) + 2 * frozen_flops
    assert meter.total_flops == exact


def test_module_that_was_replaced_is_not_kept_alive() -> None:
    model = linears(IN, HID, OUT)
    meter = FlopMeter(model, verify_every=0)
    with meter.step():
        run(model)
    old = weakref.ref(model[1])
    model[1] = nn.Linear(HID, OUT, bias=False)
    with meter.step():
        run(model)
    gc.collect()
    assert old() is None


class Checkpointed(nn.Module):
    """Recomputes its layers while ``recomputes`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(IN, HID, OUT)

    def forward(self, x: torch.Tensor) -> Any:
        if vars(self).get("recomputes", False):
            return checkpoint(self.layers, x, use_reentrant=False)
        return self.layers(x)


def test_flag_of_a_module_belongs_to_the_signature() -> None:
    """Recomputation ends with the last tensor that backward needs, the output of layer 0."""
    model = Checkpointed()
    meter = FlopMeter(model, verify_every=0)
    for recomputes in (None, False, False, True, True, False, True):
        if recomputes is not None:
            model.recomputes = recomputes
        with meter.step():
            run(model)
    assert meter.model_flops == 7 * step_flops(B, IN, HID, OUT)
    assert meter.run.costs["recompute"].flops == 3 * 2 * B * IN * HID
    assert not meter.is_estimate


def test_pruning_in_mid_run_is_counted() -> None:
    """The weight is then the product of a parameter and a mask, which a hook computes."""
    model = nn.Sequential(nn.Linear(IN, OUT))
    meter = FlopMeter(model, verify_every=0)
    for step in range(6):
        if step == 3:
            prune.l1_unstructured(model[0], "weight", amount=0.5)
        with meter.step(), torch.no_grad():
            model(torch.ones(B, IN))
    assert meter.total_flops == 6 * (2 * B * IN * OUT + B * OUT) + 3 * IN * OUT
    assert meter.run.timed_steps == 6 - 2 - 1  # the pruned model is counted when it comes again


def test_forward_of_a_module_that_is_replaced_is_counted() -> None:
    model = nn.Sequential(nn.ReLU())
    meter = FlopMeter(model, verify_every=0)
    for is_replaced in (False, False, True, True, False):
        if is_replaced:
            model[0].forward = lambda x: x * x + x
        else:
            vars(model[0]).pop("forward", None)
        with meter.step(), torch.no_grad():
            model(torch.ones(B, IN))
    assert meter.total_flops == (3 + 2 * 2) * B * IN
    assert meter.run.timed_steps == 5 - 2 - 1  # as above


@pytest.mark.parametrize("is_scripted", [False, True])
def test_dtype_of_the_model_belongs_to_the_signature(*, is_scripted: bool) -> None:
    """Inputs such as ids do not show it."""
    model: Any = nn.Sequential(nn.Embedding(11, IN), nn.Linear(IN, OUT, bias=False))
    model = torch.jit.script(model) if is_scripted else model
    meter = FlopMeter(model, verify_every=0)
    for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.bfloat16):
        model.to(dtype)
        with meter.step(), torch.no_grad():
            model(torch.arange(B))
    by_dtype = {op.dtype: op.cost.flops for op in meter.run.operators if op.cost and op.cost.flops}
    products = 2 * B * IN * OUT
    assert by_dtype == {"float32": 2 * products, "bfloat16": 2 * products, "float64": products}
    assert not meter.is_estimate


def test_training_flag_of_a_scripted_module_belongs_to_the_signature() -> None:
    model = nn.Sequential(torch.jit.script(nn.Dropout()), nn.Linear(IN, OUT, bias=False))
    meter, multiplications = FlopMeter(model, verify_every=0), 2 * B * IN
    for is_training in (True, False, True, False):
        model[0].train(is_training)
        with meter.step(), torch.no_grad():
            model(torch.ones(B, IN))
    assert meter.total_flops == 4 * 2 * B * IN * OUT + 2 * multiplications


def test_frozen_scripted_module_has_no_training_flag() -> None:
    model = torch.jit.freeze(torch.jit.script(linears(IN, OUT).eval()))
    meter = FlopMeter(model)
    for _ in range(3):
        with meter.step(), torch.no_grad():
            model(torch.ones(B, IN))
    assert meter.total_flops == 3 * 2 * B * IN * OUT


def test_batches_of_vmap_belong_to_the_signature() -> None:
    """Inside vmap the model sees one row, whatever the number of rows."""
    model = linears(IN, OUT)
    meter = FlopMeter(model, verify_every=0)
    for rows in (2, 11, 2, 13):
        with meter.step(), torch.no_grad():
            torch.func.vmap(model)(torch.ones(rows, IN))
    assert meter.total_flops == (2 + 11 + 2 + 13) * 2 * IN * OUT


@pytest.mark.parametrize("started", [False, True])
def test_step_of_another_optimizer_than_the_given_one_is_counted(started: bool) -> None:
    """That the given one steps ends a step of a meter that was started."""
    model = linears(IN, HID, OUT)
    given, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in model)
    meter, both = FlopMeter(model, given, verify_every=0), 0

    def train(step: int) -> None:
        model(torch.ones(B, IN)).sum().backward()
        if step % 2:
            other.step()
        given.step()

    if started:
        meter.start()
    for step in range(6):
        model.zero_grad()
        if started:
            train(step)
        else:
            with meter.step():
                train(step)
        both += 2 * IN * HID + (2 * HID * OUT if step % 2 else 0)
    meter.stop()
    assert meter.run.costs["optimizer"].flops == both
    assert meter.run.steps == 6
    assert not given._optimizer_step_pre_hooks
    assert not other._optimizer_step_pre_hooks


@pytest.fixture
def quick_collection() -> Iterator[None]:
    """Let ``gc.collect`` look at the objects of the test alone."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick_collection")
def test_optimizer_at_the_address_of_one_that_is_gone_has_its_own_cost() -> None:
    """Each trains another layer, as where layers are drawn at random. Few addresses are used."""
    model, addresses, updated = linears(IN, HID, OUT), set(), 0
    meter = FlopMeter(model, verify_every=0)
    for index in range(40):
        layer = model[index % 2]
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        addresses.add(id(optimizer))
        for _ in range(4):
            with meter.step():
                model(torch.ones(B, IN)).sum().backward()
                optimizer.step()
            updated += 2 * layer.weight.numel()
            model.zero_grad()
        del optimizer
        gc.collect()
    assert len(addresses) < 40
    assert meter.run.costs["optimizer"].flops == updated
    assert meter.total_flops == 160 * step_flops(B, IN, HID, OUT) + updated
    assert not meter.is_estimate
    assert meter.run.timed_steps >= 120


def test_optimizers_that_live_at_once_over_equal_shapes_are_told_apart() -> None:
    """What follows the step of one is not what follows the step of the other."""
    model = linears(IN, IN, IN)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in model]
    meter = FlopMeter(model, verify_every=0)
    for index in range(20):
        with meter.step():
            model(torch.ones(B, IN)).sum().backward()
            optimizers[index % 2].step()
            if index % 2:
                torch.ones(HID).exp()
        model.zero_grad()
    updates = 20 * 2 * IN * IN
    assert meter.total_flops == 20 * step_flops(B, IN, IN, IN) + updates + 10 * HID
    assert not meter.is_estimate


def test_optimizers_of_each_step_are_told_apart_by_parameters_that_are_still_there() -> None:
    model = linears(IN, IN, IN)
    meter = FlopMeter(model, verify_every=0)
    for index in range(20):
        optimizer = torch.optim.SGD(model[index % 2].parameters(), lr=0.1)
        with meter.step():
            model(torch.ones(B, IN)).sum().backward()
            optimizer.step()
            if index % 2:
                torch.ones(HID).exp()
        model.zero_grad()
    updates = 20 * 2 * IN * IN
    assert meter.total_flops == 20 * step_flops(B, IN, IN, IN) + updates + 10 * HID


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_optimizer_may_have_parameters_without_a_shape() -> None:
    model, rows = linears(IN, OUT), [torch.ones(2, IN), torch.ones(3, IN)]
    nested = nn.Parameter(torch.nested.nested_tensor(rows))
    optimizer = torch.optim.SGD([*model.parameters(), nested], lr=0.1)
    meter = FlopMeter(model)
    with meter.step():
        model(torch.ones(B, IN)).sum().backward()
        optimizer.step()
    assert meter.total_flops == step_flops(B, IN, OUT) + 2 * IN * OUT


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copy_of_a_meter_continues_the_totals(copied: Callable[[Any], Any]) -> None:
    model = linears(IN, OUT)
    meter = FlopMeter(model, window=3)
    with meter.step():
        run(model)
    other = copied(meter)
    for _ in range(2):
        with other.step():
            run(other._model)
    assert other.total_flops == 3 * step_flops(B, IN, OUT)
    assert meter.total_flops == step_flops(B, IN, OUT)
    assert other.window.steps == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copy_of_a_model_has_a_meter_of_its_own(copied: Callable[[Any], Any]) -> None:
    """While the meter is copied, the copy of the model has no modules yet."""
    model = linears(IN, OUT)
    model.meter = FlopMeter(model)
    with model.meter.step():
        run(model)
    other = copied(model)
    with other.meter.step():
        run(other)
    assert other.meter.total_flops == 2 * step_flops(B, IN, OUT)
    assert model.meter.total_flops == step_flops(B, IN, OUT)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copy_of_a_meter_has_its_settings_of_now(copied: Callable[[Any], Any]) -> None:
    meter = FlopMeter(linears(IN, OUT), verify_every=3)
    meter.verify_every, meter.is_timed = 7, False
    other = copied(meter)
    assert (other.verify_every, other.is_timed) == (7, False)


# -- compiled code ----------------------------------------------------------------------------


def compile_as(way: str, model: nn.Module, compiled: list[Any]) -> nn.Module:
    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    if way == "in place":
        model.compile(backend=backend)
        return model
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


@pytest.mark.parametrize("way", ["in place", "wrapped"])
@pytest.mark.parametrize("order", ["2 2 11 2 11 11", "2 11 2 11 2 11", "2 2 2 11 13 11 13"])
def test_new_shape_of_compiled_code_is_counted_when_it_comes_again(way: str, order: str) -> None:
    """Counting cannot start in a call of compiled code: a later step is counted as a whole."""
    model, compiled, exact = linears(IN, HID, OUT), list[Any](), 0
    called = compile_as(way, model, compiled)
    meter = FlopMeter(model, verify_every=0)
    for rows in map(int, order.split()):
        with meter.step():
            run(called, rows)
        exact += step_flops(rows, IN, HID, OUT)
    assert meter.total_flops == exact
    assert not meter.is_estimate
    assert meter.run.timed_steps > 0
    before = len(compiled)
    with meter.step():
        run(called, rows)
    assert before == len(compiled)
    assert (before > 0) is COMPILES_AROUND_HOOKS
    assert meter.run.timed_steps > 1


def test_shape_that_compiled_code_meets_once_makes_an_estimate() -> None:
    model = linears(IN, OUT)
    called = compile_as("wrapped", model, [])
    meter = FlopMeter(model, verify_every=0)
    for rows in (B, B, 11, *(B,) * 20):
        with meter.step():
            run(called, rows)
    assert meter.is_estimate
    assert meter.run.timed_steps == 23 - 1 - 10  # it gives up after ten steps
    assert meter.last_step.total_flops == step_flops(B, IN, OUT)


def test_meter_started_on_a_model_that_compiled_code_calls_warns() -> None:
    model = linears(IN, OUT)
    called = compile_as("wrapped", model, [])
    meter = FlopMeter(model)
    meter.start()
    with pytest.warns(UserWarning, match="compiled code calls the model") as caught:
        for _ in range(3):
            run(called)
    meter.stop()
    assert [found.filename for found in caught] == [__file__]
    assert meter.is_estimate
