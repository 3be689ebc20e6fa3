"""Module classes with a formula: each call is one operator."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.fx
from torch import Tensor, nn

import dispatch_flops
from dispatch_flops import FlopCounterMode, OpCost
from dispatch_flops.errors import UncountedWarning
from tests.helpers.attributing import rows, train
from tests.helpers.profiling import profile_of
from tests.helpers.threads import in_new_thread
from tests.helpers.untouched import process_state


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5, bias=False)
        self.down = nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor, scale: int = 1) -> Tensor:
        if scale < 0:
            raise ValueError("negative")
        return self.down(self.up(x)) * scale


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x), scale=7) @ self.first.weight


def block_formula(module: Block, x: Tensor, scale: int = 1, *, out: Tensor, **_: Any) -> OpCost:
    assert isinstance(module, Block)
    assert out.shape == x.shape
    return OpCost(macs=1000, flops=2000 + scale)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_opaque_module_under_autocast_has_the_dtype_that_it_computes_in(is_compiled: bool) -> None:
    model, mapping = Whole(), {Block: block_formula}
    backend = dispatch_flops.counting_backend("aot_eager", model, custom_mapping=mapping)
    with torch.autocast("cpu", torch.bfloat16):
        if is_compiled:
            torch.compile(model.block, backend=backend)(rows(2, 3))
            profile = backend.profile()
        else:
            profile = profile_of(model.block, rows(2, 3), model=model, custom_mapping=mapping)
    (op,) = [op for op in profile.node("block").ops if op.op == "module.Block"]
    assert op.dtype == "bfloat16"


class Returns(nn.Module):
    """Returns what it was made with."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self.out = out

    def forward(self, x: Any) -> Any:
        return self.out


REAL = torch.ones(3)


@pytest.mark.parametrize(
    ("x", "out", "dtype"),
    [
        (REAL, (REAL, REAL > 0), "float32"),
        (REAL.bfloat16(), REAL, "bfloat16"),
        (REAL.to(torch.complex64), REAL, "complex64"),
        (3, 5, None),
    ],
)
def test_dtype_of_an_opaque_module_is_the_narrowest_of_its_floating_point_numbers(
    x: Any, out: Any, dtype: str | None
) -> None:
    mapping = {Returns: lambda *_, **__: 0}
    (op,) = profile_of(Returns(out), x, custom_mapping=mapping).op_totals()
    assert op.dtype == dtype


def test_opaque_module_is_one_operator_in_forward() -> None:
    model = Whole()
    profile = profile_of(
        train, model, rows(2, 3), model=model, custom_mapping={Block: block_formula}
    )
    block = profile.node("block")
    (op,) = [op for op in block.ops if op.phase == "forward"]
    assert (op.op, op.kind, op.calls, op.dtype) == ("module.Block", "formula", 1, "float32")
    assert op.cost == OpCost(
        macs=1000, flops=2007, bytes_read=4 * (2 * 3 + 3 * 5 + 5 * 3), bytes_written=4 * 2 * 3
    )
    assert block.total("forward") == op.cost
    assert (profile.node("block.up").calls, profile.root.active_params) == (1, 9 + 15 + 15)
    # Backward is counted as operators, under the modules that made them.
    assert profile.node("block.up").own("backward").macs == 2 * 2 * 3 * 5
    assert profile.root.own("forward").macs == profile.node("first").own("forward").macs


def test_registered_module_class_is_opaque_in_every_counter() -> None:
    dispatch_flops.register_flops(Block)(block_formula)
    try:
        model = nn.Sequential(Block(), Block())
        profile = profile_of(model, rows(2, 3), model=model)
    finally:
        dispatch_flops.unregister_flops(Block)
    assert profile.total().macs == 2 * 1000
    assert profile_of(model, rows(2, 3)).total().macs == 2 * 2 * (2 * 3 * 5)


@pytest.mark.parametrize(
    ("computes_in", "dtype"),
    [
        (lambda arguments: arguments["x"].dtype, "float32"),
        (lambda arguments: arguments["self"].up.weight.dtype, "float16"),
        (lambda arguments: arguments["out"].dtype, "bfloat16"),
    ],
)
def test_dtype_of_an_opaque_module_may_follow_from_its_arguments_and_its_result(
    computes_in: Callable[[Mapping[str, Any]], torch.dtype], dtype: str
) -> None:
    dispatch_flops.register_flops(Block, computes_in=computes_in)(block_formula)
    block = Block().half()
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found = profile_of(lambda: block(torch.ones(2, 3)))
    finally:
        dispatch_flops.unregister_flops(Block)
    assert found.by_operator()["module.Block"].dtype == dtype


def test_opaque_modules_leave_no_hooks_behind() -> None:
    """torch keeps an entry of removed hooks with keyword arguments, which compiled code sees."""
    model = nn.Sequential(Block())
    before = process_state()
    profile_of(model, rows(2, 3), custom_mapping={Block: block_formula})
    assert process_state() == before
    with pytest.raises(ValueError, match="negative"):
        profile_of(lambda: model[0](rows(2, 3), -1), custom_mapping={Block: block_formula})
    assert process_state() == before


def test_opaque_module_within_an_opaque_module_is_not_counted() -> None:
    """The cost of an opaque module already includes the modules that it calls."""
    model = nn.Sequential(Whole(), nn.Linear(3, 7, bias=False))
    mapping = {Block: block_formula, Whole: lambda module, x, **_: OpCost(macs=5, flops=10)}
    profile = profile_of(model, rows(2, 3), model=model, custom_mapping=mapping)
    assert {n.fqn: n.own().macs for n in profile.nodes() if n.own().macs} == {
        "0": 5,
        "1": 2 * 3 * 7,
    }


def test_opaque_module_that_calls_itself_is_counted_once() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Linear(5, 5, bias=False)

        def forward(self, x: Tensor, depth: int) -> Tensor:
            return self.step(self(x, depth - 1) if depth else x) @ self.step.weight

    model = Tree()
    mapping = {Tree: lambda module, x, depth, **_: OpCost(macs=10**depth, flops=2 * 10**depth)}
    profile = profile_of(model, rows(2, 5), 3, model=model, custom_mapping=mapping)
    assert (profile.total().macs, profile.root.calls) == (10**3, 4)


def test_opaque_module_in_a_checkpoint_is_recomputed() -> None:
    from torch.utils.checkpoint import checkpoint

    model = Block()

    def call() -> None:
        x = rows(2, 3, grad=True)
        checkpoint(model, x, use_reentrant=False, early_stop=False).sum().backward()

    profile = profile_of(call, model=model, custom_mapping={Block: block_formula})
    assert [profile.total(phase).macs for phase in ("forward", "recompute", "backward")] == [
        1000, 1000, 2 * 2 * (2 * 3 * 5),
    ]  # fmt: skip


def test_part_of_an_opaque_module_that_a_checkpoint_recomputes_is_counted_as_operators() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(Block(), Block())

    def call() -> None:
        checkpoint(model, rows(2, 3, grad=True), use_reentrant=False).sum().backward()

    profile = profile_of(call, model=model, custom_mapping={Block: block_formula})
    # Backward needs the result of the first block, and in the second the input of ``down``.
    assert profile.node("0").total("recompute").macs == 1000
    assert profile.node("1.up").own("recompute").macs == 2 * 3 * 5
    assert profile.node("1.down").own("recompute").macs == 0
    assert "module.Block" not in [op.op for op in profile.node("1").ops if op.phase == "recompute"]


def test_opaque_module_within_a_gradient_of_torch_func_is_one_operator() -> None:
    model = nn.Sequential(Block())
    gradient = torch.func.grad(lambda x: model(x).sum())
    profile = profile_of(gradient, rows(2, 3), model=model, custom_mapping={Block: block_formula})
    assert profile.total("forward").macs == 1000
    assert profile.total("backward").macs == 2 * (2 * 3 * 5)
    assert not profile.uncounted_ops()


def test_opaque_module_within_vmap_is_counted_as_operators_with_a_warning() -> None:
    """Its formula would be given the shapes of one sample."""
    model = Block()
    with pytest.warns(UncountedWarning, match=r"module\.Block .* not asked: .*vmap") as caught:
        profile = profile_of(
            lambda: [torch.func.vmap(model)(rows(4, 3)) for _ in range(2)],
            model=model,
            custom_mapping={Block: block_formula},
        )
    assert profile.total().macs == 2 * 2 * (4 * 3 * 5)
    assert len(caught) == 1


def test_opaque_module_whose_call_raises_is_not_counted() -> None:
    model = nn.ModuleList([Block(), nn.Linear(3, 5, bias=False)])

    def call() -> None:
        with pytest.raises(ValueError, match="negative"):
            model[0](rows(2, 3), scale=-1)
        model[1](rows(2, 3))
        model[0](rows(2, 3))

    profile = profile_of(call, model=model, custom_mapping={Block: block_formula})
    assert [n.own().macs for n in profile.root.children] == [1000, 2 * 3 * 5]
    assert profile.by_operator()["module.Block"].calls == 1


def test_opaque_module_that_raises_after_its_operators_is_not_counted() -> None:
    class Failing(Block):
        def forward(self, x: Tensor, scale: int = 1) -> Tensor:
            super().forward(x)
            raise ValueError("late")

    def call() -> None:
        with pytest.raises(ValueError, match="late"):
            Failing()(rows(2, 3))

    assert profile_of(call, custom_mapping={Failing: whole}).total().macs == 0


def test_opaque_module_that_is_interrupted_is_counted_the_next_time() -> None:
    """No hook runs at the end of the first call."""

    class Interrupted(Block):
        calls = 0

        def forward(self, x: Tensor, scale: int = 1) -> Tensor:
            Interrupted.calls += 1
            if Interrupted.calls == 1:
                raise KeyboardInterrupt
            return super().forward(x)

    model, x = nn.Sequential(nn.Linear(3, 3, bias=False), Interrupted()), rows(2, 3)
    with FlopCounterMode(model, display=False, custom_mapping={Interrupted: whole}) as counter:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model(x)
    assert counter.get_total_macs() == 2 * (2 * 3 * 3) + 17 * 2 * 3


def test_opaque_module_with_a_formula_that_raises_is_uncounted() -> None:
    def broken(module: nn.Module, *args: Any, **kwargs: Any) -> OpCost:
        raise ZeroDivisionError("oh")

    model = Block()
    with pytest.warns(UncountedWarning, match=r"module\.Block"):
        profile = profile_of(model, rows(2, 3), model=model, custom_mapping={Block: broken})
    assert profile.formula_errors() == {"module.Block": "ZeroDivisionError: oh"}


def test_opaque_module_that_returns_a_dataclass_writes_its_tensors() -> None:
    @dataclasses.dataclass
    class Output:
        logits: Tensor
        name: str = "x"

    class Head(nn.Module):
        def forward(self, x: Tensor) -> Output:
            return Output(logits=x.new_ones(7, 11))

    mapping = {Head: lambda module, x, *, out: OpCost(flops=1)}
    profile = profile_of(Head(), rows(2, 3), custom_mapping=mapping)
    assert profile.total().bytes_written == 7 * 11 * 4


def whole(module: nn.Module, x: Tensor, *, out: Tensor, **_: Any) -> OpCost:
    """Formula with 17 MACs for each element of the result."""
    return OpCost(macs=17 * out.numel(), flops=35 * out.numel())


def test_formula_that_is_overridden_in_the_block_acts_there_and_in_that_thread_alone() -> None:
    model, x = Block(), rows(2, 3)
    product, stated = 2 * (2 * 3 * 5), 17 * 2 * 3
    found = []

    def in_other_thread(counter: FlopCounterMode) -> None:
        with counter.in_thread():
            model(x)

    with FlopCounterMode(display=False) as counter:
        model(x)
        found.append(counter.profile.total().macs)
        with dispatch_flops.overridden({Block: whole}):
            model(x)
            found.append(counter.profile.total().macs)
            thread = threading.Thread(target=in_other_thread, args=(counter,))
            thread.start()
            thread.join()
            found.append(counter.profile.total().macs)
        model(x)
    found.append(counter.profile.total().macs)
    assert found == [
        product, product + stated, 2 * product + stated, 3 * product + stated
    ]  # fmt: skip


def test_formula_that_is_registered_in_the_block_acts_until_it_is_taken_back() -> None:
    model, x = Block(), rows(2, 3)
    before = process_state()
    with FlopCounterMode(display=False) as counter:
        dispatch_flops.register_flops(Block)(whole)
        try:
            model(x)
        finally:
            dispatch_flops.unregister_flops(Block)
        model(x)
    assert counter.profile.total().macs == 17 * 2 * 3 + 2 * (2 * 3 * 5)
    assert process_state() == before


def test_hooks_are_installed_once_as_soon_as_a_class_has_a_formula() -> None:
    """Where there are others than the counter's, each call of a layer is dispatched."""

    def hooks() -> int:
        return len(nn.modules.module._global_forward_hooks)

    before = hooks()
    with FlopCounterMode(display=False):
        found = [hooks()]
        with dispatch_flops.overridden({Block: whole}):
            found.append(hooks())
            with dispatch_flops.overridden({Whole: whole}):
                found.append(hooks())
    assert found == [before + 1, before + 2, before + 2]


def test_formula_acts_again_after_a_pause() -> None:
    model, x = Block(), rows(2, 3)
    with FlopCounterMode(display=False, custom_mapping={Block: whole}) as counter:
        counter.pause()
        counter.resume()
        model(x)
    assert counter.get_total_macs() == 17 * 2 * 3


def test_call_in_a_thread_that_did_not_join_is_left_alone() -> None:
    model, x = Block(), rows(2, 3)
    with FlopCounterMode(display=False, custom_mapping={Block: whole}) as counter:
        assert in_new_thread(model, x).shape == x.shape
    assert counter.get_total_macs() == 0


def test_operators_that_a_formula_runs_are_not_counted() -> None:
    def formula(module: nn.Module, x: Tensor, *, out: Tensor) -> OpCost:
        return OpCost(flops=17 * (x @ x.new_empty(3, 7)).numel())

    profile = profile_of(Block(), rows(2, 3), custom_mapping={Block: formula})
    assert [*profile.by_operator()] == ["module.Block"]
    assert profile.total().flops == 17 * 2 * 7


def test_formula_that_is_taken_back_within_a_call_still_counts_it() -> None:
    class Ending(Block):
        def forward(self, x: Tensor, scale: int = 1) -> Tensor:
            dispatch_flops.unregister_flops(Ending)
            return super().forward(x, scale)

    dispatch_flops.register_flops(Ending)(whole)
    assert profile_of(Ending(), rows(2, 3)).total().macs == 17 * 2 * 3


def test_formula_of_a_class_acts_on_modules_that_are_parametrized() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 5))
    assert type(layer) is not nn.Linear
    profile = profile_of(layer, rows(2, 3), custom_mapping={nn.Linear: whole})
    assert profile.total().macs == 17 * 2 * 5
    assert profile.by_operator()["module.Linear"].calls == 1


def test_formula_of_a_class_acts_on_modules_that_are_sharded() -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        block = Block()
        torch.distributed.fsdp.fully_shard(block)
        assert type(block) is not Block
        profile = profile_of(block, rows(2, 3), custom_mapping={Block: whole})
    finally:
        torch.distributed.destroy_process_group()
    assert profile.total().macs == 17 * 2 * 3


@pytest.mark.parametrize("trace", ["torch.fx", "torch.export"])
def test_formula_of_a_module_that_is_traced_into_a_graph_is_not_asked(trace: str) -> None:
    model, x = nn.Sequential(Block(), nn.Linear(3, 7)), rows(2, 3)
    graph = (
        torch.fx.symbolic_trace(model)
        if trace == "torch.fx"
        else torch.export.export(model, (x,)).module()
    )
    mapping = {Block: whole}
    with pytest.warns(UncountedWarning, match=r"module\.Block .* not asked: .*traced into a graph"):
        profile = profile_of(lambda: [graph(x), graph(x)], custom_mapping=mapping)
    assert profile.total().macs == 2 * (2 * (2 * 3 * 5) + 2 * 3 * 7)
    assert any(note.startswith("module.Block: ") for note in profile.notes)


def test_graph_that_was_called_before_the_formula_was_registered_is_read_again() -> None:
    graph, x = torch.fx.symbolic_trace(nn.Sequential(Block())), rows(2, 3)
    with FlopCounterMode(display=False, custom_mapping={nn.GELU: whole}):
        graph(x)
        with (
            dispatch_flops.overridden({Block: whole}),
            pytest.warns(UncountedWarning, match=r"module\.Block .* traced into a graph"),
        ):
            graph(x)


def test_formula_of_a_module_that_a_graph_calls_is_asked() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 7)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncountedWarning)
        profile = profile_of(graph, rows(2, 3), custom_mapping={nn.Linear: whole})
    assert profile.total().macs == 17 * 2 * 7
